"""The supervisor process, `rayloom-engine serve`: owns the listening sockets and restarts the other processes.

supervisor  the loop: starts the processes, restarts them within a budget, stops them
child       one supervised process: its signs of life and its restarts
prepared    a core that imports its modules while the supervisor reads the settings
spawn       starts a process
sockets     the listening sockets and the run folder, which outlive the other processes
"""

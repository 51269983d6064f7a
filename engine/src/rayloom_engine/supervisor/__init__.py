"""The supervisor process, `rayloom-engine serve`: owns the listening sockets and restarts the other processes.

supervisor  the loop: starts, restarts with a budget, stops
child       one supervised process: its signs of life and its restarts
sockets     ports and the run folder, made before any child starts
"""

"""The EngineCore process ("core"): owns the scheduler. API server processes ("fronts") and workers ("ranks") connect to
it.

process     starts the EngineCore
context, state  what its threads share; run_folder: files that the next EngineCore process reads
sockets     the I/O thread; loop: the main thread
recovery    serves on ranks that may be lost; black_box: finds the sequence that caused a death
ranks/      the connections to the ranks: attaches and assembles them, runs plans, finds the rank that hangs
"""

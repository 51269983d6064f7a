"""The EngineCore process ("core"): owns the scheduler.

API server processes ("fronts") and workers ("ranks") connect to it.

process     starts the EngineCore
context     the objects that the process consists of
state       values that the threads of the process share
run_folder  files that the next EngineCore process reads
sockets     the I/O thread
loop        the main thread
recovery    rebuilds the engine after the loss of a rank
black_box   records the sequences in flight, to find a sequence that crashes the engine
ranks/      the connections to the ranks: attaches and assembles them, runs plans, finds the rank that hangs
"""

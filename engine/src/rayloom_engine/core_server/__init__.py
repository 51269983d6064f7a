"""The EngineCore process ("core"): owns the scheduler; API server processes ("fronts") connect to it, and so do workers
("ranks").

process   starts it; context, state, run_folder: the parts that its threads and its successors share
sockets   the I/O thread; loop: the main thread
recovery  serving on ranks that may be lost; black_box: which sequence a death is held against
ranks/    the EngineCore's side of its ranks: attach, assemble, run plans, find the rank that hangs
"""

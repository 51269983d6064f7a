"""The last import of a fork server of tests: exempts the objects of all earlier imports from garbage collection.

Without this, each fork would visit, and so copy, all of these objects. This takes 60 ms of CPU time in an operator, and
several times as long in a rank, whose fork server has imported torch.
"""

import gc

gc.collect()
gc.freeze()

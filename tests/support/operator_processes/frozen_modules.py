"""The last import of the operators' fork server: exempts all modules imported before from garbage collections.

Without this, each forked operator would visit all objects of these modules at its start. This takes 60 ms of CPU time.
"""

import gc

gc.collect()
gc.freeze()

"""The last import of the fork server of operators: exempts all modules that it has imported from garbage collections.

Otherwise each forked operator would visit all objects of these modules at its start, which takes 60 ms of CPU time.
"""

import gc

gc.collect()
gc.freeze()

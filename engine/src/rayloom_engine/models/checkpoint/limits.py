"""The largest sizes in a model, and the largest files, that the engine accepts.

A model's files come from strangers. A size in these files is checked against the limits before code uses the size for a
loop or an allocation. The operator checks the facts of an inspection against the same limits.
"""

from __future__ import annotations

MAX_LAYERS = 1000
MAX_HEADS = 4096
MAX_EXPERTS = 1 << 16  # of all layers together
MAX_SIZE = 1 << 22  # hidden size, size of the feed-forward part, head size
MAX_VOCAB = 1 << 24
MAX_POSITIONS = 1 << 30  # context and windows, in tokens
MAX_PARAMETERS = 1 << 50  # a thousand times the largest models; JSON numbers are exact up to 2^53

MAX_ROPE_THETA = 1e15
MAX_ROPE_FACTOR = 1e6
MAX_NORM_EPS = 1.0
MAX_EOS_IDS = 1024

MAX_JSON_BYTES = 64 << 20  # limit in `read_json`; the longest file is the weights' index, about 100 bytes per tensor
MAX_NAME_BYTES = 255  # bytes of a file name; every usual file system has this limit

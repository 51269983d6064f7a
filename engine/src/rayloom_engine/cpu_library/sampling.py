"""The structures of sampling in csrc/cpu/rayloom_cpu.h, and their functions.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from ctypes import CDLL, POINTER, Structure, c_int, c_int32, c_int64, c_void_p

import numpy as np

# The type rl_sampling. An array of this type has one element for each row. Pointers are integers.
SAMPLING = np.dtype(
    [
        ("seed", np.uint64),
        ("token_ids", np.uintp),
        ("num_prompt_tokens", np.int64),
        ("num_tokens", np.int64),
        ("allowed", np.uintp),
        ("banned_ids", np.uintp),
        ("bias_ids", np.uintp),
        ("biases", np.uintp),
        ("num_banned", np.int64),
        ("num_biases", np.int64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("temperature", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
    ]
)


class LogprobsStruct(Structure):
    """rl_logprobs: the arrays to which the library writes log-probabilities."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("num_top", c_void_p),
        ("top_stride", c_int64),
        ("logprobs", c_void_p),
        ("ranks", c_void_p),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
    )


def declare_sampling(library: CDLL) -> None:
    """Declares the types of the functions, so that ctypes converts and checks their arguments."""
    library.rl_sample.argtypes = [c_void_p, c_void_p, c_int32, c_int32, c_void_p]
    library.rl_sample.restype = c_int
    library.rl_describe.argtypes = [c_void_p, c_int32, c_int32, POINTER(LogprobsStruct)]
    library.rl_describe.restype = c_int

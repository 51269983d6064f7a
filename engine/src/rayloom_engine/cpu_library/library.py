"""CpuLibrary: the functions of the C library, called with numpy arrays.

Every array must be contiguous. bfloat16 numbers are in arrays of uint16 (arrays.py). A call releases the interpreter's
lock, so that other threads can run, such as a thread that reports progress. Calls of several threads wait for each
other.

Legend: T tokens of the step, N rows, D model width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rayloom_engine.cpu_library.arrays import ELEMENTS, Array, ElementType, address, element_type
from rayloom_engine.cpu_library.grouped import GroupedForm, GroupedWeights, MatrixVectors, groups_of
from rayloom_engine.cpu_library.memory import PackedMemory
from rayloom_engine.cpu_library.sampling import LogprobsStruct, declare_sampling
from rayloom_engine.cpu_library.structures import (
    BatchStruct,
    DecoderStruct,
    LinearStruct,
    declare_functions,
)

_CODES: dict[ElementType, int] = {"float32": 0, "bfloat16": 1}  # RL_FLOAT32, RL_BFLOAT16
_UINT8 = np.dtype(np.uint8)

# Phases of a layer whose time the library measures (RL_PHASE_NORM and the following).
PHASES = ("norm", "qkv", "rotary, KV write", "attention", "out", "gate, up", "down")

_LOCK = threading.Lock()  # the state of the C library belongs to the process: instruction set, threads, buffers


class Int8Matrix(NamedTuple):
    """A quantised matrix [N, K]. Row n is scales_N[n] times integers from -127 to 127."""

    packed_NK: npt.NDArray[np.uint8]  # in the layout of the products; opaque
    scales_N: npt.NDArray[np.float32]


class LibraryFunctions:
    """The functions of the loaded library, before an instruction set is chosen."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file does not fit this system."""
        self.calls = ctypes.CDLL(str(path))
        self.build = _build_of(path)
        declare_functions(self.calls)
        declare_sampling(self.calls)
        self.instruction_sets: tuple[str, ...] = tuple(self.calls.rl_instruction_sets().decode().split())


def _build_of(path: Path) -> str:
    """Returns twelve digits that identify the code of the library: a hash of its file. Takes about 1 ms.

    The sources and the compiler's flags alone do not identify the code, because compilers differ in their use of fused
    multiplications, and so in the rounding of sums.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


class _Chosen:
    """A context in which no other thread calls the library, and which sets the library's instruction set.

    A class takes less time than a generator, and a step enters the context five times.
    """

    def __init__(self, functions: LibraryFunctions, instruction_set: str) -> None:
        self._choose = functions.calls.rl_choose
        self._encoded = instruction_set.encode()

    def __enter__(self) -> None:
        _LOCK.acquire()
        self._choose(self._encoded)

    def __exit__(self, *error: object) -> None:
        _LOCK.release()


class CpuLibrary:
    """The library with one instruction set, one of `LibraryFunctions.instruction_sets`."""

    def __init__(self, functions: LibraryFunctions, instruction_set: str) -> None:
        assert instruction_set in functions.instruction_sets, instruction_set
        self.instruction_set = instruction_set
        self.build = functions.build
        self.num_threads = 1
        self.is_pinned = False
        self._functions = functions.calls
        self._chosen = _Chosen(functions, instruction_set)
        self._memory = PackedMemory()
        with self._chosen:
            self._operand_bytes = {dtype: int(self._functions.rl_operand_bytes(code)) for dtype, code in _CODES.items()}

    @property
    def description(self) -> str:
        """Describes the instruction set and the threads, for the log."""
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return f"{self.instruction_set}, {threads}, {'pinned' if self.is_pinned else 'not pinned'}"

    def start_threads(self, num_threads: int, *, pin: bool) -> None:
        """Starts the thread pool, or changes the number of its threads. Raises OSError if a thread cannot start."""
        with _LOCK:
            error = self._functions.rl_start_threads(num_threads, pin)
        if error:
            raise OSError(error, f"{num_threads} compute threads: {os.strerror(error)}")
        self.num_threads = num_threads
        self.is_pinned = pin

    def operand_dtype(self, dtype: ElementType) -> ElementType:
        """Returns the type of the activations that are multiplied by weights of this type."""
        return "float32" if self._operand_bytes[dtype] == 4 else dtype

    def pack(self, weight: Array, memory: PackedMemory | None = None) -> Array:
        """Returns a copy of the matrix in the layout of the products.

        Shape and type (float32 or bfloat16) are the same; the content is opaque. `memory`: the memory in which the copy
        is allocated; None: the memory of the model's weights.
        """
        num_outputs, num_inputs = weight.shape
        num_elements = self._functions.rl_packed_elements(num_outputs, num_inputs)
        packed = (memory or self._memory).empty(num_elements, weight.dtype)
        with self._chosen:
            self._functions.rl_pack_weight(
                _CODES[element_type(weight)], address(weight), address(packed), num_outputs, num_inputs
            )
        return packed.reshape(-1, num_inputs)[:num_outputs]

    def pack_int8(self, weight: Array) -> Int8Matrix:
        """Returns the matrix [N, K] quantised to int8, in the layout of the products. K is a multiple of 32.

        The matrix is in float32 or bfloat16.
        """
        num_outputs, num_inputs = weight.shape
        num_elements = self._functions.rl_packed_elements(num_outputs, num_inputs)
        packed = self._memory.empty(num_elements, _UINT8)
        scales = np.empty(num_outputs, dtype=np.float32)
        with self._chosen:
            self._functions.rl_pack_int8_weight(
                _CODES[element_type(weight)], address(weight), address(packed), address(scales), num_outputs, num_inputs
            )
        return Int8Matrix(packed.reshape(-1, num_inputs)[:num_outputs], scales)

    def pack_grouped(self, weights: GroupedWeights) -> npt.NDArray[np.uint8]:
        """Returns grouped weights in the layout of the products, as bytes. K is a multiple of the group's size."""
        num_outputs, num_inputs = weights.integers_NK.shape
        groups = groups_of(weights.form)
        packed = self._memory.empty(self._functions.rl_grouped_bytes(groups, num_outputs, num_inputs), _UINT8)
        integers, scales = np.ascontiguousarray(weights.integers_NK), np.ascontiguousarray(weights.scales_NG)
        offsets = None if weights.offsets_NG is None else np.ascontiguousarray(weights.offsets_NG)
        with self._chosen:
            self._functions.rl_pack_grouped_weight(
                groups,
                integers.ctypes.data,
                scales.ctypes.data,
                None if offsets is None else offsets.ctypes.data,
                address(packed),
                num_outputs,
                num_inputs,
            )
        return packed

    def embed(self, dtype: ElementType, matrix: LinearStruct, ids_N: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Returns float32 [N, D]: the rows `ids_N` of a packed matrix; zeros for a negative id."""
        num_rows = ids_N.shape[0]
        out_ND = np.empty((num_rows, matrix.num_inputs), dtype=np.float32)
        with self._chosen:
            self._functions.rl_embed(_CODES[dtype], matrix, address(ids_N), num_rows, address(out_ND))
        return out_ND

    def multiply(self, dtype: ElementType, linear: LinearStruct, x: Array) -> npt.NDArray[np.float32]:
        """Returns float32 [N, outputs] from x [N, inputs]. x has the operand type of `dtype`. Raises MemoryError.

        `dtype`: the weight's type; for an int8 matrix the type from which it was quantised.
        """
        assert x.dtype == ELEMENTS[self.operand_dtype(dtype)] and x.shape[1] == linear.num_inputs, (x.dtype, x.shape)
        out = np.empty((x.shape[0], linear.num_outputs), dtype=np.float32)
        with self._chosen:
            error = self._functions.rl_multiply(_CODES[dtype], linear, address(x), x.shape[0], address(out))
        if error:
            raise MemoryError(f"a product of {x.shape[0]} rows: {os.strerror(error)}")
        return out

    def normalise(
        self,
        dtype: ElementType,
        residual_TD: npt.NDArray[np.float32],
        weight_D: npt.NDArray[np.float32],
        eps: float,
    ) -> Array:
        """Returns RMSNorm of float32 rows [T, D], in the operand type of `dtype`."""
        num_rows, width = residual_TD.shape
        out_TD = np.empty((num_rows, width), dtype=ELEMENTS[self.operand_dtype(dtype)])
        with self._chosen:
            self._functions.rl_normalise(
                _CODES[dtype], address(residual_TD), address(weight_D), eps, num_rows, width, address(out_TD)
            )
        return out_TD

    def forward(
        self,
        decoder: DecoderStruct,
        batch: BatchStruct,
        halves: range,
        progress: ctypes.c_int64,
        partial_TD: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Runs half layers. Half layer 2 i is the attention of layer i, and half layer 2 i + 1 is its MLP.

        `progress` grows by one with every half layer, while the call runs. `partial_TD`: receives the output of the
        last half layer. This output is then not added to the residual stream. Raises MemoryError.
        """
        partial = None if partial_TD is None else address(partial_TD)
        with self._chosen:
            error = self._functions.rl_forward(decoder, batch, halves.start, halves.stop, partial, progress)
        if error:
            raise MemoryError(f"a step of {batch.num_tokens} tokens: {os.strerror(error)}")

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that the last call of `forward` used, if no other function was called since."""
        with _LOCK:
            return int(self._functions.rl_buffer_bytes())

    @contextlib.contextmanager
    def profile(self) -> Iterator[ctypes.Array[ctypes.c_double]]:
        """A context with the seconds of each of PHASES. Every call of `forward` inside the context adds its seconds."""
        seconds = (ctypes.c_double * len(PHASES))()
        with _LOCK:
            self._functions.rl_profile(ctypes.addressof(seconds))
        try:
            yield seconds
        finally:
            with _LOCK:
                self._functions.rl_profile(None)

    def add(
        self,
        residual_TD: npt.NDArray[np.float32],
        update_TD: npt.NDArray[np.float32],
        decoder: DecoderStruct,
        norm_address: int | None,
    ) -> None:
        """Adds an update to the residual stream, as `forward` does.

        `norm_address`: address of the norm of a half layer's output; None if the model has no such norm.
        """
        num_rows, width = residual_TD.shape
        eps, scale = decoder.rms_norm_eps, decoder.residual_scale
        with self._chosen:
            self._functions.rl_add(address(residual_TD), address(update_TD), norm_address, eps, scale, num_rows, width)

    def sample(self, logits_NV: npt.NDArray[np.float32], sampling_N: npt.NDArray[np.void]) -> list[int]:
        """Returns the next token of each row of float32 logits, -1 for a row that is not finite.

        The elements of `sampling_N` have the type SAMPLING. Raises MemoryError.
        """
        ids_N = np.empty(len(sampling_N), dtype=np.int64)
        num_rows, vocab_size = logits_NV.shape
        with self._chosen:
            failed = self._functions.rl_sample(
                address(logits_NV), sampling_N.ctypes.data, num_rows, vocab_size, ids_N.ctypes.data
            )
        if failed:
            raise MemoryError(f"no memory to sample from {num_rows} rows of {vocab_size} logits")
        return ids_N.tolist()

    def describe(self, logits_NV: npt.NDArray[np.float32], out: LogprobsStruct) -> None:
        """Writes log-probabilities of each row of float32 logits into the arrays of `out`. Raises MemoryError."""
        num_rows, vocab_size = logits_NV.shape
        with self._chosen:
            failed = self._functions.rl_describe(address(logits_NV), num_rows, vocab_size, out)
        if failed:
            raise MemoryError(f"no memory for the logprobs of {num_rows} rows of {vocab_size} logits")


def linear_of(
    packed: Array, bias: npt.NDArray[np.float32] | None, scales: npt.NDArray[np.float32] | None = None
) -> LinearStruct:
    """Returns the structure of a matrix that `CpuLibrary.pack` or `pack_int8` has packed, and of its float32 bias.

    `scales`: the scales of an int8 matrix. The caller keeps the arrays alive.
    """
    num_outputs, num_inputs = packed.shape
    return LinearStruct(
        weight=address(packed),
        scales=None if scales is None else address(scales),
        bias=None if bias is None else address(bias),
        num_outputs=num_outputs,
        num_inputs=num_inputs,
    )


def grouped_linear_of(
    packed: npt.NDArray[np.uint8], form: GroupedForm, shape: tuple[int, int], vectors: MatrixVectors
) -> LinearStruct:
    """Returns the structure of a matrix [N, K] = `shape` from `CpuLibrary.pack_grouped`.

    The caller keeps the arrays alive.
    """
    return LinearStruct(
        weight=address(packed),
        scales=None if vectors.scales_N is None else address(vectors.scales_N),
        bias=None if vectors.bias_N is None else address(vectors.bias_N),
        num_outputs=shape[0],
        num_inputs=shape[1],
        groups=groups_of(form),
    )


def dtype_code(dtype: ElementType) -> int:
    """Returns the number by which the library knows a type of weights."""
    return _CODES[dtype]

"""int8 weights for the C library: a byte for each weight, a float32 scale for each output, from a dense checkpoint.

    weight[n, k] = scale[n] * w[n, k],  w from -127 to 127,  scale[n] = max over k of |weight[n, k]| / 127

Activations are quantised in each product, with one scale for a group of 32 neighbouring inputs. csrc/cpu/int8.h has the
arithmetic. A shard of a matrix that is cut by columns has scales of its own, from its columns alone.
"""

from __future__ import annotations

import torch

from rayloom_engine.config import INT8_GROUP
from rayloom_engine.cpu_library.library import CpuLibrary, Int8Matrix, linear_of
from rayloom_engine.kernels.linear import LinearKernel
from rayloom_engine.kernels.target import Target
from rayloom_engine.layers.destination import Destination
from rayloom_engine.layers.schemes import LinearSpec
from rayloom_engine.layers.schemes.dense import TiedScheme, dense_destinations


class Int8Scheme:
    """Implements WeightScheme. The plain matrix exists until `finish`."""

    __slots__ = ("bias", "_dtype", "_library", "_matrix", "_plain", "_spec")

    def __init__(self, spec: LinearSpec, library: CpuLibrary, dtype: torch.dtype) -> None:
        """`dtype`: type of the bias. The checkpoint's weights are rounded to it, too, before they are quantised."""
        assert spec.num_inputs % INT8_GROUP == 0, f"{spec.num_inputs} inputs cannot be cut into groups"
        self._spec = spec
        self._library = library
        self._dtype = dtype
        self._plain: torch.Tensor | None = torch.empty((spec.num_outputs, spec.num_inputs), dtype=dtype)
        self._matrix: Int8Matrix | None = None
        self.bias = torch.empty(spec.num_outputs, dtype=dtype) if spec.has_bias else None

    @property
    def matrix(self) -> Int8Matrix:
        """The quantised weights. Available after `finish`."""
        assert self._matrix is not None, "finish was not called"
        return self._matrix

    def destinations(self) -> dict[str, Destination]:
        assert self._plain is not None, "finish was called"
        return dense_destinations(self._spec, self._plain, self.bias)

    def finish(self) -> None:
        assert self._plain is not None, "finish was called before"
        self._matrix = self._library.pack_int8(self._plain)
        self._plain = None

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix
        bias = None if self.bias is None else self.bias.float()
        rows = x.reshape(-1, x.shape[-1]).to(self._library.operand_dtype(self._dtype)).contiguous()
        out = self._library.multiply(self._dtype, linear_of(matrix.packed_NK, bias, matrix.scales_N), rows)
        return out.to(x.dtype).view(*x.shape[:-1], self._spec.num_outputs)

    @property
    def num_bytes(self) -> int:
        num_outputs = self._spec.num_outputs
        bias_bytes = 0 if self.bias is None else self.bias.nbytes
        return num_outputs * (self._spec.num_inputs + torch.float32.itemsize) + bias_bytes


class Int8Schemes:
    """Implements SchemeFactory for checkpoints whose matrices are not quantised."""

    cut_unit = INT8_GROUP

    def __init__(self, kernel: LinearKernel, target: Target) -> None:
        assert target.library is not None, "only the C library multiplies by int8 weights"
        self._kernel = kernel
        self._library = target.library
        self._dtype = target.compute_dtype

    def linear(self, spec: LinearSpec) -> Int8Scheme:
        return Int8Scheme(spec, self._library, self._dtype)

    def tied(self, weight: torch.Tensor) -> TiedScheme:
        """Returns a placeholder: models.cpu_weights quantises the embedding, and the head uses the same matrix."""
        return TiedScheme(weight, self._kernel)

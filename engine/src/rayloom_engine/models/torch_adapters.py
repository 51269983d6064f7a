"""TorchAdapters: the LoRA adapters of a rank on torch, and the products that they update.

A matrix of the rank may stack several matrices of the checkpoint (q, k, v; gate, up). It then has an update for each of
these. A is cut by the columns that the rank holds, and B by the rows. So the sum over the ranks of a stage includes
the updates.

Legend: T tokens of the step, r rank of the adapter, K inputs, N outputs of the rank's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from rayloom_engine.core.adapter import Adapter
from rayloom_engine.errors import ModelError
from rayloom_engine.layers.linear import Linear
from rayloom_engine.layers.linear_spec import LinearSpec
from rayloom_engine.models.adapters.hub_adapter import check_digest
from rayloom_engine.models.adapters.peft_folder import PeftFolder, read_peft_folder
from rayloom_engine.models.checkpoint.config_json import refuses_broken
from rayloom_engine.models.shape import ModelShape


class Update(NamedTuple):
    """y[:, rows] += scale * (x A^T) B^T"""

    rows: slice
    a_rK: torch.Tensor
    b_Nr: torch.Tensor
    scale: float


class AdapterRun(NamedTuple):
    """Neighbouring tokens of a step with the same adapter."""

    slot: int
    tokens: slice


@dataclass(slots=True)
class StepRuns:
    """The runs of neighbouring tokens of the present step. All products of a model read them."""

    runs: list[AdapterRun] = field(default_factory=list)


@dataclass(slots=True)
class UpdatedProduct:
    """A product with the updates of the adapters in the slots."""

    multiply: Callable[[torch.Tensor], torch.Tensor]
    step: StepRuns
    updates: dict[int, list[Update]] = field(default_factory=dict)  # slot -> the updates of this matrix

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        y_TN = self.multiply(x_TK)
        for run in self.step.runs:
            for update in self.updates.get(run.slot, ()):
                reduced_Tr = (x_TK[run.tokens] @ update.a_rK.T) * update.scale
                y_TN[run.tokens, update.rows] += reduced_Tr @ update.b_Nr.T
        return y_TN


class TorchAdapters:
    """The adapters of a rank by adapter slot. Loading the first adapter replaces the products of the layers."""

    def __init__(self, shape: ModelShape, layers: Iterable[tuple[LinearSpec, Linear]], dtype: torch.dtype) -> None:
        """`layers`: the matrices that adapters may update. `dtype`: of activations."""
        self._shape = shape
        self._dtype = dtype
        self._matrices = tuple(layers)
        self._step = StepRuns()
        self._products: list[UpdatedProduct] = []
        self._digests: dict[int, bytes] = {}

    def load(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into a slot. An adapter that another slot has is not read again.

        Raises ModelError if the adapter's files cannot be used, or have another digest. After such an error, the hidden
        states of tokens with this adapter become NaN on all ranks of the stage and in all later stages.
        """
        if not self._products:
            self._products = [linear.replace_product(self._updated) for _, linear in self._matrices]
        known = next((number for number, digest in self._digests.items() if digest == adapter.digest), None)
        updates = None if known is None else [product.updates.get(known, []) for product in self._products]
        # Frees the adapter that the slot had, before another one takes memory.
        self._digests.pop(slot, None)
        for product in self._products:
            product.updates.pop(slot, None)
        try:
            updates = updates or self._read(adapter)
        except ModelError:
            for product, (spec, _) in zip(self._products, self._matrices, strict=True):
                product.updates[slot] = [self._corrupting(spec)]
            raise
        self._digests[slot] = adapter.digest
        for product, of_matrix in zip(self._products, updates, strict=True):
            product.updates[slot] = of_matrix

    def begin_step(self, adapters_T: npt.NDArray[np.int32] | None) -> None:
        """Sets the adapter slots of the next step's tokens; -1: no adapter."""
        self._step.runs = [] if adapters_T is None else runs_of(adapters_T)

    def _corrupting(self, spec: LinearSpec) -> Update:
        """Returns an update that makes a matrix's outputs NaN."""
        a_rK = torch.zeros(1, spec.num_inputs, dtype=self._dtype)
        b_Nr = torch.zeros(spec.num_outputs, 1, dtype=self._dtype)
        return Update(slice(None), a_rK, b_Nr, math.nan)

    def _updated(self, multiply: Callable[[torch.Tensor], torch.Tensor]) -> UpdatedProduct:
        return UpdatedProduct(multiply, self._step)

    def _read(self, adapter: Adapter) -> list[list[Update]]:
        """Returns the adapter's updates for each matrix of the rank."""
        path = check_digest(adapter)
        with refuses_broken(path):  # the files may have changed since the digest was computed
            return self._read_folder(read_peft_folder(path, self._shape))

    def _read_folder(self, folder: PeftFolder) -> list[list[Update]]:
        with safe_open(folder.weights, framework="pt") as file:
            return [self._updates(spec, folder, file) for spec, _ in self._matrices]

    def _updates(self, spec: LinearSpec, folder: PeftFolder, file: Any) -> list[Update]:
        """Reads the rank's parts of the updates of a matrix. `file`: an open safetensors file."""
        found = []
        for stacked in spec.stacked():
            update = folder.updates.get(stacked.name)
            if update is not None:
                # These are copies, because a slice can keep the whole tensor, or the mapped file, in memory.
                a_rK = file.get_slice(update.a)[:, spec.inputs.slice].to(self._dtype, copy=True)
                b_Nr = file.get_slice(update.b)[stacked.bias_part or slice(None)].to(self._dtype, copy=True)
                found.append(Update(stacked.rows, a_rK, b_Nr, update.scale))
        return found


def runs_of(adapters_T: npt.NDArray[np.int32]) -> list[AdapterRun]:
    """Returns the runs of a step, without the tokens that have no adapter."""
    borders = [0, *(np.flatnonzero(np.diff(adapters_T)) + 1).tolist(), len(adapters_T)]
    runs = [AdapterRun(int(adapters_T[start]), slice(start, end)) for start, end in pairwise(borders)]
    return [run for run in runs if run.slot >= 0]

"""CheckpointScheme: which matrices of a checkpoint are quantised, and how. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from rayloom_engine.cpu_library.grouped import GroupedForm, common_form
from rayloom_engine.layers.linear_spec import LinearSpec
from rayloom_engine.models.quantised.reader import MatrixReader, StoredTensor

_IN_LAYERS = "model.layers."
_ROW_UNIT = 16  # the C library multiplies blocks of this many rows


class FormRows(NamedTuple):
    """Neighbouring rows of a matrix that have one form."""

    form: GroupedForm
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointScheme:
    """Describes how the matrices of a checkpoint are quantised.

    `linear`: the reader of all matrices in the layers, except those whose name matches a pattern in `skipped`; None if
    `by_name` has a reader for each quantised matrix. `left_out`: suffixes of tensors that are not needed. `cut_unit`:
    tensor parallelism cuts inputs and outputs at multiples of this number.
    """

    label: str  # for the status and the log, such as awq-int4-g128
    cut_unit: int
    linear: MatrixReader | None = None
    skipped: tuple[str, ...] = ()
    by_name: Mapping[str, MatrixReader] = field(default_factory=dict, hash=False)
    left_out: tuple[str, ...] = ()

    def reader(self, name: str) -> MatrixReader | None:
        """Returns the reader of a matrix, such as model.layers.0.mlp.up_proj; None if its weights are dense."""
        if self.linear is None or name in self.by_name:
            return self.by_name.get(name)
        is_skipped = not name.startswith(_IN_LAYERS) or any(fnmatchcase(name, pattern) for pattern in self.skipped)
        return None if is_skipped else self.linear

    def forms(self, spec: LinearSpec) -> tuple[FormRows, ...] | None:
        """Returns the forms in which the C library holds a matrix, and their rows in order; None if it is dense.

        Matrices that are stacked (q, k and v; gate and up) may have several forms in the checkpoint. This happens in
        Q4_K_M files, whose v may have more bits than q and k. Then the stack of q, k and v has these forms, if each has
        a multiple of 16 rows. Any other stack gets one form of 8 bits. If one of the matrices is dense, the stack is
        dense.
        """
        found: list[FormRows] = []
        for name, rows in spec.outputs.items():
            reader = self.reader(name)
            if reader is None:
                return None
            form = reader.form(spec.inputs.size)
            if found and found[-1].form == form:
                found[-1] = FormRows(form, found[-1].num_rows + len(rows))
            else:
                found.append(FormRows(form, len(rows)))
        if len(found) > 1 and not (spec.can_mix_forms and all(each.num_rows % _ROW_UNIT == 0 for each in found)):
            return (FormRows(common_form([each.form for each in found]), spec.num_outputs),)
        return tuple(found)

    def tensors(self, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
        """Returns name -> header of every tensor that the checkpoint must have. `sizes`: those of dense weights."""
        found: dict[str, StoredTensor] = {}
        for name, size in sizes.items():
            stem, _, suffix = name.rpartition(".")
            reader = self.reader(stem) if suffix == "weight" and len(size) == 2 else None
            if reader is None:
                found[name] = StoredTensor(size)
            else:
                stored = reader.tensors(size[0], size[1])
                found.update((f"{stem}.{part}", header) for part, header in stored.items())
        return found


def matrix_amounts(spec: LinearSpec, scheme: CheckpointScheme | None) -> tuple[int, int]:
    """Returns the memory of a matrix in the C library: numbers in the weights' type, and bytes of packed weights."""
    biases = spec.num_outputs * spec.has_bias
    forms = None if scheme is None else scheme.forms(spec)
    if forms is None:
        return spec.num_outputs * spec.num_inputs + biases, 0
    return biases, sum(form.num_bytes(num_rows, spec.num_inputs) for form, num_rows in forms)

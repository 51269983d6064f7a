"""LinearSpec: which rows and columns of a checkpoint's matrices form one matrix of a rank. Pure, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class AxisPart:
    """A rank's indices along one axis of a checkpoint's matrix. The whole axis has `size` indices.

    `more`: further ranges of indices, behind `indices`, if the checkpoint has fused several matrices into one.
    """

    indices: range
    size: int
    more: tuple[range, ...] = ()

    def __len__(self) -> int:
        return len(self.indices) + sum(map(len, self.more))

    @property
    def is_whole(self) -> bool:
        return len(self) == self.size

    @property
    def slice(self) -> slice | tuple[slice, ...]:
        """The indices as a slice, or as slices that follow one another."""
        if not self.more:
            return slice(self.indices.start, self.indices.stop)
        return tuple(slice(indices.start, indices.stop) for indices in (self.indices, *self.more))


TensorPart = tuple[slice | tuple[slice, ...], ...]  # for each axis of a tensor: a slice, or several that are joined


def slices_of(part: TensorPart) -> list[tuple[slice, ...]]:
    """Returns `part` as a list of plain slices to join along the first axis. Only that axis may have several slices."""
    first, *others = part
    rest = tuple(each for each in others if isinstance(each, slice))
    assert len(rest) == len(others), "only the first axis has several slices"
    return [(each, *rest) for each in ((first,) if isinstance(first, slice) else first)]


class StackedRows(NamedTuple):
    """One matrix of the checkpoint in a stacked matrix.

    `rows`: the rows of the stacked matrix that this matrix fills. `weight_part`, `bias_part`: the slices of the
    checkpoint's tensors that are copied to these rows; () means all of a tensor.
    """

    name: str
    rows: slice
    weight_part: TensorPart
    bias_part: TensorPart


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """Describes one matrix of a rank: rows of one or several matrices of the checkpoint, stacked.

    `outputs`: name of a matrix of the checkpoint, such as "model.layers.0.mlp.gate_proj" -> the rows of this matrix
    that the rank holds. The order of the names is the stacking order. `inputs`: the columns, which are the same for all
    matrices. `can_mix_forms`: whether the matrices may be quantised in several forms. Otherwise all get one form.
    """

    outputs: Mapping[str, AxisPart]
    inputs: AxisPart
    has_bias: bool = False  # whether this rank adds a bias
    can_mix_forms: bool = False

    @property
    def num_outputs(self) -> int:
        return sum(map(len, self.outputs.values()))

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    def stacked(self) -> Iterator[StackedRows]:
        """Returns the place of each matrix of the checkpoint, in stacking order."""
        start = 0
        for name, rows in self.outputs.items():
            end = start + len(rows)
            row_part = () if rows.is_whole else (rows.slice,)
            part = row_part if self.inputs.is_whole else (rows.slice, self.inputs.slice)
            yield StackedRows(name, slice(start, end), part, row_part)
            start = end

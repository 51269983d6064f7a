"""Cuts a model of transformers to the part of one rank, and adds the necessary exchanges between ranks.

Modules keep their code, and their parameters become smaller. Hooks split the inputs of modules, and join or add their
outputs. All ranks add the parts in the same order. So their hidden states are equal bit for bit, and they select the
same experts.

Legend: T tokens of the step, D model width.
"""

from __future__ import annotations

from typing import Any

import torch

from rayloom_engine.models.on_transformers.shard_plan import Cut, ShardPlan
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.tensor_group import OneRank, TensorGroup


class StageRanks:
    """The ranks of a stage. `group` is set only during a step, because connections must not outlive the epoch."""

    def __init__(self) -> None:
        self.group: TensorGroup[torch.Tensor] = OneRank()


class _AddOutputs:
    """Adds the outputs of all ranks."""

    def __init__(self, ranks: StageRanks) -> None:
        self._ranks = ranks

    def after(self, _: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return self._ranks.group.all_reduce(output.contiguous())


class _SplitInput:
    """Cuts the input to this rank's part."""

    def __init__(self, part: range) -> None:
        self._part = part

    def before(self, _: torch.nn.Module, args: Any) -> Any:
        return (args[0][..., self._part.start : self._part.stop], *args[1:])


class _JoinOutputs:
    """Joins the outputs of all ranks: sums arrays of zeros into which each rank has copied its own output."""

    def __init__(self, ranks: StageRanks, part: range, size: int) -> None:
        self._ranks = ranks
        self._part = part
        self._size = size

    def after(self, _: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        whole = output.new_zeros(*output.shape[:-1], self._size)
        whole[..., self._part.start : self._part.stop] = output
        return self._ranks.group.all_reduce(whole)


class _Vocabulary:
    """Looks up the tokens whose rows this rank holds, with zeros for all other tokens, and sums over all ranks."""

    def __init__(self, ranks: StageRanks, rows: range) -> None:
        self._ranks = ranks
        self._rows = rows
        self._elsewhere_1T: torch.Tensor | None = None

    def before(self, _: torch.nn.Module, args: Any) -> Any:
        rows_1T = args[0] - self._rows.start
        self._elsewhere_1T = (rows_1T < 0) | (rows_1T >= len(self._rows))
        return (rows_1T.masked_fill(self._elsewhere_1T, 0), *args[1:])

    def after(self, _: torch.nn.Module, __: Any, rows_1TD: torch.Tensor) -> torch.Tensor:
        assert self._elsewhere_1T is not None
        elsewhere_1T, self._elsewhere_1T = self._elsewhere_1T, None
        return self._ranks.group.all_reduce(rows_1TD.masked_fill(elsewhere_1T[..., None], 0))


def cut_to_shard(model: Any, plan: ShardPlan, shard: Shard, ranks: StageRanks) -> None:
    """Cuts the parameters of a model on the meta device, and gives its modules hooks, which use `ranks`.

    Skips modules of the plan that belong to other stages. Call it before the weights are loaded.
    """
    modules = dict(model.named_modules())
    for name, exchange in plan.exchanges.items():
        if (module := modules.get(name)) is not None:
            _add_hooks(module, exchange, _range_of(plan.cuts.get(f"{name}.weight"), module, shard), ranks)
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        if name in plan.first_only and not shard.is_first:
            modules[owner].register_parameter(leaf, None)
        elif (cut := plan.cuts.get(name)) is not None:
            modules[owner]._parameters[leaf] = torch.nn.Parameter(part_of(parameter, cut, shard), requires_grad=False)
            _set_sizes(modules[owner])


def part_of(tensor: torch.Tensor, cut: Cut, shard: Shard) -> torch.Tensor:
    """Returns a rank's part of a tensor: a view if it is in one piece."""
    pieces = [tensor.narrow(cut.dim, part.start, len(part)) for part in cut.ranges(tensor.shape[cut.dim], shard)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=cut.dim)


def _range_of(cut: Cut | None, module: torch.nn.Module, shard: Shard) -> tuple[range, int]:
    """Returns a rank's indices in the cut dimension of a module's weight, and the size of this dimension."""
    if cut is None:
        return range(0), 0  # the parameters of experts have cuts of their own
    size = module.get_parameter("weight").shape[cut.dim]
    return cut.ranges(size, shard)[0], size


def _add_hooks(module: torch.nn.Module, exchange: str, cut: tuple[range, int], ranks: StageRanks) -> None:
    part, size = cut
    if exchange == "vocabulary":
        vocabulary = _Vocabulary(ranks, part)
        module.register_forward_pre_hook(vocabulary.before)
        module.register_forward_hook(vocabulary.after)
    elif exchange == "gather":
        module.register_forward_hook(_JoinOutputs(ranks, part, size).after)
    else:
        if exchange == "split_sum":
            module.register_forward_pre_hook(_SplitInput(part).before)
        module.register_forward_hook(_AddOutputs(ranks).after)


def _set_sizes(module: torch.nn.Module) -> None:
    """Sets the attributes of a module that describe the sizes of its weight."""
    if isinstance(module, torch.nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, torch.nn.Embedding):
        module.num_embeddings = module.weight.shape[0]
        module.padding_idx = None  # only training uses it, and its row may be on another rank

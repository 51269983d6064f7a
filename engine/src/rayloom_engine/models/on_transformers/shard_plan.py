"""Reads transformers' tensor parallel plan of a model, which says how ranks share its layers. Holds no weight.

The plan names a style for modules and parameters. A style says which dimension of a matrix is cut, and what the ranks
exchange. The embedding and the head are cut by vocabulary, as in the engine's own decoder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rayloom_engine.errors import ModelError, word
from rayloom_engine.models.on_transformers.meta_model import MetaModel
from rayloom_engine.parallel.shard import Shard

# The work of a module's hooks. gather: join the outputs of all ranks. sum: add the outputs. split_sum: cut the input to
# the rank's part, then add the outputs. vocabulary: look up the rank's own tokens, then add the rows.
Exchange = Literal["gather", "sum", "split_sum", "vocabulary"]

# Style of a linear layer -> (dimension of its weight that is cut, exchange of its module).
_LINEAR: dict[str, tuple[int, Exchange | None]] = {
    "colwise": (-2, None),
    "packed_colwise": (-2, None),
    "colwise_gather_output": (-2, "gather"),
    "colwise_rep": (-2, "gather"),
    "rowwise": (-1, "sum"),
    "rowwise_split_input": (-1, "split_sum"),
    "rowwise_rep": (-1, "split_sum"),
}
_OF_PARAMETERS = ("colwise", "packed_colwise", "rowwise")
_EXPERTS = "moe_tp_experts"  # adds the outputs of the ranks' parts of all experts
# Modules with these styles are whole on every rank. For them, transformers exchanges only gradients or DTensors, which
# the engine does not have.
_WHOLE = ("replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params", "replicate")


@dataclass(frozen=True, slots=True)
class Cut:
    """The dimension along which a tensor is cut for ranks. It has `num_packed` equal parts, each cut separately."""

    dim: int  # from the end of the tensor's sizes: -1 is the last
    num_packed: int = 1
    is_even: bool = True  # whether all ranks must get equally long parts

    def ranges(self, size: int, shard: Shard) -> tuple[range, ...]:
        """Returns a rank's indices in a dimension of `size`."""
        length = size // self.num_packed
        part = shard.part(length)
        return tuple(range(part.start + base, part.stop + base) for base in range(0, size, length))

    def divides(self, size: int, count: int) -> bool:
        """Returns whether `count` ranks can share a dimension of `size`."""
        return size % (self.num_packed * count) == 0 if self.is_even else size >= count


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Describes how the ranks of a stage share a model. Keys are names of the model's parameters and modules."""

    cuts: Mapping[str, Cut]
    first_only: frozenset[str]  # biases that are added to a sum over ranks: the first rank alone holds them
    exchanges: Mapping[str, Exchange]

    def num_elements(self, shard: Shard, name: str, parameter: torch.Tensor) -> int:
        """Returns the number of a parameter's elements that a rank holds."""
        if name in self.first_only and not shard.is_first:
            return 0
        if (cut := self.cuts.get(name)) is None:
            return parameter.numel()
        size = parameter.shape[cut.dim]
        return parameter.numel() // size * sum(map(len, cut.ranges(size, shard)))


_TIED_VOCABULARY = Cut(-2, is_even=False)


def read_shard_plan(meta: MetaModel) -> ShardPlan:
    """Returns the plan of a model. If ranks cannot share its layers, raises ModelError, which names no file."""
    model = meta.model
    rules: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    if not rules:
        raise ModelError("transformers has no tensor parallel plan for the model", "Unsupported")
    reader = _PlanReader()
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    for name, module in model.named_modules():
        if (style := rules.get(_rule_name(name))) and id(module) not in ends:
            reader.add_module(name, module, style)
    for name, parameter in model.named_parameters():
        if style := rules.get(_rule_name(name)):
            reader.add_parameter(name, parameter, style)
    if not any(name.startswith(f"{meta.layer_list}.") for name in reader.cuts):
        raise ModelError("transformers' tensor parallel plan for the model cuts no layer", "Unsupported")
    reader.check_experts(model)
    _add_vocabulary(reader, model, rules)
    return ShardPlan(reader.cuts, frozenset(reader.first_only), reader.exchanges)


class _PlanReader:
    def __init__(self) -> None:
        self.cuts: dict[str, Cut] = {}
        self.first_only: set[str] = set()
        self.exchanges: dict[str, Exchange] = {}
        self._experts: list[str] = []

    def add_module(self, name: str, module: torch.nn.Module, style: str) -> None:
        if style in _WHOLE:
            return
        if style == _EXPERTS:
            self._experts.append(name)
            self.exchanges[name] = "sum"
            return
        if style not in _LINEAR or not isinstance(module, torch.nn.Linear):
            raise _unknown(name, style)
        dim, exchange = _LINEAR[style]
        num_packed = 2 if style == "packed_colwise" else 1
        self.cuts[f"{name}.weight"] = Cut(dim, num_packed)
        if exchange is not None:
            self.exchanges[name] = exchange
        if module.bias is not None:
            if dim == -2:
                self.cuts[f"{name}.bias"] = Cut(-1, num_packed)
            else:
                self.first_only.add(f"{name}.bias")

    def add_parameter(self, name: str, parameter: torch.Tensor, style: str) -> None:
        if style in _WHOLE:
            return
        if style not in _OF_PARAMETERS or (style != "colwise" and parameter.dim() < 2):
            raise _unknown(name, style)
        dim = -1 if parameter.dim() == 1 else _LINEAR[style][0]
        self.cuts[name] = Cut(dim, 2 if style == "packed_colwise" else 1)

    def check_experts(self, model: Any) -> None:
        """Raises ModelError if the plan leaves a parameter of experts uncut: the sum would contain it once per rank."""
        for name in self._experts:
            for leaf, _ in model.get_submodule(name).named_parameters():
                if f"{name}.{leaf}" not in self.cuts:
                    raise ModelError(
                        f"transformers' tensor parallel plan for the model does not cut {word(f'{name}.{leaf}')}",
                        "Unsupported",
                    )


def _add_vocabulary(reader: _PlanReader, model: Any, rules: Mapping[str, str]) -> None:
    """Cuts the head and the embedding by vocabulary. A tied embedding is cut together with the head."""
    names = {id(module): name for name, module in model.named_modules()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_head_cut = isinstance(head, torch.nn.Linear) and head.out_features == model.config.vocab_size
    if is_head_cut:
        name = names[id(head)]
        reader.cuts[f"{name}.weight"] = _TIED_VOCABULARY
        if head.bias is not None:
            reader.cuts[f"{name}.bias"] = Cut(-1, is_even=False)
    name = names.get(id(embedding), "")
    has_rule = rules.get(_rule_name(name)) == "embedding_rowwise"
    is_tied = bool(getattr(model, "all_tied_weights_keys", {}))
    if isinstance(embedding, torch.nn.Embedding) and (is_head_cut if is_tied else has_rule):
        reader.cuts[f"{name}.weight"] = _TIED_VOCABULARY
        reader.exchanges[name] = "vocabulary"


def _rule_name(name: str) -> str:
    """Returns the name of a module or parameter as rules write it, with a star for each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _unknown(name: str, style: str) -> ModelError:
    return ModelError(
        f"transformers' tensor parallel plan for the model has the style {word(style)} at {word(name)}, which the "
        "engine does not have",
        "Unsupported",
    )

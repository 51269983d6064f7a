"""Measures the sizes of a rank's part if several ranks share each layer of a model. Reads no weight.

The plan's cuts give the numbers of weights. The attention calls of the cut model on the meta device give the numbers of
heads. If the modules do not run after a cut for some number of ranks, this number of ranks cannot share a layer.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from rayloom_engine.errors import ModelError
from rayloom_engine.models.measured_shape import MeasuredShare
from rayloom_engine.models.on_transformers.meta_model import AttentionCall, MetaModel, calls_of_part
from rayloom_engine.models.on_transformers.shard_cut import StageRanks, cut_to_shard
from rayloom_engine.models.on_transformers.shard_plan import ShardPlan, read_shard_plan
from rayloom_engine.parallel.shard import Shard

MAX_SHARDS = 64  # the most ranks that are tried; a stage's ranks share a node


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Numbers of weights in each layer, and outside of the layers."""

    layers: tuple[int, ...]
    embedding: int  # outside of the layers, on the first of several stages
    final: int  # outside of the layers, on the last of several stages
    both: int  # outside of the layers, if one stage has all layers


def weight_sizes(meta: MetaModel, elements_of: Callable[[str, torch.Tensor], int]) -> WeightSizes:
    """Returns the numbers of weights of a model. `elements_of` returns the number for a parameter."""
    model = meta.model
    tied = getattr(model, "all_tied_weights_keys", {})
    # named_parameters returns tied weights twice here, because they share memory only after they are loaded.
    sizes = {
        name: elements_of(name, parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in tied
    }
    layers = tuple(
        sum(size for name, size in sizes.items() if name.startswith(f"{meta.layer_list}.{index}."))
        for index in range(len(meta.layers))
    )
    outside = sum(sizes.values()) - sum(layers)
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    head, embedding = (
        sizes.get(names.get(id(module), ""), 0)
        for module in (model.get_output_embeddings(), model.get_input_embeddings())
    )
    # `embedding` and `final` both include the small weights outside of layers, such as norms. A tied head is the
    # embedding itself.
    if tied:
        return WeightSizes(layers, outside, outside, outside)
    return WeightSizes(layers, outside - head, outside - embedding, outside)


def measure_shares(
    meta: MetaModel, num_chosen: int, wanted: int | None = None
) -> tuple[tuple[MeasuredShare, ...], str]:
    """Returns the shares of all numbers of ranks that can share a layer, and the reason if there are none.

    `num_chosen`: experts of a token; 0 without experts. `wanted`: if this number of ranks works, only this number is
    measured, because each measurement runs all layers.
    """
    if wanted == 1:
        return (), ""
    try:
        plan = read_shard_plan(meta)
    except ModelError as error:
        return (), str(error)
    if wanted is not None and (found := _measured(meta, plan, num_chosen, range(wanted, wanted + 1))):
        return found, ""
    most = max(call.num_heads for call in meta.calls)
    if found := _measured(meta, plan, num_chosen, range(2, min(most, MAX_SHARDS) + 1)):
        return found, ""
    if min(call.num_kv_heads for call in meta.calls) == 1:
        return (), "the model's layers have 1 key/value head, which transformers' modules cannot share"
    return (), "the model's sizes cannot be cut into equal parts"


def _measured(meta: MetaModel, plan: ShardPlan, num_chosen: int, counts: range) -> tuple[MeasuredShare, ...]:
    parameters = dict(meta.model.named_parameters(remove_duplicate=False))
    found: list[MeasuredShare] = []
    for count in counts:
        if not all(cut.divides(parameters[name].shape[cut.dim], count) for name, cut in plan.cuts.items()):
            continue
        with contextlib.suppress(ModelError):
            found.append(_share(meta, plan, num_chosen, count))
    return tuple(found)


def _share(meta: MetaModel, plan: ShardPlan, num_chosen: int, count: int) -> MeasuredShare:
    """Returns the sizes on one of `count` ranks. Raises ModelError if the modules cannot run with a rank's part."""
    # The first rank has biases that are added to sums. The last rank has the longest part of an uneven vocabulary.
    first, last = (
        weight_sizes(meta, partial(plan.num_elements, shard)) for shard in (Shard(0, count), Shard(count - 1, count))
    )
    # All ranks have equal parts of the layers, except biases.
    model = copy.deepcopy(meta.model)
    cut_to_shard(model, plan, Shard(0, count), StageRanks())
    calls = calls_of_part(model, meta)
    _check_heads(meta.calls, calls, count)
    layers = model.get_submodule(meta.layer_list)
    return MeasuredShare(
        count=count,
        layer_parameters=tuple(map(max, first.layers, last.layers)),
        embedding_parameters=max(first.embedding, last.embedding),
        final_parameters=max(first.final, last.final),
        both_parameters=max(first.both, last.both),
        layer_kv_sizes=tuple((call.num_kv_heads, call.page_dim) for call in calls),
        widest=max(widest(layers, model.config.hidden_size, num_chosen), *_joined(meta, plan)),
        attention_size=max((call.num_heads + call.num_kv_heads) * call.page_dim for call in calls),
    )


def widest(layers: torch.nn.Module, hidden_size: int, num_chosen: int) -> int:
    """Returns the number of outputs of the widest linear layer. This number bounds the memory of a token of a step.

    The `num_chosen` experts of a token count together, because all of them are computed at once.
    """
    parameters = list(layers.parameters())
    # The last stacked matrices are [experts, hidden size, width of an expert], or the last two exchanged.
    of_experts = [num_chosen * (each.numel() // (len(each) * hidden_size)) for each in parameters if each.dim() == 3]
    return max([1, *of_experts[-1:], *(each.shape[0] for each in parameters if each.dim() == 2)])


def _joined(meta: MetaModel, plan: ShardPlan) -> list[int]:
    """Returns the sizes of the outputs whose parts are joined, so that every rank has the whole output."""
    joined = [name for name, exchange in plan.exchanges.items() if exchange == "gather"]
    return [1, *(meta.model.get_submodule(name).out_features for name in joined)]


def _check_heads(whole: tuple[AttentionCall, ...], part: tuple[AttentionCall, ...], count: int) -> None:
    """Raises ModelError unless a rank has all heads of a layer, or its share of query heads and of key/value heads."""
    for wanted, got in zip(whole, part, strict=True):
        heads = (got.num_heads, got.num_kv_heads)
        shares = [(wanted.num_heads / each, wanted.num_kv_heads / each) for each in (1, count)]
        if heads not in shares or (got.head_dim, got.value_dim) != (wanted.head_dim, wanted.value_dim):
            raise ModelError(
                f"{count} ranks cannot share the model's {wanted.num_kv_heads} key/value heads", "Unsupported"
            )

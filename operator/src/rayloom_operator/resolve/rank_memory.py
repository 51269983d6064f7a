"""Bytes that a rank holds: sums of the costs that the engine's inspection gives. Pure.

Rank r has shard r % tensor of stage r // tensor. A stage is a run of layers. The first stage also has the embedding,
and the last stage the final norm and the head. The costs of each part are those of its largest shard, so all ranks of a
stage have equal sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, repeat
from operator import mul, sub

from rayloom_operator.api.costs import AdapterCosts, Costs
from rayloom_operator.resolve.stage_split import Stages

BLOCK_SIZE = 16  # tokens in a KV block
GIB = 1 << 30
# A tenant's image gives the costs. With this limit, the bytes of all ranks of a pod are 64-bit numbers.
_MOST_ADAPTERS_BYTES = 1 << 52


@dataclass(frozen=True, slots=True)
class RankMemory:
    weights: int  # bytes
    kv_block: int  # bytes of one KV block, for the rank's layers and heads
    adapters: int = 0  # bytes of LoRA adapters, and bytes that the adapters add to the largest step
    draft: int = 0  # bytes of the draft model's weights; 0 on a rank that does not sample


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRoom:
    """The memory of a draft model, which the rank that samples holds as a whole."""

    weights: int  # bytes
    kv_block: int  # bytes that its KV adds to a KV block
    token_bytes: int  # bytes of one token in a step of the draft model
    sequence_bytes: int  # bytes of one sequence in a step of the draft model
    num_drafted: int  # most draft tokens of a sequence in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRoom:
    """The LoRA adapters for which each rank keeps memory."""

    costs: AdapterCosts
    num_adapters: int  # adapters in memory at once
    lora_rank: int  # highest LoRA rank of an adapter
    num_step_tokens: int  # tokens of the largest step


class Layers:
    """Sums of the bytes of consecutive layers, for any run of layers that a stage may have."""

    def __init__(self, costs: Costs, of_kinds: Sequence[int]) -> None:
        """`of_kinds`: for each kind in `costs.kinds`, the bytes of one layer of that kind."""
        self._runs = costs.runs
        self._of_kinds = of_kinds
        self.total = sum(map(mul, costs.numbers, of_kinds))
        used = set(of_kinds)
        self._even = used.pop() if len(used) == 1 else None
        self._heaviest: dict[int, int] = {}

    @cached_property
    def _ends(self) -> list[int]:
        """At index i: the sum over the first i layers."""
        each = chain.from_iterable(repeat(self._of_kinds[kind], number) for number, kind in self._runs)
        return [0, *accumulate(each)]

    def first(self, number: int) -> int:
        """The sum over the first `number` layers."""
        return self._even * number if self._even is not None else self._ends[number]

    def last(self, number: int) -> int:
        """The sum over the last `number` layers."""
        return self._even * number if self._even is not None else self._ends[-1] - self._ends[-1 - number]

    def heaviest(self, number: int) -> int:
        """The largest sum over any `number` consecutive layers: an upper bound for a stage in the middle."""
        if self._even is not None:
            return self._even * number
        known = self._heaviest.get(number)
        if known is None:
            known = self._heaviest[number] = max(map(sub, self._ends[number:], self._ends))
        return known


class Cut:
    """Computes the memory of a model's ranks for one tensor parallel size and any number of stages."""

    def __init__(
        self,
        costs: Costs,
        tensor: int,
        element_bytes: int,
        *,
        keeps_quantised: bool = False,
        adapters: AdapterRoom | None = None,
        draft: DraftRoom | None = None,
    ) -> None:
        """`tensor`: one of `costs.tensor`. `element_bytes`: the bytes of one number in weights, adapters and KV cache.

        `keeps_quantised`: whether ranks keep the checkpoint's quantised weights. `adapters`: None if ranks keep no
        memory for LoRA adapters. `draft`: None without a draft model.
        """
        index = costs.tensor.index(tensor)
        self._embedding = costs.embedding.bytes_at(index, element_bytes, keeps_quantised=keeps_quantised)
        self._head = costs.head.bytes_at(index, element_bytes, keeps_quantised=keeps_quantised)
        self._both = costs.both.bytes_at(index, element_bytes, keeps_quantised=keeps_quantised)
        of_kinds = [
            kind.weights.bytes_at(index, element_bytes, keeps_quantised=keeps_quantised) for kind in costs.kinds
        ]
        self._weights = Layers(costs, of_kinds)
        self._kv = Layers(costs, [kind.kv.bytes_at(index, element_bytes) * BLOCK_SIZE for kind in costs.kinds])
        self._draft_weights = 0 if draft is None else draft.weights
        self._draft_kv = 0 if draft is None else draft.kv_block
        self._adapters = adapters
        self._adapter_layer = 0  # bytes of an adapter of LoRA rank 1 in one layer
        self._adapter_step = 0
        if adapters is not None:
            layer = adapters.costs.layer
            self._adapter_layer = layer.bytes_at(index, element_bytes, keeps_quantised=keeps_quantised)
            self._adapter_step = adapters.num_step_tokens * adapters.costs.token_bytes[index]

    def ranks(self, stages: Stages) -> frozenset[RankMemory]:
        """Returns the memory of the ranks of these stages. Ranks with equal memory appear once."""
        weights = self._weights
        kv = self._kv
        found = set()
        if number := stages.only:
            found.add(self._sampling(weights.total + self._both, kv.total, number))
        if number := stages.first:
            own = weights.first(number) + self._embedding
            found.add(RankMemory(own, kv.first(number), self._adapters_bytes(number)))
        for number in (stages.longer, stages.shorter):
            if number:
                found.add(RankMemory(weights.heaviest(number), kv.heaviest(number), self._adapters_bytes(number)))
        if number := stages.last:
            own = weights.last(number) + self._head
            found.add(self._sampling(own, kv.last(number), number))
        return frozenset(found)

    def _sampling(self, weights: int, kv_block: int, num_layers: int) -> RankMemory:
        """Returns the memory of the rank that samples. The other ranks of its stage have no draft model."""
        adapters = self._adapters_bytes(num_layers)
        return RankMemory(weights, kv_block + self._draft_kv, adapters, self._draft_weights)

    def _adapters_bytes(self, num_layers: int) -> int:
        """Returns the bytes for adapters on a rank with `num_layers` layers; 0 without adapters."""
        room = self._adapters
        if room is None:
            return 0
        lora_rank = _rounded_up(room.lora_rank, room.costs.rank_multiple)
        one = _rounded_up(num_layers * self._adapter_layer * lora_rank, room.costs.page_bytes)
        return min(room.num_adapters * one + self._adapter_step, _MOST_ADAPTERS_BYTES)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def step_bytes(costs: Costs, tensor: int, *, element_bytes: int, num_tokens: int, num_seqs: int) -> int:
    """Returns the bytes that the largest step needs on a rank in addition to weights and KV cache."""
    of_token = costs.step.token.bytes_at(costs.tensor.index(tensor), element_bytes)
    return num_tokens * of_token + num_seqs * costs.step.sequence_bytes


def drafting_step_bytes(
    target: int, draft: DraftRoom, *, num_tokens: int, num_rows: int, hidden_size: int, vocab_size: int
) -> int:
    """Returns the bytes of the largest step on the rank that samples. `target`: `step_bytes` of the model alone.

    `hidden_size`, `vocab_size`: of the model. While the draft model computes, the model's hidden states and logits
    still live, in float32. The two models share the memory of all other buffers.
    """
    held = 4 * (num_tokens * hidden_size + num_rows * (hidden_size + vocab_size))
    return max(target, num_tokens * draft.token_bytes + num_rows * draft.sequence_bytes) + held


def in_words(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / GIB * 1024:.0f} MiB"

"""Bytes that a rank holds: sums of the parts that the engine's inspection gives. Pure.

Rank r has stage r // tensor (some layers; the first stage also the embedding, the last one the final norm and the head)
and shard r % tensor of it. Each part is that of the shard with most of it, so all shards of a stage count the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, repeat
from operator import mul, sub

from rayloom_operator.api.costs import Costs
from rayloom_operator.resolve.stage_split import Stages

BLOCK_SIZE = 16  # tokens in a KV block
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class RankMemory:
    weights: int  # bytes
    kv_block: int  # bytes of a KV block of its layers and heads


class Layers:
    """Sums of the bytes of layers, over the runs of layers that a stage may have."""

    def __init__(self, costs: Costs, of_kinds: Sequence[int]) -> None:
        """`of_kinds` has the bytes of a layer of each of `costs.kinds`."""
        self._runs = costs.runs
        self._of_kinds = of_kinds
        self.total = sum(map(mul, costs.numbers, of_kinds))
        used = set(of_kinds)
        self._even = used.pop() if len(used) == 1 else None
        self._heaviest: dict[int, int] = {}

    @cached_property
    def _ends(self) -> list[int]:
        """The sums over the first 0, 1, 2 and so on layers."""
        each = chain.from_iterable(repeat(self._of_kinds[kind], number) for number, kind in self._runs)
        return [0, *accumulate(each)]

    def first(self, number: int) -> int:
        """The sum over the first `number` layers."""
        return self._even * number if self._even is not None else self._ends[number]

    def last(self, number: int) -> int:
        """The sum over the last `number` layers."""
        return self._even * number if self._even is not None else self._ends[-1] - self._ends[-1 - number]

    def heaviest(self, number: int) -> int:
        """The largest sum over `number` layers in a row, wherever a stage in the middle may begin."""
        if self._even is not None:
            return self._even * number
        known = self._heaviest.get(number)
        if known is None:
            known = self._heaviest[number] = max(map(sub, self._ends[number:], self._ends))
        return known


class Cut:
    """The ranks of a model whose layers are shared by `tensor` ranks, for any number of stages."""

    def __init__(self, costs: Costs, tensor: int, element_bytes: int) -> None:
        """`tensor` is one of `costs.tensor`; an element of weights and KV cache takes `element_bytes`."""
        index = costs.tensor.index(tensor)
        self._embedding = costs.embedding.bytes_at(index, element_bytes)
        self._head = costs.head.bytes_at(index, element_bytes)
        self._both = costs.both.bytes_at(index, element_bytes)
        self._weights = Layers(costs, [kind.weights.bytes_at(index, element_bytes) for kind in costs.kinds])
        self._kv = Layers(costs, [kind.kv.bytes_at(index, element_bytes) * BLOCK_SIZE for kind in costs.kinds])

    def ranks(self, stages: Stages) -> frozenset[RankMemory]:
        """The ranks of such stages that differ from each other."""
        weights = self._weights
        kv = self._kv
        found = set()
        if stages.only:
            found.add(RankMemory(weights.total + self._both, kv.total))
        if stages.first:
            found.add(RankMemory(weights.first(stages.first) + self._embedding, kv.first(stages.first)))
        for number in (stages.longer, stages.shorter):
            if number:
                found.add(RankMemory(weights.heaviest(number), kv.heaviest(number)))
        if stages.last:
            found.add(RankMemory(weights.last(stages.last) + self._head, kv.last(stages.last)))
        return frozenset(found)


def step_bytes(costs: Costs, tensor: int, *, element_bytes: int, num_tokens: int, num_seqs: int) -> int:
    """Bytes that the largest step of a rank takes beside weights and KV cache."""
    of_token = costs.step.token.bytes_at(costs.tensor.index(tensor), element_bytes)
    return num_tokens * of_token + num_seqs * costs.step.sequence_bytes


def in_words(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / GIB * 1024:.0f} MiB"

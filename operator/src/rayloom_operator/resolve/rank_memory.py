"""What a rank holds, in the engine's own arithmetic: weights, KV cache, a step. Pure; a test holds both to each other.

Rank r has stage r // tensor (some layers; the first also the embedding, the last the final norm and the head) and shard
r % tensor of it: rows of the embedding, head, q, k, v, gate and up, columns of o and down. Norms are on every rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from rayloom_operator.api.model_facts import ModelShape

BLOCK_SIZE = 16  # tokens in a KV block
GIB = 1 << 30
# How far from the even split the best one may be, for whole numbers of layers and inexact ones of floats.
_NEAR = 3


@dataclass(frozen=True, slots=True)
class Rank:
    """Elements, not bytes: of its weights, and of a KV block of its layers and heads."""

    weights: int
    kv_block: int


class Stages(NamedTuple):
    """Layers of the stages that differ, 0 where there is none of a kind. Equal ones hold the same, however many."""

    only: int = 0  # has the embedding, the final norm and the head
    first: int = 0  # has the embedding
    longer: int = 0
    shorter: int = 0
    last: int = 0  # has the final norm and the head


def shard_counts(shape: ModelShape) -> tuple[int, ...]:
    """Numbers of ranks that can share a layer: as many query heads for each, and those use whole key/value heads."""
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    most = min(heads, shape.intermediate_size, shape.vocab_size)
    small = [n for n in range(1, math.isqrt(heads) + 1) if heads % n == 0]
    divisors = sorted({*small, *(heads // n for n in small)})
    return tuple(n for n in divisors if n <= most and (kv_heads % n == 0 or n % kv_heads == 0))


def head_layers(shape: ModelShape) -> float:
    """How many layers take as long as the head. A prompt's tokens but the last need no head."""
    return 0.5 * shape.vocab_size * shape.hidden_size / _layer(shape, 0, 1)


def split_layers(num_layers: int, num_stages: int, head_layers: float) -> tuple[int, ...]:
    """Layers of each stage: as even as can be, but the last has less where its head would make it the slowest."""
    if num_stages == 1:
        return (num_layers,)
    num_last = _num_last_layers(num_layers, num_stages, head_layers)
    least, num_longer = divmod(num_layers - num_last, num_stages - 1)
    # The first stage has the embedding, so it is never one of the longer ones.
    return (*(least + (1 <= stage <= num_longer) for stage in range(num_stages - 1)), num_last)


def stages(num_layers: int, num_stages: int, head_layers: float) -> Stages:
    """The stages of `split_layers` that differ, without a list of all of them."""
    if num_stages == 1:
        return Stages(num_layers)
    num_last = _num_last_layers(num_layers, num_stages, head_layers)
    least, num_longer = divmod(num_layers - num_last, num_stages - 1)
    longer, shorter = least + 1 if num_longer else 0, least if num_longer < num_stages - 2 else 0
    return Stages(0, least, longer, shorter, num_last)


@dataclass(frozen=True, slots=True)
class Cut:
    """How `tensor` ranks share the layers of a stage, whichever stage that is."""

    shape: ModelShape
    kv_heads: int  # of a rank
    parts: frozenset[tuple[int, int]]  # elements of a layer and of embedding or head, for shards that differ

    @classmethod
    def of(cls, shape: ModelShape, tensor: int) -> Cut:
        """`tensor` is one of `shard_counts`."""
        hidden, feed_forward, vocabulary = shape.hidden_size, shape.intermediate_size, shape.vocab_size
        # Parts differ by one row or column, and the first shard has the biases.
        shards = {
            (shard == 0, _part(feed_forward, shard, tensor), _part(vocabulary, shard, tensor)): shard
            for shard in range(tensor)
        }
        parts = ((_layer(shape, shard, tensor), rows * hidden) for (_, _, rows), shard in shards.items())
        return cls(shape, max(1, shape.num_kv_heads // tensor), frozenset(parts))

    def ranks(self, stages: Stages) -> frozenset[Rank]:
        """Every rank of such stages that differs from the others."""
        both = 1 if self.shape.tie_word_embeddings else 2
        # Layers, how often the vocabulary's size, and whether the final norm.
        kinds = (
            (stages.only, both, True),
            (stages.first, 1, False),
            (stages.longer, 0, False),
            (stages.shorter, 0, False),
            (stages.last, 1, True),
        )
        return frozenset(
            Rank(
                num_layers * layer + num_vocabularies * vocabulary + has_norm * self.shape.hidden_size,
                2 * BLOCK_SIZE * num_layers * self.kv_heads * self.shape.head_dim,
            )
            for num_layers, num_vocabularies, has_norm in kinds
            if num_layers
            for layer, vocabulary in self.parts
        )


def ranks(shape: ModelShape, tensor: int, pipeline: int) -> frozenset[Rank]:
    """Every rank that differs from the others. `tensor` is one of `shard_counts`, `pipeline` at most the layers."""
    return Cut.of(shape, tensor).ranks(stages(shape.num_layers, pipeline, head_layers(shape)))


def step_bytes(shape: ModelShape, tensor: int, *, element_bytes: int, num_tokens: int, num_seqs: int) -> int:
    """What the largest step of a rank holds beside weights and KV cache.

    A token has the residual stream, its normed form and a block's result, and the wider of attention and MLP; a
    sequence has its logits in float32, a copy of them and their probabilities.
    """
    feed_forward = 3 * -(-shape.intermediate_size // tensor)
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim // tensor
    token_width = 3 * shape.hidden_size + max(feed_forward, attention)
    return num_tokens * token_width * element_bytes + 3 * num_seqs * shape.vocab_size * 4


def in_words(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / GIB * 1024:.0f} MiB"


def _num_last_layers(num_layers: int, num_stages: int, head_layers: float) -> int:
    """Layers of the last of two stages or more: those with which the slowest stage is fastest, the most of equal ones.

    With more of them the last stage takes longer and the others shorter. So only numbers about the one where both take
    the same are compared: models with a thousand layers are cut in every way within a pass of the operator.
    """

    most = num_layers // num_stages
    equal = math.floor((num_layers - head_layers * (num_stages - 1)) / num_stages)
    best, fastest = 1, math.inf
    for num_last in range(min(max(1, equal - _NEAR), most), min(max(1, equal + _NEAR), most) + 1):
        slowest = max(-(-(num_layers - num_last) // (num_stages - 1)), num_last + head_layers)
        if slowest <= fastest:
            best, fastest = num_last, slowest
    return best


def _layer(shape: ModelShape, shard: int, tensor: int) -> int:
    """Parameters of one layer that a shard has. The shards' results are summed, so only the first adds biases to it."""
    width = shape.hidden_size
    query = shape.num_heads // tensor * shape.head_dim
    qkv = query + 2 * max(1, shape.num_kv_heads // tensor) * shape.head_dim
    feed_forward = _part(shape.intermediate_size, shard, tensor)
    norms = 2 * width + 2 * shape.head_dim * shape.qk_norm
    biases = qkv * shape.qkv_bias + 2 * feed_forward * shape.mlp_bias
    biases += (shape.o_bias + shape.mlp_bias) * width * (shard == 0)
    return width * (qkv + query + 3 * feed_forward) + norms + biases


def _part(size: int, shard: int, tensor: int) -> int:
    return (shard + 1) * size // tensor - shard * size // tensor

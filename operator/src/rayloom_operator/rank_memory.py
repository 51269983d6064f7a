"""What a rank holds, in the engine's own arithmetic: weights, KV cache, a step. Pure; a test holds both to each other.

Rank r has stage r // tensor (some layers; the first also the embedding, the last the final norm and the head) and shard
r % tensor of it: rows of the embedding, head, q, k, v, gate and up, columns of o and down. Norms are on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_operator.model_facts import ModelShape

BLOCK_SIZE = 16  # tokens in a KV block
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Rank:
    """Elements, not bytes: of its weights, and of a KV block of its layers and heads."""

    weights: int
    kv_block: int


def shard_counts(shape: ModelShape) -> tuple[int, ...]:
    """Numbers of ranks that can share a layer: as many query heads for each, and those use whole key/value heads."""
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    most = min(heads, shape.intermediate_size, shape.vocab_size)
    fits = (n for n in range(1, most + 1) if heads % n == 0)
    return tuple(n for n in fits if kv_heads % n == 0 or n % kv_heads == 0)


def split_layers(num_layers: int, num_stages: int, head_layers: float) -> tuple[int, ...]:
    """Layers of each stage: as even as can be, but the last has less where its head would make it the slowest."""
    if num_stages == 1:
        return (num_layers,)

    def slowest(num_last: int) -> float:
        return max(-(-(num_layers - num_last) // (num_stages - 1)), num_last + head_layers)

    num_last = min(range(num_layers // num_stages, 0, -1), key=slowest)
    least, num_longer = divmod(num_layers - num_last, num_stages - 1)
    # The first stage has the embedding, so it is the last to get one more.
    longer = [*range(1, num_stages - 1), 0][:num_longer]
    return (*(least + (stage in longer) for stage in range(num_stages - 1)), num_last)


def ranks(shape: ModelShape, tensor: int, pipeline: int) -> frozenset[Rank]:
    """Every rank that differs from the others. `tensor` is one of `shard_counts`, `pipeline` at most the layers."""
    embedding = shape.vocab_size * shape.hidden_size
    head_layers = 0.5 * embedding / _layer(shape, 0, 1)  # a prompt's tokens but the last need no head
    sizes = split_layers(shape.num_layers, pipeline, head_layers)
    stages = {(size, stage == 0, stage == pipeline - 1) for stage, size in enumerate(sizes)}
    kv_heads = max(1, shape.num_kv_heads // tensor)
    found = set()
    for shard in range(tensor):
        layer = _layer(shape, shard, tensor)
        vocabulary = _part(shape.vocab_size, shard, tensor) * shape.hidden_size
        for size, is_first, is_last in stages:
            num_vocabularies = is_first + is_last
            if is_first and is_last and shape.tie_word_embeddings:
                num_vocabularies = 1
            weights = size * layer + num_vocabularies * vocabulary + is_last * shape.hidden_size
            found.add(Rank(weights, 2 * BLOCK_SIZE * size * kv_heads * shape.head_dim))
    return frozenset(found)


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

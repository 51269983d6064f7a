"""The number of KV blocks of a rank. Pure arithmetic; the caller measures and logs."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_engine.core.window import most_blocks
from rayloom_engine.errors import ConfigError
from rayloom_engine.models.costs import step_sequence_bytes, step_token_elements
from rayloom_engine.models.shape import ModelShape

GIB = 1 << 30
_CPU_SHARE = 0.5  # of free memory: the rest is for activations, the page cache and everything else on the machine
# Of all ranks on a host: beyond it a CPU is too slow to use the context. kv_cache_memory_bytes overrides.
_CPU_CAP = 4 * GIB
_GPU_SHARE = 0.9  # of free memory, the rest is for activations and fragmentation; more where a step needs more


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBlocks:
    """The number of KV blocks that a sequence holds."""

    block_size: int  # tokens in a block
    window: int | None = None  # positions that a token sees in every layer; None when a layer sees all
    num_step_tokens: int = 0  # the most tokens of one step; counts only with a window

    def most(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at once, at most."""
        return most_blocks(num_tokens, self.window, self.num_step_tokens, self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    num_blocks: int
    max_model_len: int
    block_bytes: int  # of the rank's layers and heads, keys and values
    explanation: str  # one line for the log and /status


def step_bytes(shape: ModelShape, num_shards: int, *, element_bytes: int, num_tokens: int, num_seqs: int) -> int:
    """Bytes that a rank's largest step holds at once beside weights and KV cache, as `models.costs` gives them."""
    token_elements = step_token_elements(shape, num_shards)
    return num_tokens * token_elements * element_bytes + num_seqs * step_sequence_bytes(shape)


def plan_kv_memory(
    *,
    block_bytes: int,
    sequence: SequenceBlocks,
    free_bytes: int,
    is_cpu: bool,
    max_num_seqs: int,
    model_max_len: int,
    max_model_len: int | None,
    kv_cache_memory_bytes: int | None,
    num_kv_blocks: int | None,
    step_bytes: int = 0,
    ranks_on_host: int = 1,
) -> KvPlan:
    """The number of blocks and the longest sequence.

    `block_bytes` is for all layers and heads of the rank, keys and values. `model_max_len` is what the model's config
    allows. `free_bytes` are this rank's alone, of `ranks_on_host`. `step_bytes` stay free on a GPU. Raises ConfigError
    when the wanted max_model_len does not fit, or exceeds the model's.
    """
    if max_model_len is not None and max_model_len > model_max_len:
        raise ConfigError(f"max_model_len: {max_model_len} is more than the model's {model_max_len} positions")
    wanted_len = max_model_len or model_max_len
    block_size = sequence.block_size
    useful = max_num_seqs * sequence.most(wanted_len)
    if num_kv_blocks is not None:
        num_blocks, why = num_kv_blocks, "num_kv_blocks"
    elif kv_cache_memory_bytes is not None:
        num_blocks, why = kv_cache_memory_bytes // block_bytes, "kv_cache_memory_bytes"
    else:
        share = _CPU_SHARE if is_cpu else _GPU_SHARE
        budget = int(free_bytes * share)
        why = f"{share:.0%} of {free_bytes / GIB:.2f} GiB free"
        cap = _CPU_CAP // ranks_on_host
        if is_cpu and budget > cap:
            budget, why = cap, f"{cap / GIB:.3g} GiB cap on CPU, {free_bytes / GIB:.2f} GiB free"
        if not is_cpu and budget > free_bytes - step_bytes:
            budget = max(0, free_bytes - step_bytes)
            why = f"{free_bytes / GIB:.2f} GiB free, less {step_bytes / GIB:.2f} GiB for a step"
        num_blocks = budget // block_bytes
        if num_blocks > useful:
            num_blocks, why = useful, f"all that {max_num_seqs} sequences of {wanted_len} tokens need"
    fits_len = max(wanted_len if sequence.most(wanted_len) <= num_blocks else 0, num_blocks * block_size)
    if fits_len < 2 or (max_model_len is not None and fits_len < max_model_len):
        needed = sequence.most(wanted_len) * block_bytes
        raise ConfigError(
            f"max_model_len: one sequence of {wanted_len} tokens needs {needed / GIB:.2f} GiB of KV cache, but there "
            f"is room for {fits_len} tokens ({why}); lower max_model_len or raise kv_cache_memory_bytes"
        )
    length = min(wanted_len, fits_len)
    explanation = (
        f"KV cache: {num_blocks} blocks x {block_size} tokens = {num_blocks * block_size} tokens, "
        f"{num_blocks * block_bytes / GIB:.2f} GiB ({why}); max_model_len {length}"
    )
    if length < wanted_len:
        explanation += f" (cut from {wanted_len} to what fits)"
    return KvPlan(num_blocks=num_blocks, max_model_len=length, block_bytes=block_bytes, explanation=explanation)

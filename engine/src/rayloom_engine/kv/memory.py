"""KvPlan: computes the number of KV blocks of a rank. Pure; the caller measures the memory and logs the result."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_engine.core.window import most_blocks
from rayloom_engine.errors import ConfigError

GIB = 1 << 30
_CPU_SHARE = 0.5  # share of free memory; the rest is for activations, the page cache and everything else on the machine
# Limit for all ranks of a host together: a CPU is too slow to fill a larger cache. kv_cache_memory_bytes overrides it.
_CPU_CAP = 4 * GIB
# Limit of the prefix caches of all ranks of a host, in bytes, until a prompt has missed an evicted prefix. With SmolLM2
# this is 11,000 tokens.
_CPU_KEPT = GIB // 4
_GPU_SHARE = 0.9  # largest share of free memory; the rest is for fragmentation and a step. A step may need even more.


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBlocks:
    """Computes the number of KV blocks that a sequence holds."""

    block_size: int  # tokens in a block
    window: int | None = None  # positions of the widest window of a layer; None if a layer attends to all positions
    num_step_tokens: int = 0  # most tokens in one step; used only if there is a window

    def most(self, num_tokens: int) -> int:
        """Returns the most blocks that a sequence of `num_tokens` tokens can hold at one time."""
        return most_blocks(num_tokens, self.window, self.num_step_tokens, self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDemand:
    """The demands of the settings and the model on the KV cache."""

    block_bytes: int  # bytes of one block: keys and values, in all layers and heads of the rank
    sequence: SequenceBlocks
    max_num_seqs: int
    model_max_len: int  # longest sequence that the model's config allows, in tokens
    max_model_len: int | None = None  # longest sequence that the user wants, in tokens; None: as long as fits
    kv_cache_memory_bytes: int | None = None  # cache size that the user wants; None: a share of free memory
    num_kv_blocks: int | None = None  # cache size in blocks; overrides the bytes

    @property
    def wanted_len(self) -> int:
        return self.max_model_len or self.model_max_len

    @property
    def useful_blocks(self) -> int:
        """The most blocks that all sequences together can hold."""
        return self.max_num_seqs * self.sequence.most(self.wanted_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory in which a rank can allocate its cache."""

    free_bytes: int  # free memory for this rank, after its weights were loaded
    is_cpu: bool
    step_bytes: int = 0  # memory of the largest step, which must stay free
    # Memory of the largest step with the buffers that only some steps have. It stays free if a sequence of the wanted
    # length then still fits.
    most_step_bytes: int = 0
    adapters_bytes: int = 0  # memory of LoRA adapters, which are loaded when a request needs them
    ranks_on_host: int = 1


def share_of_gpu(free_bytes: int, total_bytes: int, own_bytes: int, num_sharing: int) -> int:
    """Returns the free memory of a GPU for one of the `num_sharing` ranks that share the GPU.

    `free_bytes`, `total_bytes`: of the GPU. `own_bytes`: the memory that this rank already has.

    A rank may measure the free memory before another rank has loaded its weights. So a rank counts as free at most the
    rest of its part of the whole memory.
    """
    if num_sharing == 1:
        return free_bytes
    return max(0, min(free_bytes // num_sharing, total_bytes // num_sharing - own_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """The cache that a rank allocates."""

    num_blocks: int
    max_model_len: int
    block_bytes: int  # bytes of one block: keys and values, in all layers and heads of the rank
    explanation: str  # one line for the log and /status
    num_kept_blocks: int | None = None  # limit of the prefix cache until prompts miss evicted blocks; None: no limit


def plan_kv_memory(demand: KvDemand, memory: RankMemory) -> KvPlan:
    """Decides the number of blocks and the longest sequence.

    Raises ConfigError if the user's max_model_len does not fit into memory, or exceeds the model's longest sequence.
    """
    if demand.max_model_len is not None and demand.max_model_len > demand.model_max_len:
        raise ConfigError(
            f"max_model_len: {demand.max_model_len} is more than the model's {demand.model_max_len} positions"
        )
    num_blocks, reason = _num_blocks(demand, memory)
    block_size = demand.sequence.block_size
    wanted_len = demand.wanted_len
    fits_len = max(wanted_len if demand.sequence.most(wanted_len) <= num_blocks else 0, num_blocks * block_size)
    if fits_len < 2 or (demand.max_model_len is not None and fits_len < demand.max_model_len):
        needed = demand.sequence.most(wanted_len) * demand.block_bytes
        raise ConfigError(
            f"max_model_len: one sequence of {wanted_len} tokens needs {needed / GIB:.2f} GiB of KV cache, but there "
            f"is room for {fits_len} tokens ({reason}); lower max_model_len or raise kv_cache_memory_bytes"
        )
    length = min(wanted_len, fits_len)
    explanation = (
        f"KV cache: {num_blocks} blocks x {block_size} tokens = {num_blocks * block_size} tokens, "
        f"{num_blocks * demand.block_bytes / GIB:.2f} GiB ({reason}); max_model_len {length}"
    )
    if length < wanted_len:
        explanation += f" (cut from {wanted_len} to the longest that fits)"
    return KvPlan(
        num_blocks=num_blocks,
        max_model_len=length,
        block_bytes=demand.block_bytes,
        explanation=explanation,
        num_kept_blocks=_num_kept(demand, memory, length),
    )


def _num_kept(demand: KvDemand, memory: RankMemory, max_model_len: int) -> int | None:
    """Returns how many cached blocks may take memory until a prompt has missed an evicted block.

    The number is at least the number of blocks of the longest sequence, so that no block of a single conversation is
    evicted. None on a GPU, because all memory is allocated at once there.
    """
    if not memory.is_cpu:
        return None
    kept_bytes = _CPU_KEPT // memory.ranks_on_host
    return max(kept_bytes // demand.block_bytes, demand.sequence.most(max_model_len))


def _num_blocks(demand: KvDemand, memory: RankMemory) -> tuple[int, str]:
    """Returns the number of blocks, and the setting or measurement that decided it."""
    if demand.num_kv_blocks is not None:
        return demand.num_kv_blocks, "num_kv_blocks"
    if demand.kv_cache_memory_bytes is not None:
        return demand.kv_cache_memory_bytes // demand.block_bytes, "kv_cache_memory_bytes"
    budget, reason = _budget(memory, max(memory.step_bytes, memory.most_step_bytes))
    num_blocks = budget // demand.block_bytes
    # The wanted length has precedence over the buffers that only some steps have: results of attention over a long
    # context, and the rows of many sequences. Few steps have them at their full size, and steps with such results have
    # few tokens, so their other buffers are small. Mostly the memory that _CPU_SHARE leaves free is enough for both.
    needed = demand.sequence.most(demand.wanted_len)
    if num_blocks < needed:
        budget, reason = _budget(memory, memory.step_bytes)
        num_blocks = min(budget // demand.block_bytes, needed)
    if num_blocks > demand.useful_blocks:
        reason = f"all that {demand.max_num_seqs} sequences of {demand.wanted_len} tokens need"
        return demand.useful_blocks, reason
    return num_blocks, reason


def _budget(memory: RankMemory, step_bytes: int) -> tuple[int, str]:
    """Returns the bytes for the cache if a step needs `step_bytes`, and the reason for this number."""
    free = memory.free_bytes
    share = _CPU_SHARE if memory.is_cpu else _GPU_SHARE
    budget = int(free * share)
    reason = f"{share:.0%} of {free / GIB:.2f} GiB free"
    cap = _CPU_CAP // memory.ranks_on_host
    if memory.is_cpu and budget > cap:
        budget, reason = cap, f"{cap / GIB:.3g} GiB cap on CPU, {free / GIB:.2f} GiB free"
    others = step_bytes + memory.adapters_bytes
    if budget > free - others:
        reason = f"{free / GIB:.2f} GiB free, less {step_bytes / GIB:.2f} GiB for a step"
        if memory.adapters_bytes:
            reason += f" and {memory.adapters_bytes / GIB:.2f} GiB for LoRA adapters (max_loras, max_lora_rank)"
        return max(0, free - others), reason
    return budget, reason

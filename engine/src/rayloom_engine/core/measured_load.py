"""MeasuredLoad: the work that a scheduler has, and the tokens per second that earlier steps computed.

An autoscaler reads it in `/status` and divides the work by the measured speed. So the autoscaler needs no profile of
the model or the machine. Not to be confused with SchedulerLoad, which a router compares between engines.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.step_seconds import StepSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLoad:
    # uncomputed tokens of running and waiting prompts; cached prefixes of waiting prompts count as uncomputed
    queued_tokens: int
    running_tokens: int  # tokens that fit in the KV blocks of running sequences
    # the value of `running_tokens` if sequences of the present mean length used all slots or all blocks
    max_running_tokens: int
    prefill_tokens_per_s: float  # tokens per second in a step with prompts alone; 0 = not measured yet
    decode_tokens_per_s: float  # tokens per second in a step with a decode in every slot; 0 = not measured yet


def measured_load(scheduler: Scheduler, costs: StepSeconds | None) -> MeasuredLoad:
    """Returns the present load. `costs`: measured costs of steps; None until there are measurements."""
    config, pool = scheduler.config, scheduler.pool
    held = (pool.num_blocks - pool.num_free) * config.block_size
    most = pool.num_blocks * config.block_size
    if num_running := scheduler.num_running:
        most = min(most, max(held, held * config.max_num_seqs // num_running))
    prefill_per_s = decode_per_s = 0.0
    if costs is not None:
        # The speed for a chunk of the whole token budget. As in StepWork, each token counts as if it attended to the
        # whole chunk.
        prefill_per_s = 1 / (costs.token_s + costs.pair_s * config.max_num_batched_tokens)
        decode_per_s = config.max_num_seqs / costs.decode_s(config.max_num_seqs)
    return MeasuredLoad(
        queued_tokens=scheduler.num_queued_tokens,
        running_tokens=held,
        max_running_tokens=most,
        prefill_tokens_per_s=prefill_per_s,
        decode_tokens_per_s=decode_per_s,
    )

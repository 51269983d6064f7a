"""MeasuredLoad: the work that a scheduler has, and the rates at which earlier steps did such work.

An autoscaler compares both, so that it needs no profile of the model or the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.step_seconds import StepSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLoad:
    queued_tokens: int  # of prompts that are not computed yet
    running_tokens: int  # places in the KV cache that running sequences hold
    max_running_tokens: int  # places that they could hold at their mean length, with every slot or every block in use
    prefill_tokens_per_s: float  # of a prompt that fills a step; 0 = not measured yet
    decode_tokens_per_s: float  # with every slot in use; 0 = not measured yet


def measured_load(scheduler: Scheduler, costs: StepSeconds | None) -> MeasuredLoad:
    """Returns the present load. `costs`: None until they are measured."""
    config, pool = scheduler.config, scheduler.pool
    held = (pool.num_blocks - pool.num_free) * config.block_size
    most = pool.num_blocks * config.block_size
    if num_running := scheduler.num_running:
        most = min(most, max(held, held * config.max_num_seqs // num_running))
    prefill_per_s = decode_per_s = 0.0
    if costs is not None:
        # Masked positions of a chunk count, as in StepWork.
        prefill_per_s = 1 / (costs.token_s + costs.pair_s * config.max_num_batched_tokens)
        decode_per_s = config.max_num_seqs / costs.decode_s(config.max_num_seqs)
    return MeasuredLoad(
        queued_tokens=scheduler.num_queued_tokens,
        running_tokens=held,
        max_running_tokens=most,
        prefill_tokens_per_s=prefill_per_s,
        decode_tokens_per_s=decode_per_s,
    )

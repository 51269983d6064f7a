"""SchedulerStats: the scheduler's current load, and totals since the EngineCore process started."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

_NUM_OUTPUTS = 32
# Upper bounds of the histogram buckets of the tokens in a step; vLLM has the same bounds.
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True)
class Counters:
    """The totals that the scheduler itself counts; `Engine.stats` copies them into SchedulerStats."""

    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # tokens found in the prefix cache
    host_hits: int = 0  # the part of prefix_hits that was in host memory alone
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_corrupt: int = 0  # sequences that ended because their logits were not finite
    num_drafts: int = 0  # verified drafts
    draft_tokens: int = 0  # tokens of the verified drafts
    accepted_tokens: int = 0  # draft tokens that were accepted
    mean_output_tokens: float = 0.0  # mean output tokens of the sequences that ended last; 0 if none has ended yet
    num_outputs: int = 0  # sequences over which mean_output_tokens is computed

    def note_output(self, num_tokens: int) -> None:
        """Counts the output of a sequence that has ended. The mean is over about the last `_NUM_OUTPUTS` outputs."""
        self.num_outputs = min(self.num_outputs + 1, _NUM_OUTPUTS)
        self.mean_output_tokens += (num_tokens - self.mean_output_tokens) / self.num_outputs


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0  # free and cached blocks
    num_preemptions: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix cache
    prefix_hits: int = 0  # tokens found in the prefix cache
    host_hits: int = 0  # the part of prefix_hits that was in host memory alone
    num_host_slots: int = 0  # copies of KV blocks that the host memory of a rank has room for
    num_used_host_slots: int = 0
    num_host_stores: int = 0  # KV blocks copied to host memory
    num_host_loads: int = 0  # KV blocks loaded from host memory
    prompt_tokens: int = 0  # prompt tokens of accepted sequences
    generation_tokens: int = 0  # sampled tokens
    num_corrupt: int = 0  # sequences that ended because their logits were not finite
    num_drafts: int = 0  # verified drafts
    draft_tokens: int = 0  # tokens of the verified drafts
    accepted_tokens: int = 0  # draft tokens that were accepted
    num_steps: int = 0
    step_tokens: int = 0  # tokens computed in all steps
    step_token_counts: tuple[int, ...] = (0,) * (len(STEP_TOKEN_BOUNDS) + 1)  # steps by bucket, not cumulative
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    host_seconds: float = 0.0  # seconds of scheduling, input preparation and update
    # The fields of MeasuredLoad (core/measured_load.py).
    queued_tokens: int = 0
    running_tokens: int = 0
    max_running_tokens: int = 0
    mean_output_tokens: float = 0.0
    prefill_tokens_per_s: float = 0.0  # 0 = not measured yet
    decode_tokens_per_s: float = 0.0  # 0 = not measured yet

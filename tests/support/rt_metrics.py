"""An engine's metrics with values in every family, as after two starts of the EngineCore."""

from __future__ import annotations

from typing import Any

import msgspec

from rayloom_engine.core.stats import SchedulerStats
from rayloom_engine.protocol.messages import CoreStatus, PhaseProgress, RankReport

MODEL_NAME = 'a "quoted\\name"\n'


def busy(metrics: Any, record: type) -> None:
    """Adds an observation to every family. `record`: the class whose objects describe a recovery."""
    rank = RankReport(
        rank=3,
        node="n",
        host="h",
        pid=1,
        phase="idle",
        heartbeat_age_s=0.25,
        step=1,
        memory_bytes=1,
        communication_s=1e-7,
    )
    status = CoreStatus(
        state="serving",
        epoch=1,
        executor="mp",
        step=1,
        last_token_age_s=0.1,
        phases=(PhaseProgress(name="load", seconds=1.5),),
        stats=SchedulerStats(num_running=2, num_waiting=1, num_blocks=3, num_free_blocks=1),
        ranks=(rank,),
    )
    for epoch, hits in ((1, 5), (1, 7), (2, 3), (2, 4)):
        stats = msgspec.structs.replace(
            status.stats, prefix_hits=hits, prefix_queries=10 * hits, num_preemptions=hits, num_corrupt=1
        )
        metrics.observe_core(msgspec.structs.replace(status, epoch=epoch, stats=stats), core_pid=epoch)
    metrics.observe_heartbeats(status, 1.0)
    metrics.observe_api_keys(2, "a problem")
    metrics.observe_failure(ZeroDivisionError())
    metrics.prompt_tokens.add(12_345_678_901)
    for num_tokens in (1, 3):
        metrics.generation_tokens.add(num_tokens)
    for reason in ("stop", "length", "stop"):
        metrics.success.add(1, finished_reason=reason)
    metrics.observe_recovery(record(cause="c", process="rank 0", node="n", at=0.0, started_s=0.0, seconds=1.75))
    for histogram in (metrics.first_token_s, metrics.token_gap_s, metrics.request_s):
        for seconds in (0.0, 0.001, 0.5, 1.0, 1e6):
            histogram.observe(seconds)
    metrics.token_gap_s.observe(0.02, 5)
    for histogram in (metrics.request_prompt_tokens, metrics.request_output_tokens):
        for num_tokens in (1, 2, 200_001):
            histogram.observe(num_tokens)

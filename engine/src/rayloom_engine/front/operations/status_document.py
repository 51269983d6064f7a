"""Builds the `/status` document from the core's newest CoreStatus and the front's own figures. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rayloom_engine import status
from rayloom_engine.config import BLOCK_SIZE, EngineConfig
from rayloom_engine.core.stats import SchedulerStats
from rayloom_engine.front.core_link.recoveries import RecoveryRecord
from rayloom_engine.protocol.messages import CoreStatus, PhaseProgress, RankReport, ServedModel

NO_CORE = CoreStatus(
    state="starting",
    epoch=0,
    executor="",
    step=0,
    last_token_age_s=None,
    phases=(),
    stats=SchedulerStats(),
    ranks=(),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedStatus:
    """The newest CoreStatus, perhaps from a connection that is lost."""

    core: CoreStatus = NO_CORE
    age_s: float = 0.0  # seconds since `core` arrived, to be added to the ages in it
    is_connected: bool = False  # False: the core is gone, and its ranks and batches with it


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontFigures:
    """The front's own part of the document."""

    engine_version: str
    state: status.State
    reason: str
    uptime_s: float
    num_in_flight: int
    num_finished: int
    num_failed: int
    first_token_seconds: dict[str, int]
    recoveries: Iterable[RecoveryRecord]
    adapters: list[status.ReportedAdapter] | None = None
    api_url: str


def status_document(config: EngineConfig, received: ReceivedStatus, front: FrontFigures) -> status.EngineStatus:
    core = received.core
    return status.EngineStatus(
        engine_version=front.engine_version,
        state=front.state,
        reason=front.reason,
        executor=core.executor,
        epoch=core.epoch,
        step=core.step,
        last_token_age_seconds=_aged(core.last_token_age_s, received.age_s),
        last_work_age_seconds=_aged(core.last_work_age_s, received.age_s),
        uptime_seconds=front.uptime_s,
        model=None if core.model is None else _model(config, core.model),
        startup=[_phase(phase) for phase in core.phases],
        ranks=[_rank(rank, received.age_s) for rank in core.ranks] if received.is_connected else [],
        requests=status.Requests(
            in_flight=front.num_in_flight,
            running=core.stats.num_running if received.is_connected else 0,
            waiting=core.stats.num_waiting if received.is_connected else 0,
            finished=front.num_finished,
            failed=front.num_failed,
            first_token_seconds=front.first_token_seconds,
        ),
        kv_cache=_kv_cache(core.stats),
        load=_load(core.stats) if received.is_connected else status.Load(),
        speculation=status.Speculation(
            draft_tokens=core.stats.draft_tokens, accepted_tokens=core.stats.accepted_tokens
        ),
        adapters=front.adapters,
        recoveries=[_recovery(record) for record in front.recoveries],
        api_url=front.api_url,
    )


def _aged(age_s: float | None, more_s: float) -> float | None:
    return None if age_s is None else age_s + more_s


def _model(config: EngineConfig, model: ServedModel) -> status.Model:
    return status.Model(
        name=config.api_model_name,
        source=config.model,
        commit=model.commit,
        architecture=model.architecture,
        num_parameters=model.num_parameters,
        dtype=model.dtype,
        compute_dtype=model.compute_dtype,
        quantization=model.quantization,
        weight_bytes=model.weight_bytes,
        max_model_len=model.max_model_len,
    )


def _phase(phase: PhaseProgress) -> status.Phase:
    return status.Phase(
        name=phase.name,
        seconds=phase.seconds,
        done=phase.done,
        total=phase.total,
        unit=phase.unit,
        finished=phase.is_finished,
    )


def _rank(rank: RankReport, age_s: float) -> status.Rank:
    return status.Rank(
        rank=rank.rank,
        node=rank.node,
        host=rank.host,
        pid=rank.pid,
        phase=rank.phase,
        heartbeat_age_seconds=rank.heartbeat_age_s + age_s,
        step=rank.step,
        memory_bytes=rank.memory_bytes,
        advance=rank.advance,
        communication_seconds=rank.communication_s,
        weight_bytes_read=rank.weight_bytes_read,
    )


def _kv_cache(stats: SchedulerStats) -> status.KvCache:
    num_used = stats.num_blocks - stats.num_free_blocks
    return status.KvCache(
        num_blocks=stats.num_blocks,
        num_free_blocks=stats.num_free_blocks,
        block_size=BLOCK_SIZE,
        usage=num_used / stats.num_blocks if stats.num_blocks else 0.0,
    )


def _load(stats: SchedulerStats) -> status.Load:
    return status.Load(
        queued_tokens=stats.queued_tokens,
        running_tokens=stats.running_tokens,
        max_running_tokens=stats.max_running_tokens,
        mean_output_tokens=stats.mean_output_tokens,
        prefill_tokens_per_second=stats.prefill_tokens_per_s or None,
        decode_tokens_per_second=stats.decode_tokens_per_s or None,
    )


def _recovery(record: RecoveryRecord) -> status.Recovery:
    return status.Recovery(
        cause=record.cause,
        process=record.process,
        node=record.node,
        at=record.at,
        seconds=record.seconds,
        replayed_requests=record.replayed_requests,
        phases=[status.RecoveryPhase(name=phase.name, seconds=phase.seconds) for phase in record.phases],
    )

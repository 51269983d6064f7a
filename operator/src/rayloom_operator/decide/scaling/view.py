"""Makes the scaler's input from an observed service. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayloom_operator.api.autoscaling.spec import Autoscaling
from rayloom_operator.api.autoscaling.state import ScalingInputs
from rayloom_operator.api.spec import Spec
from rayloom_operator.decide.rollout.inputs import IDLE, ReplicaView, is_stopped, target_revision
from rayloom_operator.decide.rollout.phases import RolloutStep
from rayloom_operator.decide.rollout.planner import Planned
from rayloom_operator.decide.scaling.inputs import Bounds, Fleet, RolloutActivity
from rayloom_operator.decide.scaling.load import EngineLoad, Held, ServiceLoad
from rayloom_operator.decide.scaling.windows import Sample
from rayloom_operator.observe.observed import EngineReplica, Observed
from rayloom_operator.observe.verdict import STALE_S

_SETTLED = (RolloutStep.COMPLETE, RolloutStep.SCALING, RolloutStep.ROLLED_BACK)


def may_be_empty(spec: Spec) -> bool:
    """Returns whether the scaler may remove the last engine. If so, the gateways are polled for their requests."""
    return spec.autoscaling is not None and spec.autoscaling.min_replicas == 0


def bounds_of(spec: Autoscaling, *, can_hold: bool) -> Bounds:
    """Returns the bounds of a spec. Unless gateway pods hold requests (`can_hold`), at least one engine stays."""
    least = spec.min_replicas if can_hold else max(spec.min_replicas, 1)
    return Bounds(least=least, most=spec.max_replicas, idle_s=spec.idle_seconds, is_raised=least > spec.min_replicas)


def earlier_rate(inputs: ScalingInputs) -> float:
    """Returns the prompt tokens per second of one engine at the last change of `replicas`; 0 if unknown."""
    return inputs.tokens_per_second / max(inputs.engines, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Staying:
    """The engines that the rollout planner does not terminate, by name."""

    available: frozenset[str]
    unproven: frozenset[str]  # engines without requests, as in `Fleet.num_unproven`
    unschedulable: frozenset[str]  # unschedulable engines that are not in `unproven`
    others: frozenset[str]  # engines that start, do not answer or do not serve; they may have requests

    @property
    def loaded(self) -> frozenset[str]:
        """The engines that may have requests."""
        return self.available | self.others


def staying_engines(planned: Planned) -> Staying:
    state = planned.step.state
    engines = [each for each in planned.view.engines if each.name not in state.terminating]
    target = target_revision(planned.desired, state)
    is_unproven = target != state.current_revision and (is_stopped(planned.desired, state) or not state.is_promoted)
    available = frozenset(each.name for each in engines if each.is_available)
    unproven = frozenset(
        each.name for each in engines if is_unproven and each.revision == target and _takes_nothing(each)
    )
    unschedulable = frozenset(each.name for each in engines if each.state == "unschedulable") - unproven
    others = frozenset(each.name for each in engines) - available - unproven - unschedulable
    return Staying(available=available, unproven=unproven, unschedulable=unschedulable, others=others)


def _takes_nothing(engine: ReplicaView) -> bool:
    return engine.state in IDLE or not engine.is_routed


def activity_of(planned: Planned) -> RolloutActivity:
    """Returns the activity of the rollout planner in its newest step, which may not be stored yet."""
    state = planned.step.state
    if is_stopped(planned.desired, state):
        return RolloutActivity.STOPPED
    # The step's name does not show a missing node. While an engine waits for a node, a rollback keeps its step, and so
    # does a rollout that had ended before.
    staying = (each for each in planned.view.engines if each.name not in state.terminating)
    if any(each.state == "unschedulable" for each in staying):
        return RolloutActivity.WAITING
    return RolloutActivity.SETTLED if state.step in _SETTLED else RolloutActivity.ROLLING


def fleet_of(planned: Planned, load: ServiceLoad, held: Held, samples: tuple[Sample, ...]) -> Fleet:
    """Returns the scaler's input: the engines that stay, with their load, held requests and samples."""
    staying = staying_engines(planned)
    num_unproven = len(staying.unproven)
    replicas = planned.desired.replicas
    return Fleet(
        replicas=replicas,
        num_available=len(staying.available),
        num_for_load=sum(planned.step.state.counts.values()) - num_unproven if num_unproven else replicas,
        num_unproven=num_unproven,
        num_surge=min(num_unproven, planned.desired.rollout.max_surge),
        num_unschedulable=len(staying.unschedulable),
        rollout=activity_of(planned),
        load=load,
        samples=samples,
        held=held,
    )


def engine_requests(observed: Observed) -> dict[str, int]:
    """Returns name of an engine -> requests that ended since its start."""
    return {
        each.name: each.reading.status.requests.finished
        for each in observed.replicas
        if each.reading is not None and each.reading.status is not None
    }


def engine_loads(
    observed: Observed, staying: Staying, mono: float, ended_before: Mapping[str, int] | None = None
) -> tuple[EngineLoad, ...]:
    """Returns the load of each engine that may have requests.

    `ended_before`: the result of `engine_requests` in the last reconcile; None in the first reconcile.
    """
    ended_before = {} if ended_before is None else ended_before
    return tuple(_load(each, mono, ended_before) for each in observed.replicas if each.name in staying.loaded)


def _load(replica: EngineReplica, mono: float, ended_before: Mapping[str, int]) -> EngineLoad:
    reading = replica.reading
    status = reading.status if reading is not None else None
    if reading is None or status is None or reading.failing_since is not None or mono - reading.at > STALE_S:
        return EngineLoad(is_known=False)
    load = status.load
    return EngineLoad(
        is_known=status.state == "serving" and load.max_running_tokens > 0,
        in_flight=status.requests.in_flight,
        had_requests=ended_before.get(replica.name) != status.requests.finished,
        queued_tokens=load.queued_tokens,
        num_waiting=status.requests.waiting,
        running_tokens=load.running_tokens,
        max_running_tokens=load.max_running_tokens,
        mean_output_tokens=load.mean_output_tokens,
        prefill_per_s=load.prefill_tokens_per_second,
        decode_per_s=load.decode_tokens_per_second,
    )

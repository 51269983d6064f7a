"""Makes the scaler's input from an observed service. Pure."""

from __future__ import annotations

from rayloom_operator.api.autoscaling.spec import Autoscaling
from rayloom_operator.decide.rollout.inputs import View
from rayloom_operator.decide.rollout.phases import RolloutStep
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.decide.scaling.inputs import Bounds, RolloutActivity
from rayloom_operator.decide.scaling.load import EngineLoad
from rayloom_operator.observe.observed import EngineReplica, Observed
from rayloom_operator.observe.verdict import STALE_S

_SETTLED = (RolloutStep.COMPLETE, RolloutStep.SCALING, RolloutStep.ROLLED_BACK)


def bounds_of(spec: Autoscaling) -> Bounds:
    return Bounds(least=spec.min_replicas, most=spec.max_replicas, idle_s=spec.idle_seconds)


def activity_of(step: Step) -> RolloutActivity:
    """Returns the activity of the rollout planner in its newest step, which may not be stored yet."""
    if step.state.step == RolloutStep.WAITING_FOR_CAPACITY:
        return RolloutActivity.WAITING
    return RolloutActivity.SETTLED if step.state.step in _SETTLED else RolloutActivity.ROLLING


def num_available(view: View, step: Step) -> int:
    """Returns how many engines serve, without terminating ones."""
    return sum(engine.is_available for engine in view.engines if engine.name not in step.state.terminating)


def engine_loads(observed: Observed, step: Step, mono: float) -> tuple[EngineLoad, ...]:
    """Returns the load of each engine, without terminating ones."""
    staying = (each for each in observed.replicas if each.name not in step.state.terminating)
    return tuple(_load(each, mono) for each in staying)


def _load(replica: EngineReplica, mono: float) -> EngineLoad:
    reading = replica.reading
    status = reading.status if reading is not None else None
    if reading is None or status is None or reading.failing_since is not None or mono - reading.at > STALE_S:
        return EngineLoad(is_known=False)
    load = status.load
    return EngineLoad(
        is_known=status.state == "serving" and load.max_running_tokens > 0,
        queued_tokens=load.queued_tokens,
        num_waiting=status.requests.waiting,
        running_tokens=load.running_tokens,
        max_running_tokens=load.max_running_tokens,
        mean_output_tokens=load.mean_output_tokens,
        prefill_per_s=load.prefill_tokens_per_second,
        decode_per_s=load.decode_tokens_per_second,
    )

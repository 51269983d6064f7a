"""Computes the steps of a rollout without failures, for `rayloom-operator plan --rollout OLD NEW`.

The planner is the same as in a cluster; the engines are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rayloom_operator.api.rollout.spec import Rollout
from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.cli.simulation import Action, SimulatedEngine, SimulatedService, actions
from rayloom_operator.decide.rollout.inputs import Desired
from rayloom_operator.decide.rollout.phases import RolloutStep
from rayloom_operator.decide.rollout.view import desired_of
from rayloom_operator.names import group_name
from rayloom_operator.resolve.resolved import Resolved
from rayloom_operator.resolve.revision import revision


def explain_rollout(old: Resolved, new: Resolved, rollout: Rollout) -> str:
    """Returns one line for each change that the rollout from `old` to `new` makes.

    When the rollout starts, all engines of `old` serve.
    """
    before = revision(old)
    after = revision(new)
    spec = new.service.spec
    num_before = old.service.spec.replicas
    if before == after and spec.replicas == num_before:
        return f"Nothing to do: both are revision {after} with {spec.replicas} replicas."
    desired = replace(desired_of(new, after), rollout=rollout)
    service = _serving(desired, old.service.metadata.name, before, num_before)
    bounds = f"at most {desired.max_engines} engines, at least {desired.min_available} that serve."
    change = f"{before} -> {after}" if before != after else before
    lines = [f"Revision {change}, {num_before} -> {spec.replicas} replicas; {bounds}", ""]
    for number, (step, words) in enumerate(_changes(service), 1):
        lines.append(f"{number:>3}  {step:<9}  {words}")
    return "\n".join(lines)


def _serving(desired: Desired, name: str, revision: str, number: int) -> SimulatedService:
    """Returns a simulated service with `number` serving engines of `revision`."""
    service = SimulatedService(desired, name)
    for each in range(number):
        engine = SimulatedEngine(
            name=group_name(name, revision, each), revision=revision, age_s=1, is_routed=True, is_listed=True
        )
        service.engines[engine.name] = engine
    service.stored = RolloutState(
        current_revision=revision, update_revision=revision, has_served=True, counts={revision: number}
    )
    return service


def _changes(service: SimulatedService) -> Iterator[tuple[str, str]]:
    """Yields (step of the rollout, description) for each change, and at the end the planner's last message."""
    hold_s = service.desired.rollout.analysis.hold_seconds
    seen: object = None
    while True:
        before = set(service.engines)
        stored = service.stored
        step = service.reconcile()
        names = iter(sorted(service.engines.keys() - before))
        found = list(actions(step))
        for action in found:
            yield step.state.step, _words(action, service, names)
        if step.state.step != stored.step and step.state.step == RolloutStep.ANALYZING:
            yield step.state.step, f"for {hold_s} s compare the requests of both revisions"
        if step.requeue_after_s == 0.0:
            continue
        snapshot = _snapshot(service)
        is_idle = not found and snapshot == seen
        if is_idle and step.requeue_after_s is None:
            yield step.state.step, step.message
            return
        seen = snapshot
        service.pass_time(max(hold_s, 1) if is_idle else 1)


def _snapshot(service: SimulatedService) -> object:
    """Returns the state of all engines, without their requests. While it stays equal, the rollout only waits."""
    return [
        (engine.name, engine.state, engine.is_routed, engine.is_listed, engine.ends_s)
        for engine in service.engines.values()
    ]


def _words(action: Action, service: SimulatedService, new_names: Iterator[str]) -> str:
    verb, name = action
    match verb:
        case "make":
            return f"make {next(new_names)}"
        case "route_on":
            return f"{name} made its first token: send it requests"
        case "route_off":
            return f"send {name} no more requests"
        case "drain":
            return f"let {name} finish its requests, for at most {service.desired.drain_seconds} s"
        case "undrain":
            return f"let {name} take requests again"
        case "delete":
            return f"delete {name}"

"""The steps of a roll where all goes well, for `rayloom-operator plan --rollout OLD NEW`.

The planner that works in a cluster acts on one that is made up here: its engines start, serve and drain from one turn
to the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count, islice

from rayloom_operator.api.rollout import Rollout, RolloutState
from rayloom_operator.decide.rollout.counts import Engine, EngineState, Order, Seen
from rayloom_operator.decide.rollout.phases import RolloutStep
from rayloom_operator.decide.rollout.planner import Step, next_step
from rayloom_operator.names import group_name
from rayloom_operator.resolve.resolved import Resolved
from rayloom_operator.resolve.revision import revision

_BEGIN = datetime(2000, 1, 1, tzinfo=UTC)  # any time would do

Engines = dict[str, Engine]  # by name


def explain_rollout(old: Resolved, new: Resolved, rollout: Rollout) -> str:
    """What would be done to get from `old`, whose engines all serve, to `new`, a line for each step."""
    before, after, spec = revision(old), revision(new), new.service.spec
    order = Order(revision=after, replicas=spec.replicas, drain_seconds=spec.drain_seconds, rollout=rollout)
    names = [group_name(old.service.metadata.name, before, number) for number in range(old.service.spec.replicas)]
    engines = {name: Engine(name=name, revision=before, state="well", is_routed=True, is_listed=True) for name in names}
    if before == after and spec.replicas == len(names):
        return f"Nothing to do: both are revision {after} with {spec.replicas} replicas."
    bounds = f"at most {order.most} engines, at least {order.least} that serve."
    change = f"{before} -> {after}" if before != after else before
    lines = [f"Revision {change}, {len(names)} -> {spec.replicas} replicas; {bounds}", ""]
    for number, (step, words) in enumerate(_steps(order, before, engines, old.service.metadata.name), 1):
        lines.append(f"{number:>3}  {step:<9}  {words}")
    return "\n".join(lines)


def _steps(order: Order, before: str, engines: Engines, service: str) -> Iterator[tuple[str, str]]:
    """Each step's name and what is done in it, from `engines` of the revision `before`."""
    state, clock, hold_s = _serving(before, len(engines)), _BEGIN, order.rollout.analysis.hold_seconds
    while True:
        memory, step = state, next_step(order, state, Seen(engines=tuple(engines.values())), clock)
        state, then = step.state, _after(step, engines, service)
        for words in _words(step, then, order):
            yield state.step, words
        if state.step != memory.step and state.step == RolloutStep.ANALYZING:
            yield state.step, f"for {hold_s} s compare the requests of both revisions"
        is_idle = state == memory and then == engines
        if is_idle and step.look_again_s is None:
            yield state.step, step.message
            return
        engines, clock = then, clock + timedelta(seconds=hold_s if is_idle else 1)


def _serving(revision: str, number: int) -> RolloutState:
    return RolloutState(current_revision=revision, update_revision=revision, has_served=True, counts={revision: number})


def _words(step: Step, then: Engines, order: Order) -> Iterator[str]:
    yield from (f"{name} made its first token: send it requests" for name in step.route_on)
    new = [name for name, engine in then.items() if engine.state == "starting"]
    yield from (f"make {name}" for name in new)
    yield from (f"send {name} no more requests" for name in step.route_off)
    yield from (f"let {name} finish what it has, for at most {order.drain_seconds} s" for name in step.drain)
    yield from (f"delete {name}" for name in step.delete)


def _after(step: Step, engines: Engines, service: str) -> Engines:
    """The engines once all of the step is done."""
    found = {}
    for name, engine in engines.items():
        is_routed = (engine.is_routed or name in step.route_on) and name not in step.route_off
        state: EngineState = "draining" if name in step.drain or engine.state == "draining" else "well"
        if name not in step.delete:
            found[name] = replace(engine, state=state, is_routed=is_routed, is_listed=is_routed)
    for made, number in step.make.items():
        free = (name for each in count() if (name := group_name(service, made, each)) not in engines)
        for name in islice(free, number):
            found[name] = Engine(name=name, revision=made, state="starting")
    return found

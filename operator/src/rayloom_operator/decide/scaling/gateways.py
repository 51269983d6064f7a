"""The requests in the gateways of a service, from the last answers of its gateway pods. Pure.

A service without engines depends on its gateways. The gateways hold requests, and need a tokenizer to read these
requests. So the scaler removes the last engine only once every gateway pod that the spec asks for is ready and has a
tokenizer. Each ready pod of an LLMGateway that serves the model must have a tokenizer, too. While there is no engine, a
gateway pod without a tokenizer makes the scaler create an engine, as a held request does. A recreated pod, for example,
has no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping

from rayloom_operator.api.spec import Spec
from rayloom_operator.decide.scaling.load import Held
from rayloom_operator.engines.status import EngineStatus
from rayloom_operator.observe.observed import Observed, Reading
from rayloom_operator.observe.verdict import STALE_S

# A gateway pod counts as a pod without a tokenizer only after this many seconds. A restarted container needs a second
# or two to load the tokenizer from the pod's volume.
_TEXT_PATIENCE_S = 5.0
_WITHOUT_TEXT = "starting"  # state of a gateway before it has a tokenizer


def ended_requests(observed: Observed) -> dict[str, int]:
    """Returns name of a gateway pod -> requests that ended since its start."""
    return {
        name: reading.status.requests.finished
        for name, reading in observed.gateway_readings.items()
        if reading.status is not None
    }


def can_hold(spec: Spec, observed: Observed) -> bool:
    """Returns whether gateway pods hold requests while the service has no engine. True while that is not known."""
    own = spec.gateway is not None and spec.gateway.replicas > 0
    return own or observed.llmgateways is None or any(each.replicas > 0 for each in observed.llmgateways)


def held_in(observed: Observed, num_wanted: int, ended_before: Mapping[str, int] | None, mono: float) -> Held:
    """Returns the requests in the gateways.

    `num_wanted`: number of gateway pods that the spec asks for. `ended_before`: the result of `ended_requests` in the
    last reconcile; None in the first reconcile.
    """
    others = [each for gateway in observed.llmgateways or () for each in gateway.pods]
    pods = (*observed.gateways, *others)
    readings = {each.name: observed.gateway_readings.get(each.name) for each in pods}
    statuses = {name: status for name, each in readings.items() if (status := _fresh(each, mono)) is not None}
    # A pod of an LLMGateway that does not know the model (yet, or any more) has no requests for this model.
    absent = {name for name, status in statuses.items() if status.is_absent}
    answers = [status for name, status in statuses.items() if name not in absent]
    with_text = {name for name, status in statuses.items() if _has_text(status)}
    num_known = sum(each.is_ready and each.name in with_text for each in observed.gateways)
    is_complete = (
        num_known >= num_wanted
        and num_known == len(observed.gateways)
        and observed.llmgateways is not None
        and all(each.name in with_text or each.name in absent for each in others if each.is_ready)
    )
    return Held(
        tokens=sum(each.load.queued_tokens for each in answers),
        requests=sum(each.requests.waiting for each in answers),
        in_flight=sum(each.requests.in_flight for each in answers),
        is_complete=is_complete,
        # Requests that begin and end between two reconciles count, too.
        had_requests=ended_before is None or ended_before != ended_requests(observed),
        num_blind=sum(_needs_text(each) for each in answers)
        + sum(_is_silent(readings[each.name], mono) for each in pods if each.is_ready),
    )


def _fresh(reading: Reading | None, mono: float) -> EngineStatus | None:
    if reading is None or reading.failing_since is not None or mono - reading.at > STALE_S:
        return None
    return reading.status


def _has_text(status: EngineStatus) -> bool:
    return status.state not in (_WITHOUT_TEXT, "failed") and not status.is_absent


def _needs_text(status: EngineStatus) -> bool:
    return status.state == _WITHOUT_TEXT and status.uptime_seconds > _TEXT_PATIENCE_S


def _is_silent(reading: Reading | None, mono: float) -> bool:
    """Returns whether a ready gateway has not answered for more than STALE_S. Such a gateway may hold requests that no
    reading shows.
    """
    return reading is not None and reading.failing_since is not None and mono - reading.failing_since > STALE_S

"""PodModels: whether a gateway pod has read the present models file, according to the pod's last answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rayloom_operator.api.llmgateway.stored import GatewayPodStatus, ReadState
from rayloom_operator.engines.status import GatewayReport
from rayloom_operator.observe.observed import Pod, Reading
from rayloom_operator.observe.verdict import STALE_S

_NOT_READ = (
    "The pod has not read the present list of models yet. The kubelet brings it, at the latest within two minutes."
)
_NO_ANSWER = "The pod has not answered the operator yet."


@dataclass(frozen=True, slots=True, kw_only=True)
class PodModels:
    """The models file of a gateway pod."""

    name: str  # name of the pod
    state: ReadState
    models_hash: str = ""  # hash of the file that is in force in the pod; empty if unknown
    message: str = ""  # cause of the state; empty if it is Current


def pod_models(
    pods: Iterable[Pod],
    readings: Mapping[str, Reading],
    stored: Iterable[GatewayPodStatus],
    present_hash: str,
    mono: float,
) -> tuple[PodModels, ...]:
    """Returns the models file of each pod, sorted by the pods' names. `present_hash`: the hash of the present file.

    `stored`: status.pods as last written. `stored` is used for pods that have not answered this operator process yet.
    """
    before = {each.name: each for each in stored}
    return tuple(
        _stored_models(before[name], present_hash)
        if name not in readings and name in before
        else _pod_models(name, readings.get(name), present_hash, mono)
        for name in sorted(each.name for each in pods)
    )


def fresh_report(reading: Reading | None, mono: float) -> GatewayReport | None:
    """Returns the report in the last answer of a gateway pod; None if there is no such report, or if the answer is too
    old."""
    if reading is None or reading.status is None or stale_after_s(reading, mono) < 0:
        return None
    return reading.status.gateway


def stale_after_s(reading: Reading, mono: float) -> float:
    """Returns the seconds until the last answer is too old; negative afterwards, infinity before the first answer."""
    return reading.at + STALE_S - mono


def _stored_models(stored: GatewayPodStatus, present_hash: str) -> PodModels:
    if stored.models == "Current" and stored.models_hash != present_hash:
        return PodModels(name=stored.name, state="Outdated", models_hash=stored.models_hash, message=_NOT_READ)
    return PodModels(name=stored.name, state=stored.models, models_hash=stored.models_hash, message=stored.message)


def _pod_models(name: str, reading: Reading | None, present_hash: str, mono: float) -> PodModels:
    report = fresh_report(reading, mono)
    if report is None:
        error = "" if reading is None else reading.error
        message = f"The operator cannot ask the pod for its list of models: {error}" if error else _NO_ANSWER
        return PodModels(name=name, state="Unknown", message=message)
    state: ReadState = "Current"
    message = ""
    if report.refusal:
        state = "Refused"
        message = f"The pod cannot use the present list of models, and serves by the one before: {report.refusal}"
    elif report.models_hash != present_hash:
        state = "Outdated"
        message = _NOT_READ
    elif report.problems:
        state = "Refused"
        message = f"The pod does not serve a part of the list of models: {'; '.join(report.problems)}"
    return PodModels(name=name, state=state, models_hash=report.models_hash, message=message)

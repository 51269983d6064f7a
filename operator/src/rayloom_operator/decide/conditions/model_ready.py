"""ModelReady: every rank of an engine has loaded the model."""

from __future__ import annotations

from rayloom_operator.api.status import Reason
from rayloom_operator.decide.conditions.available import without_engines
from rayloom_operator.decide.conditions.evidence import Evidence, Finding
from rayloom_operator.observe.observed import Verdict

_MODEL_FAULTS = (
    Reason.MODEL_NOT_FOUND,
    Reason.MODEL_UNUSABLE,
    Reason.MODEL_NO_ACCESS,
    Reason.MODEL_GATED,
    Reason.HUB_UNREACHABLE,
)
_LOADED = Verdict(reason=Reason.LOADED, message="Every rank has loaded the model.")
_LOADING = Verdict(reason=Reason.LOADING, message="No engine has reported yet that every rank has loaded the model.")


def model_ready(evidence: Evidence) -> Finding:
    verdict = _verdict(evidence)
    return Finding("ModelReady", verdict.reason is Reason.LOADED, verdict)


def _verdict(evidence: Evidence) -> Verdict:
    unknown = evidence.situation.inspection.verdict
    if unknown is not None:
        return unknown
    if (verdict := without_engines(evidence)) is not None:
        return verdict
    if any(each.verdict.is_loaded for each in evidence.staying):
        return _LOADED
    faults = (each.verdict for each in evidence.staying if each.verdict.reason in _MODEL_FAULTS)
    return next(faults, _LOADING)

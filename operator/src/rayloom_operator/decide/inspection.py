"""Whether a service's model is known, and what to do while it is not. Pure.

What was found is remembered in the status, so Jobs may go and a restarted operator starts none. A branch is looked up
once for a source and a revision: all ranks of all engines load the commit that it had then. While an attempt runs, the
one before it still says what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
from pydantic import ValidationError

from rayloom_operator.api.model_facts import ModelFacts, builtin_facts
from rayloom_operator.api.spec import LLMService
from rayloom_operator.api.status import Model, Reason, stored_model
from rayloom_operator.names import INSPECT_CONTAINER, SERVICE_LABEL, Manifest
from rayloom_operator.objects.companions import service_account
from rayloom_operator.objects.inspect_job import attempt_of, inspect_job
from rayloom_operator.observe.observed import Verdict, pod, refused_pod, without_suffixes
from rayloom_operator.resolve.resolved import Hub
from rayloom_operator.texts import head, plain, tail
from rayloom_operator.times import moment

_FIRST_RETRY_S = 30.0
_MAX_RETRY_S = 300.0
_MAX_DOUBLINGS = 10
_REASONS = {
    "NotFound": Reason.MODEL_NOT_FOUND,
    "NoAccess": Reason.MODEL_NO_ACCESS,
    "Gated": Reason.MODEL_GATED,
    "Unsupported": Reason.MODEL_UNSUPPORTED,
    "Unreachable": Reason.HUB_UNREACHABLE,
    "Invalid": Reason.MODEL_UNUSABLE,
}
# These may pass by themselves; the others need somebody to do something.
_PASSING = (Reason.HUB_UNREACHABLE, Reason.INSPECTION_FAILED)
_TOKEN = (Reason.MODEL_NO_ACCESS, Reason.MODEL_GATED)
# A Job has its pod within a second; after so many it is asked why there is none.
_POD_S = 5.0
_MAX_WORDS = 600  # characters of what a Job says
_OVER = ("Failed", "Complete")  # conditions of a Job
_INSPECTING = Verdict(reason=Reason.INSPECTING, message="A Job looks at the model, before pods are made for it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    facts: ModelFacts | None = None  # None while they are not known
    model: Model | None = None  # what the status is to remember
    verdict: Verdict | None = None  # why they are not known
    wanted: tuple[Manifest, ...] = ()  # objects to make now
    look_again_s: float | None = None  # when time alone changes something
    waiting: tuple[Manifest, ...] = ()  # pods that do not run yet
    is_podless: bool = False  # the Job should have its pod by now


class _Error(msgspec.Struct):
    reason: str
    message: str


class _Said(msgspec.Struct):
    """The words of a Job, as far as they say whether it found the model."""

    error: _Error | None = None


@dataclass(frozen=True, slots=True)
class _Ended:
    verdict: Verdict
    at: datetime


def inspect(
    service: LLMService,
    image: str,
    hub: Hub,
    stored: Mapping[str, Any],
    jobs: Sequence[Manifest],
    pods: Sequence[Manifest],
    failures: Mapping[str, str],
    clock: datetime,
) -> Inspection:
    """`stored` is the service's status as it was written last, `jobs` and `pods` are all that carry its label.

    `failures` says by uid what Events say: of a pod about its volumes, of a Job why it could get no pod.
    """
    model = service.spec.model
    if (facts := builtin_facts(model)) is not None:
        return Inspection(facts=facts)
    known, asked = stored_model(stored), (model.source, model.revision or "")
    if known is not None and (known.source, known.revision) == asked:
        return Inspection(facts=known, model=known)
    first = inspect_job(service, image, hub, 0)
    stem = first["metadata"]["name"].rsplit("-", 1)[0]
    attempts = {attempt_of(name): job for job in jobs if (name := job["metadata"]["name"]).rsplit("-", 1)[0] == stem}
    if not attempts:
        return Inspection(model=known, verdict=_INSPECTING, wanted=(service_account(service), first))
    newest = max(attempts)
    found = {number: _outcome(service, job, _pod_of(job, pods)) for number, job in attempts.items()}
    last, before = found[newest], found.get(newest - 1)
    if isinstance(last, ModelFacts):
        source, revision = asked
        return Inspection(facts=last, model=Model(source=source, revision=revision, **dict(last)))
    if last is None:
        earlier = before.verdict if isinstance(before, _Ended) else _INSPECTING
        running = _pod_of(attempts[newest], pods)
        if running is None:
            return _without_pod(attempts[newest], known, earlier, failures, clock)
        seen = pod(running, failures.get(running["metadata"]["uid"], ""))
        return Inspection(model=known, verdict=seen.fault or earlier, waiting=(running,) if seen.is_mounting else ())
    grown = _FIRST_RETRY_S * 2 ** min(newest, _MAX_DOUBLINGS)
    delay = min(grown, _MAX_RETRY_S) if last.verdict.reason in _PASSING else _MAX_RETRY_S
    left = delay - (clock - last.at).total_seconds()
    if left > 0:
        return Inspection(model=known, verdict=last.verdict, look_again_s=left)
    wanted = service_account(service), inspect_job(service, image, hub, newest + 1)
    return Inspection(model=known, verdict=last.verdict, wanted=wanted)


def _without_pod(
    job: Manifest, known: Model | None, earlier: Verdict, failures: Mapping[str, str], clock: datetime
) -> Inspection:
    """A Job whose pod is to come, or cannot be made: a quota or an admission rule is in its way."""
    meta = job["metadata"]
    left = _POD_S - (clock - moment(meta.get("creationTimestamp", ""))).total_seconds()
    if left > 0:
        return Inspection(model=known, verdict=earlier, look_again_s=left)
    refusal = without_suffixes(failures.get(meta["uid"], ""), meta["name"])
    verdict = refused_pod(refusal) if refusal else earlier
    return Inspection(model=known, verdict=verdict, look_again_s=_POD_S, is_podless=True)


def _pod_of(job: Manifest, pods: Sequence[Manifest]) -> Manifest | None:
    uid = job["metadata"]["uid"]
    own = (each for each in pods if any(owner["uid"] == uid for owner in each["metadata"].get("ownerReferences", ())))
    return next(own, None)


def _outcome(service: LLMService, job: Manifest, own: Manifest | None) -> ModelFacts | _Ended | None:
    """What an attempt came to; None while it runs."""
    containers = own.get("status", {}).get("containerStatuses", ()) if own is not None else ()
    # Sidecars that a cluster adds have ends of their own.
    states = (each["state"] for each in containers if each["name"] == INSPECT_CONTAINER)
    ended = next((each["terminated"] for each in states if "terminated" in each), None)
    if ended is not None:
        # A container that its node lost has no end.
        return _words(service, ended, ended.get("finishedAt") or job["metadata"]["creationTimestamp"])
    conditions = job.get("status", {}).get("conditions", ())
    over = next((each for each in conditions if each["type"] in _OVER and each["status"] == "True"), None)
    if over is None or (over["type"] == "Complete" and own is not None):  # news of its pod is on its way
        return None
    cause = " ".join(f"{over.get('reason', '')}: {over.get('message', '')}".split()).strip(": ") or "its pod is gone"
    message = f"The Job that looks at the model failed: {cause}."
    return _ended(service, Reason.INSPECTION_FAILED, message, over["lastTransitionTime"])


def _words(service: LLMService, ended: Manifest, at: str) -> ModelFacts | _Ended:
    """What the engine left (schemas/inspection.v1.json). Whoever chose image and model chose these words."""
    words = ended.get("message", "")
    try:
        error = msgspec.json.decode(words, type=_Said).error
        if error is not None:
            reason = _REASONS.get(error.reason, Reason.MODEL_UNUSABLE)
            return _ended(service, reason, f"{head(plain(error.message), _MAX_WORDS)}.", at)
        document = msgspec.json.decode(words)
    except (ValueError, RecursionError):
        document = {}
    try:
        return ModelFacts.model_validate(document)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_input=False)[0]
    if first["type"] != "missing":
        where = ".".join(str(part) for part in first["loc"])
        why = first["msg"].removeprefix("Value error, ")
        message = f"This operator serves no model of such a {where}: {why}."
        return _ended(service, Reason.MODEL_UNSUPPORTED, message, at)
    end = tail(plain(words), _MAX_WORDS) or "it left no word; see its log"
    cause = f"{ended.get('reason', 'Error')}, exit code {ended['exitCode']}"
    message = f"The Job that looks at the model ended ({cause}): {end}."
    return _ended(service, Reason.INSPECTION_FAILED, message, at)


def _ended(service: LLMService, reason: Reason, message: str, at: str) -> _Ended:
    token = " The token comes from the Secret that spec.model.tokenSecretRef names." if reason in _TOKEN else ""
    # No name of a Job: the message is to stay the same from attempt to attempt.
    label = f"{SERVICE_LABEL}={service.metadata.name}"
    again = f" It is tried again within 5 min; at once after: kubectl delete jobs -l {label}"
    return _Ended(Verdict(reason=reason, message=message + token + again), datetime.fromisoformat(at))

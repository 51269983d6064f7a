"""Inspection: the facts of a service's model, or the Job that finds them and why there are none. Pure.

Facts are stored in the status, so Jobs may expire and a restarted operator starts none. A branch is resolved once for a
source and a revision: all ranks of all engines load the commit that it had then. While an attempt runs, the verdict is
that of the attempt before it.

An operator of an earlier version stored facts without costs. They keep a service as it was sized; `decide.refresh`
lets a few Jobs at a time inspect such models again, at the same commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
from pydantic import ValidationError

from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.shipped_facts import builtin_facts
from rayloom_operator.api.spec import LLMService
from rayloom_operator.api.status import InspectedModel, Reason, stored_model
from rayloom_operator.decide.refresh import Refresh
from rayloom_operator.names import INSPECT_CONTAINER, SERVICE_LABEL, Manifest
from rayloom_operator.objects.companions import service_account
from rayloom_operator.objects.inspect_job import attempt_of, inspect_job
from rayloom_operator.observe.observed import Verdict, refused_pod
from rayloom_operator.observe.pods import pod
from rayloom_operator.observe.replicas import without_suffixes
from rayloom_operator.resolve.resolved import Hub, is_given, is_sized
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
# These may end without an action; the others need a change of the spec, the token or the model.
_PASSING = (Reason.HUB_UNREACHABLE, Reason.INSPECTION_FAILED)
_TOKEN = (Reason.MODEL_NO_ACCESS, Reason.MODEL_GATED)
# A Job has its pod within a second; after so many its Events are read for the reason why there is none.
_POD_S = 5.0
_MAX_MESSAGE = 600  # characters of a Job's termination message that a condition shows
_OVER = ("Failed", "Complete")  # conditions of a Job
_VERSIONS = ("v1", "v2")  # of schemas/inspection; documents of v1 have no costs
_INSPECTING = Verdict(reason=Reason.INSPECTING, message="A Job inspects the model, before pods are made for it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    facts: ModelFacts | None = None  # None while they are unknown
    model: InspectedModel | None = None  # for the status to store
    verdict: Verdict | None = None  # why the facts are unknown
    wanted: tuple[Manifest, ...] = ()  # objects to make now
    look_again_s: float | None = None  # when time alone changes something
    waiting: tuple[Manifest, ...] = ()  # pods that do not run yet
    is_podless: bool = False  # the Job should have its pod by now
    refresh: Refresh = Refresh.NONE  # of facts without costs
    refresh_job: Manifest | None = None  # to make now; a refusal of it is no fault of the service


@dataclass(frozen=True, slots=True)
class Tried:
    """The objects of a service's inspections so far."""

    jobs: Sequence[Manifest] = ()  # all that carry the service's label
    pods: Sequence[Manifest] = ()  # the same
    # Texts of Events by uid: why a Job has no pod, or a pod no volume.
    failures: Mapping[str, str] = field(default_factory=dict)


class _Error(msgspec.Struct):
    reason: str
    message: str


class _Header(msgspec.Struct):
    """The part of an inspection that tells facts, faults and documents of later versions apart."""

    version: str = "v1"
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
    tried: Tried,
    clock: datetime,
    may_refresh: bool = False,
) -> Inspection:
    """Returns the facts of the service's model, or the Job to make and the verdict of the attempts so far.

    `stored` is the service's status as it was written last. Facts without costs are found again where the service has
    to be sized; where its sizing stays, only if `may_refresh`.
    """
    model = service.spec.model
    if (facts := builtin_facts(model)) is not None:
        return Inspection(facts=facts)
    known = stored_model(stored)
    is_current = known is not None and (known.source, known.revision) == (model.source, model.revision or "")
    if known is not None and is_current:
        if known.costs is not None:
            return Inspection(facts=known, model=known)
        if is_sized(service, known, stored):
            return _refreshed(service, image, hub, known, tried, may_refresh)
        if known.version is not None and is_given(service):
            # The inspection gave no costs. The engine itself refuses a model that does not fit.
            return Inspection(facts=known, model=known)
    # Ranks of engines that run have loaded the stored commit.
    commit = known.commit if known is not None and is_current else None
    first = inspect_job(service, image, hub, 0, commit)
    attempts = _attempts(first, tried.jobs)
    if not attempts:
        return Inspection(model=known, verdict=_INSPECTING, wanted=(service_account(service), first))
    newest = max(attempts)
    found = {number: _outcome(service, job, _pod_of(job, tried.pods)) for number, job in attempts.items()}
    last = found[newest]
    before = found.get(newest - 1)
    if isinstance(last, ModelFacts):
        return Inspection(facts=last, model=_model(service, last))
    if last is None:
        earlier = before.verdict if isinstance(before, _Ended) else _INSPECTING
        running = _pod_of(attempts[newest], tried.pods)
        if running is None:
            return _without_pod(attempts[newest], known, earlier, tried.failures, clock)
        seen = pod(running, tried.failures.get(running["metadata"]["uid"], ""))
        return Inspection(model=known, verdict=seen.fault or earlier, waiting=(running,) if seen.is_mounting else ())
    grown = _FIRST_RETRY_S * 2 ** min(newest, _MAX_DOUBLINGS)
    delay = min(grown, _MAX_RETRY_S) if last.verdict.reason in _PASSING else _MAX_RETRY_S
    left = delay - (clock - last.at).total_seconds()
    if left > 0:
        return Inspection(model=known, verdict=last.verdict, look_again_s=left)
    wanted = (service_account(service), inspect_job(service, image, hub, newest + 1, commit))
    return Inspection(model=known, verdict=last.verdict, wanted=wanted)


def _refreshed(
    service: LLMService,
    image: str,
    hub: Hub,
    known: InspectedModel,
    tried: Tried,
    may_start: bool,
) -> Inspection:
    """The facts of a service that runs without costs: with those that a Job found, else as they are stored.

    A Job that fails, or finds another model in the same place, changes nothing: the service runs without its result.
    """
    job = inspect_job(service, image, hub, 0, known.commit)
    made = _attempts(job, tried.jobs).get(0)
    if made is None and not may_start:
        return Inspection(facts=known, model=known, refresh=Refresh.DUE)
    if made is None:
        return Inspection(facts=known, model=known, refresh=Refresh.STARTING, refresh_job=job)
    found = _outcome(service, made, _pod_of(made, tried.pods))
    if found is None:
        return Inspection(facts=known, model=known, refresh=Refresh.RUNNING)
    if isinstance(found, ModelFacts) and found.costs is not None:
        is_same = (found.shape, found.commit) == (known.shape, known.commit)
        known = _model(service, found) if is_same else known
    return Inspection(facts=known, model=known, refresh=Refresh.ENDED)


def _model(service: LLMService, facts: ModelFacts) -> InspectedModel:
    """The facts as the status stores them."""
    model = service.spec.model
    return InspectedModel(source=model.source, revision=model.revision or "", **dict(facts))


def _attempts(first: Manifest, jobs: Sequence[Manifest]) -> dict[int, Manifest]:
    """The Jobs that differ from `first` in their attempt alone, by that number."""
    stem = _stem(first)
    return {attempt_of(job["metadata"]["name"]): job for job in jobs if _stem(job) == stem}


def has_unfinished(jobs: Sequence[Manifest]) -> bool:
    """True where one of a service's Jobs runs."""
    return any(not any(_is_over(each) for each in job.get("status", {}).get("conditions", ())) for job in jobs)


def _is_over(condition: Manifest) -> bool:
    return condition["type"] in _OVER and condition["status"] == "True"


def _stem(job: Manifest) -> str:
    return str(job["metadata"]["name"]).rsplit("-", 1)[0]


def _without_pod(
    job: Manifest, known: InspectedModel | None, earlier: Verdict, failures: Mapping[str, str], clock: datetime
) -> Inspection:
    """The inspection whose Job has no pod yet, or can get none because of a quota or an admission rule."""
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
    """The facts that an attempt found, or how it failed; None while it runs."""
    containers = own.get("status", {}).get("containerStatuses", ()) if own is not None else ()
    # Sidecars that a cluster adds have termination messages of their own.
    states = (each["state"] for each in containers if each["name"] == INSPECT_CONTAINER)
    ended = next((each["terminated"] for each in states if "terminated" in each), None)
    if ended is not None:
        # A container that its node lost has no time of its end.
        return _read(service, ended, ended.get("finishedAt") or job["metadata"]["creationTimestamp"])
    conditions = job.get("status", {}).get("conditions", ())
    over = next(filter(_is_over, conditions), None)
    if over is None or (over["type"] == "Complete" and own is not None):  # the event of its pod is still to come
        return None
    cause = " ".join(f"{over.get('reason', '')}: {over.get('message', '')}".split()).strip(": ") or "its pod is gone"
    message = f"The Job that inspects the model failed: {cause}."
    return _ended(service, Reason.INSPECTION_FAILED, message, over["lastTransitionTime"])


def _read(service: LLMService, ended: Manifest, at: str) -> ModelFacts | _Ended:
    """The content of a termination message (schemas/inspection.v2.json), which the image and the model have chosen."""
    text = ended.get("message", "")
    try:
        header = msgspec.json.decode(text, type=_Header)
        if header.error is not None:
            reason = _REASONS.get(header.error.reason, Reason.MODEL_UNUSABLE)
            return _ended(service, reason, f"{head(plain(header.error.message), _MAX_MESSAGE)}.", at)
        if header.version not in _VERSIONS:
            version = head(plain(header.version), 16)
            message = f"The engine's inspection is of version {version}, which this operator cannot read: upgrade it."
            return _ended(service, Reason.INSPECTION_FAILED, message, at)
        document = msgspec.json.decode(text)
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
    end = tail(plain(text), _MAX_MESSAGE) or "it left no message; see its log"
    cause = f"{ended.get('reason', 'Error')}, exit code {ended['exitCode']}"
    message = f"The Job that inspects the model ended ({cause}): {end}."
    return _ended(service, Reason.INSPECTION_FAILED, message, at)


def _ended(service: LLMService, reason: Reason, message: str, at: str) -> _Ended:
    token = " The token comes from the Secret that spec.model.tokenSecretRef names." if reason in _TOKEN else ""
    # The message names no Job, so that it is the same for each attempt.
    label = f"{SERVICE_LABEL}={service.metadata.name}"
    again = f" It is tried again within 5 min; at once after: kubectl delete jobs -l {label}"
    return _Ended(Verdict(reason=reason, message=message + token + again), datetime.fromisoformat(at))

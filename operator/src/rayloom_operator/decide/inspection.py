"""Inspection: gives the facts of a service's model (its shape and its costs in bytes), or the Job to find them. Pure.

While there are no facts, a verdict says why. Facts are stored in the status, so Jobs may expire, and a restarted
operator starts no new Jobs. The inspection resolves a branch to a commit, which is stored with the facts. All ranks of
all engines load this commit until the spec names another source or revision.

If a Job fails, another Job is the next attempt. While an attempt runs, the verdict on the earlier attempt stays.

Earlier versions of the operator stored facts without costs. A service with such facts keeps the sizing that it has.
`decide.refresh` lets a few Jobs at a time inspect the models of such services again, at the same commit.
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
from rayloom_operator.decide.inspected import facts_of_spec, inspected_model, stored_commits
from rayloom_operator.decide.refresh import Refresh
from rayloom_operator.names import INSPECT_CONTAINER, SERVICE_LABEL, Manifest
from rayloom_operator.objects.companions import service_account
from rayloom_operator.objects.inspect_job import attempt_of, inspect_job
from rayloom_operator.objects.ownership import is_owned
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
# These faults may pass by themselves. All other faults need a change of the spec, the token or the model.
_PASSING = (Reason.HUB_UNREACHABLE, Reason.INSPECTION_FAILED)
_TOKEN = (Reason.MODEL_NO_ACCESS, Reason.MODEL_GATED)
# A Job normally has its pod within a second. If a Job has no pod after this many seconds, the Job's Events are read to
# find out why.
_POD_S = 5.0
_MAX_MESSAGE = 600  # characters of a Job's termination message that a condition shows
_OVER = ("Failed", "Complete")  # conditions of a Job that has ended
_VERSIONS = ("v1", "v2")  # readable versions of an inspection's result; results of v1 have no costs
_INSPECTING = Verdict(reason=Reason.INSPECTING, message="A Job inspects the model, before pods are made for it.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The result of `inspect`."""

    facts: ModelFacts | None = None  # None while they are unknown
    model: InspectedModel | None = None  # the model in the form that the status stores
    verdict: Verdict | None = None  # why the facts are unknown
    wanted: tuple[Manifest, ...] = ()  # objects to create now
    look_again_s: float | None = None  # seconds until the result may change without an event
    waiting: tuple[Manifest, ...] = ()  # pods whose containers do not run yet, perhaps because a volume is missing
    is_podless: bool = False  # the Job still has no pod after _POD_S
    is_costless: bool = False  # a Job with the service's image found the facts, but no costs
    refresh: Refresh = Refresh.NONE  # the progress of the second inspection of a model whose facts have no costs
    # The Job to create for the second inspection. If the API server refuses it, the service reports no fault.
    refresh_job: Manifest | None = None


@dataclass(frozen=True, slots=True)
class Tried:
    """The Jobs and pods of a service's inspections so far."""

    jobs: Sequence[Manifest] = ()  # all Jobs that carry the service's label
    pods: Sequence[Manifest] = ()  # all pods that carry the service's label
    # uid of a Job or pod -> text of the Event that says why the Job has no pod, or why the pod's volume is not mounted
    failures: Mapping[str, str] = field(default_factory=dict)
    # Whether a Job with the service's image has inspected the model and given no costs. This Job may be deleted by now.
    gives_no_costs: bool = False


class _Error(msgspec.Struct):
    reason: str
    message: str


class _Header(msgspec.Struct):
    """The fields that show whether an inspection's result has facts, an error, or an unknown version."""

    version: str = "v1"
    error: _Error | None = None


@dataclass(frozen=True, slots=True)
class _Ended:
    """An attempt that failed."""

    verdict: Verdict
    at: datetime  # end of the attempt


def inspect(
    service: LLMService,
    image: str,
    hub: Hub,
    stored: Mapping[str, Any],
    tried: Tried,
    clock: datetime,
    may_refresh: bool = False,
) -> Inspection:
    """Returns the facts of the service's model, or the Job to create and the verdict on the attempts so far.

    `stored` is the service's status as last written. If the stored facts have no costs, the model may be inspected
    again. While the stored sizing is valid, a second inspection needs `may_refresh`. Without a valid sizing, the model
    is inspected again, with two exceptions: the spec gives the parallelism, or an inspection with this image is known
    to give no costs.
    """
    model = service.spec.model
    if (facts := builtin_facts(model)) is not None:
        return Inspection(facts=facts)
    known = stored_model(stored)
    current = facts_of_spec(known, model)
    if current is not None:
        if current.costs is not None:
            return Inspection(facts=current, model=current)
        if is_sized(service, current, stored):
            return _refreshed(service, image, hub, current, tried, may_refresh)
        if current.version is not None and (is_given(service) or tried.gives_no_costs):
            # The stored facts have no costs. If the spec gives the parallelism, no costs are needed: an engine that
            # does not fit refuses to start. If the spec leaves the parallelism open, `resolve` refuses the spec.
            # Another Job would find no costs either, because the engine of this image reports none.
            return Inspection(facts=current, model=current)
    commits = stored_commits(known, model)
    first = inspect_job(service, image, hub, 0, commits)
    attempts = _attempts(first, tried.jobs)
    if not attempts:
        return Inspection(model=known, verdict=_INSPECTING, wanted=(service_account(service), first))
    newest = max(attempts)
    found = {number: _outcome(service, job, _pod_of(job, tried.pods)) for number, job in attempts.items()}
    last = found[newest]
    before = found.get(newest - 1)
    if isinstance(last, ModelFacts):
        return Inspection(facts=last, model=inspected_model(service.spec.model, last), is_costless=last.costs is None)
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
    wanted = (service_account(service), inspect_job(service, image, hub, newest + 1, commits))
    return Inspection(model=known, verdict=last.verdict, wanted=wanted)


def _refreshed(
    service: LLMService,
    image: str,
    hub: Hub,
    known: InspectedModel,
    tried: Tried,
    may_start: bool,
) -> Inspection:
    """Returns the stored facts of a sized service, together with the costs once a Job has found them.

    A Job that fails, or finds another model at the same source, changes nothing: the service runs without the costs.
    """
    job = inspect_job(service, image, hub, 0, stored_commits(known, service.spec.model))
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
        known = inspected_model(service.spec.model, found) if is_same else known
    return Inspection(facts=known, model=known, refresh=Refresh.ENDED)


def _attempts(first: Manifest, jobs: Sequence[Manifest]) -> dict[int, Manifest]:
    """Returns number of an attempt -> its Job. The Jobs differ from `first` only in this number."""
    stem = _stem(first)
    return {attempt_of(job["metadata"]["name"]): job for job in jobs if _stem(job) == stem}


def has_unfinished(jobs: Sequence[Manifest]) -> bool:
    """Returns whether one of a service's Jobs has not ended yet."""
    return any(not any(_is_over(each) for each in job.get("status", {}).get("conditions", ())) for job in jobs)


def _is_over(condition: Manifest) -> bool:
    return condition["type"] in _OVER and condition["status"] == "True"


def _stem(job: Manifest) -> str:
    return str(job["metadata"]["name"]).rsplit("-", 1)[0]


def _without_pod(
    job: Manifest, known: InspectedModel | None, earlier: Verdict, failures: Mapping[str, str], clock: datetime
) -> Inspection:
    """Returns the inspection while its Job has no pod.

    Either the pod is created in a moment, or something such as a quota or an admission rule has refused the pod.
    """
    meta = job["metadata"]
    left = _POD_S - (clock - moment(meta.get("creationTimestamp", ""))).total_seconds()
    if left > 0:
        return Inspection(model=known, verdict=earlier, look_again_s=left)
    refusal = without_suffixes(failures.get(meta["uid"], ""), meta["name"])
    verdict = refused_pod(refusal) if refusal else earlier
    return Inspection(model=known, verdict=verdict, look_again_s=_POD_S, is_podless=True)


def _pod_of(job: Manifest, pods: Sequence[Manifest]) -> Manifest | None:
    uid = job["metadata"]["uid"]
    return next((each for each in pods if is_owned(each["metadata"], uid)), None)


def _outcome(service: LLMService, job: Manifest, own: Manifest | None) -> ModelFacts | _Ended | None:
    """Returns the facts that an attempt found, or its failure; None while it runs. `own`: the pod of the Job."""
    containers = own.get("status", {}).get("containerStatuses", ()) if own is not None else ()
    # The termination messages of other containers, such as injected sidecars, are not read.
    states = (each["state"] for each in containers if each["name"] == INSPECT_CONTAINER)
    ended = next((each["terminated"] for each in states if "terminated" in each), None)
    if ended is not None:
        # A container whose node was lost has no `finishedAt`.
        return _read(service, ended, ended.get("finishedAt") or job["metadata"]["creationTimestamp"])
    conditions = job.get("status", {}).get("conditions", ())
    over = next(filter(_is_over, conditions), None)
    # If a Job is complete and its pod seems to run, the watch of pods lags behind the watch of Jobs. In this case, the
    # pod's message is still to come.
    if over is None or (over["type"] == "Complete" and own is not None):
        return None
    cause = " ".join(f"{over.get('reason', '')}: {over.get('message', '')}".split()).strip(": ") or "its pod is gone"
    message = f"The Job that inspects the model failed: {cause}."
    return _ended(service, Reason.INSPECTION_FAILED, message, over["lastTransitionTime"])


def _read(service: LLMService, ended: Manifest, at: str) -> ModelFacts | _Ended:
    """Returns the facts, or the failure, in a termination message (schemas/inspection.v2.json).

    The image and the model determine the message, so nothing in it is trusted.
    """
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
    # The command selects the Jobs by a label and not by name, so each attempt has the same message.
    label = f"{SERVICE_LABEL}={service.metadata.name}"
    again = f" It is tried again within 5 min; at once after: kubectl delete jobs -l {label}"
    return _Ended(Verdict(reason=reason, message=message + token + again), datetime.fromisoformat(at))

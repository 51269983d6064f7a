"""LoRA adapters of a service: the lists that engines must get, and the state of each adapter. Pure.

Every engine gets those adapters of the present spec that the engine's pods can read, from a mounted volume or from the
hub. A restarted engine has the list with which its pod was created. The engine reports this list in /status, and then
gets the present list again.

An adapter of the hub has a commit as soon as one engine has loaded the adapter. All engines then get this commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rayloom_operator.api.adapters import Adapter, is_commit
from rayloom_operator.api.model import Model
from rayloom_operator.api.status import AdapterState, AdapterStatus, Reason
from rayloom_operator.decide.conditions.evidence import Evidence
from rayloom_operator.decide.situation import Situation
from rayloom_operator.engines.status import ReportedAdapter
from rayloom_operator.objects.adapter_volumes import adapter_paths, mountable, mounted_paths
from rayloom_operator.observe.observed import EngineReplica, Verdict

_WITHOUT_HUB = (
    "its version cannot load adapters of the hub; set spec.engine.image to a newer image, or spec.restartedAt, which "
    "starts engines with the operator's image"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterListRequest:
    """A request to an engine to have these adapters and no others."""

    replica: str  # name of the engine replica
    ip: str
    token: str  # token of the engine's admin port
    adapters: tuple[tuple[str, str], ...]  # (name, folder in the pod or place on the hub)
    old_token: str = ""  # derived from the operator's previous key; empty if the key was never changed


def adapter_list_requests(situation: Situation) -> Iterator[AdapterListRequest]:
    """Yields a request for each answering engine whose reported list differs from the wanted list."""
    if situation.resolved is None:
        return
    meta = situation.resolved.service.metadata
    for replica in situation.observed.replicas:
        if replica.reading is None or replica.reading.failing_since is not None:
            continue  # a silent engine gets its request in the reconcile that its next answer causes
        wanted = _wanted(situation, replica)
        reported = _reported(replica)
        if wanted is None or reported is None or replica.head is None or not replica.head.ip:
            continue
        if wanted == {each.name: _pinned_path(each) for each in reported}:
            continue
        token, old_token = situation.settings.admin_tokens(meta.namespace, meta.uid, replica.name)
        yield AdapterListRequest(
            replica=replica.name, ip=replica.head.ip, token=token, old_token=old_token, adapters=tuple(wanted.items())
        )


def adapter_statuses(evidence: Evidence) -> tuple[AdapterStatus, ...]:
    """Returns the state of each adapter in the spec, from the reports of engines that the rollout does not terminate.

    While the spec cannot be used, returns the last written states.
    """
    resolved = evidence.situation.resolved
    if resolved is None:
        return _written(evidence.situation.previous)
    reports = {
        each.place.name: _present_reports(evidence.situation, each.replica)
        for each in evidence.staying
        if each.replica is not None
    }
    total = len(evidence.staying)
    commits = _commits(evidence.situation)
    return tuple(
        _status(each, reports, total, commits.get(each.name)) for each in resolved.service.spec.model.adapters or ()
    )


def adapter_fault(evidence: Evidence) -> Verdict | None:
    """Returns a verdict that names the first adapter that an engine cannot load; None if no adapter has failed."""
    failed = [each for each in adapter_statuses(evidence) if each.state == "Failed"]
    if not failed:
        return None
    first, num_more = failed[0], len(failed) - 1
    verb = "adapter fails" if num_more == 1 else "adapters fail"
    more = f" {num_more} more {verb}; status.adapters has the causes." if num_more else ""
    return Verdict(
        reason=Reason.ADAPTER_FAILED,
        message=f"Adapter {first.name} is loaded on {first.loaded} engines. {first.message.removesuffix('.')}. Put the "
        "adapter's files where spec.model.adapters says, or change its source; engines try again every 30 s."
        f"{more}",
    )


def _status(
    adapter: Adapter, reports: dict[str, dict[str, ReportedAdapter]], total: int, commit: str | None
) -> AdapterStatus:
    name = adapter.name
    states = [(replica, report[name]) for replica, report in sorted(reports.items()) if name in report]
    num_loaded = sum(each.state == "loaded" for _, each in states)
    failed = next(((replica, each) for replica, each in states if each.state == "failed"), None)
    state: AdapterState = "Loading"
    if failed is not None:
        state = "Failed"
    elif total and num_loaded == total:
        state = "Loaded"
    return AdapterStatus(
        name=name,
        state=state,
        message="" if failed is None else f"{failed[0]}: {failed[1].message}",
        loaded=f"{num_loaded}/{total}",
        source=adapter.source if adapter.is_on_hub else None,
        commit=commit,
    )


def _present_reports(situation: Situation, replica: EngineReplica) -> dict[str, ReportedAdapter]:
    """Returns name -> report, for each adapter that the engine has loaded, or tries to load, from its present source.

    An adapter of the hub is reported as failed if the engine's version cannot load adapters of the hub.
    """
    model = _model(situation)
    made_from = _model_of(situation, replica)
    commits = _commits(situation)
    paths = adapter_paths(model, commits) if made_from is None else mounted_paths(model, made_from, commits)
    found = {
        each.name: each
        for each in _reported(replica) or ()
        if each.name in paths and paths[each.name] in (each.path, _pinned_path(each))
    }
    if _is_without_hub(replica):
        for adapter in model.adapters or ():
            if adapter.is_on_hub:
                found[adapter.name] = ReportedAdapter(
                    name=adapter.name, path=adapter.source, state="failed", message=_WITHOUT_HUB
                )
    return found


def _commits(situation: Situation) -> dict[str, str]:
    """Returns name -> commit of adapters of the hub. The first engine that has loaded an adapter decides its commit."""
    assert situation.resolved is not None
    found = dict(situation.resolved.adapter_commits)
    sources = {each.name: each.source for each in _model(situation).adapters or () if each.is_on_hub}
    for replica in sorted(situation.observed.replicas, key=lambda each: each.name):
        for each in _reported(replica) or ():
            if each.path == sources.get(each.name) and each.state == "loaded" and is_commit(each.commit):
                found.setdefault(each.name, each.commit)
    return found


def _pinned_path(reported: ReportedAdapter) -> str:
    """Returns the path of a reported adapter. If the adapter is on the hub, the path has the commit that the engine has
    loaded."""
    is_pinned = is_commit(reported.commit) and reported.path.startswith("hf://")
    return f"{reported.path.partition('@')[0]}@{reported.commit}" if is_pinned else reported.path


def _written(previous: Mapping[str, Any]) -> tuple[AdapterStatus, ...]:
    """Returns the adapters in a status document; an empty tuple if they cannot be read."""
    try:
        return tuple(AdapterStatus.model_validate(each) for each in previous.get("adapters", ()))
    except ValidationError:
        return ()


def _wanted(situation: Situation, replica: EngineReplica) -> dict[str, str] | None:
    """Returns name -> folder or place of the adapters for an engine; None if the engine must keep its present adapters.

    An engine keeps its adapters in two cases: the spec from which the engine was created is not known, or the present
    spec has no `adapters`. In the second case, the engine is about to be replaced.
    """
    model = _model(situation)
    made_from = _model_of(situation, replica)
    if model.adapters is None or made_from is None:
        return None
    present = {each.name: each.path for each in _reported(replica) or ()}
    found = mountable(model, made_from, present, _commits(situation))
    if _is_without_hub(replica):
        return {name: path for name, path in found.items() if not path.startswith("hf://")}
    return found


def _is_without_hub(replica: EngineReplica) -> bool:
    """Returns whether the engine's version cannot load adapters of the hub.

    A service that keeps the default image of an earlier operator may have such a version.
    """
    status = replica.reading.status if replica.reading is not None else None
    return status is not None and not status.adapters_from_hub


def _model(situation: Situation) -> Model:
    assert situation.resolved is not None
    return situation.resolved.service.spec.model


def _model_of(situation: Situation, replica: EngineReplica) -> Model | None:
    """Returns the model in the spec from which the engine was created; None if that spec is not known."""
    made_from = next((each.resolved for each in situation.revisions if each.revision == replica.revision), None)
    return None if made_from is None else made_from.service.spec.model


def _reported(replica: EngineReplica) -> tuple[ReportedAdapter, ...] | None:
    """Returns the adapters in the engine's last answer; None without an answer, or if they cannot be set."""
    status = replica.reading.status if replica.reading is not None else None
    return status.adapters if status is not None else None

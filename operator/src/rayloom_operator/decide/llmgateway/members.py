"""Decides which selected services an LLMGateway serves, and under which names. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rayloom_operator.api.engine_args import EngineArgs
from rayloom_operator.api.gateway.stored import NO_PORT
from rayloom_operator.api.llmgateway.alias import NAME_IN_WORDS, is_name
from rayloom_operator.api.llmgateway.spec import LLMGateway
from rayloom_operator.api.llmgateway.stored import NameState
from rayloom_operator.api.pods import Auth
from rayloom_operator.api.status import Reason
from rayloom_operator.names import Manifest
from rayloom_operator.objects.llmgateway.models_file import MODEL_ARGS, ModelEntry

_REASONS = frozenset(Reason)
_NO_PORT_YET = (
    "No engine that serves has the port for gateways. A rollout brings engines with this port; the conditions of the "
    "LLMService describe the rollout."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedService:
    """A selected service, with the state of its served name."""

    name: str  # served name
    service: str  # metadata.name
    state: NameState
    reason: Reason
    message: str = ""
    entry: ModelEntry | None = None  # None: the gateway pods do not know the service


def members(gateway: LLMGateway, services: Iterable[Manifest]) -> tuple[SelectedService, ...]:
    """Returns the services of the namespace that the LLMGateway selects, the oldest first.

    If two services have the same served name, the older service gets the name. If both were created in the same second,
    the service whose metadata.name sorts first gets the name.
    """
    selected = [each for each in services if gateway.spec.services.selects(each["metadata"].get("labels") or {})]
    found: list[SelectedService] = []
    owners: dict[str, str] = {}  # served name -> service
    for document in sorted(selected, key=_age):
        member = _member(gateway, document)
        owner = owners.setdefault(member.name, member.service)
        found.append(member if owner == member.service else _of_another(member, owner))
    return tuple(found)


def _age(document: Manifest) -> tuple[str, str]:
    meta = document["metadata"]
    return meta.get("creationTimestamp") or "", meta["name"]


def _of_another(member: SelectedService, owner: str) -> SelectedService:
    return SelectedService(
        name=member.name,
        service=member.service,
        state="Absent",
        reason=Reason.NAME_CONFLICT,
        message=f"The older service {owner} has the served name {member.name!r}: give {member.service} another "
        "spec.model.servedName, or remove the labels by which spec.services selects it.",
    )


def _member(gateway: LLMGateway, document: Manifest) -> SelectedService:
    # The API server has checked the spec against the CRD. Each part is read by itself, because another part of the spec
    # may be invalid. In this case, the engines of the last valid spec still run, and must stay reachable.
    meta, spec = document["metadata"], document.get("spec") or {}
    service = meta["name"]
    name = str((spec.get("model") or {}).get("servedName") or service)
    if not is_name(name):
        message = (
            f"Gateway pods cannot serve {service} by its name {name!r}: {NAME_IN_WORDS}. Change spec.model.servedName "
            "of the service."
        )
        return SelectedService(name=name, service=service, state="Absent", reason=Reason.INVALID_SPEC, message=message)
    if spec.get("gateway") is None:
        message = (
            f"{service} cannot be reached, because its engines have no port for gateways: add "
            "`gateway: {replicas: 0}` to the spec of the LLMService, which restarts its engines once."
        )
        return SelectedService(
            name=name, service=service, state="Absent", reason=Reason.NO_GATEWAY_PORT, message=message
        )
    try:
        auth = gateway.spec.auth or _auth(spec)
        settings = _settings(spec)
    except ValidationError:
        message = f"spec.auth or spec.engine.args of {service} cannot be used: its condition Accepted says why."
        return SelectedService(name=name, service=service, state="Absent", reason=Reason.INVALID_SPEC, message=message)
    entry = ModelEntry(
        served_name=name,
        service=service,
        namespace=meta["namespace"],
        uid=meta["uid"],
        auth=auth,
        settings=settings,
        adapters=_adapters(spec),
    )
    state, reason, message = _availability(document.get("status") or {})
    return SelectedService(name=name, service=service, state=state, reason=reason, message=message, entry=entry)


def _auth(spec: Mapping[str, Any]) -> Auth | None:
    given = spec.get("auth")
    return None if given is None else Auth.model_validate(given)


def _settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    given = (spec.get("engine") or {}).get("args") or {}
    args = EngineArgs.model_validate(given)
    return args.model_dump(mode="json", include=set(MODEL_ARGS), exclude_none=True)


def _adapters(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the service's LoRA adapters, sorted."""
    return tuple(sorted(str(each["name"]) for each in (spec.get("model") or {}).get("adapters") or ()))


def _availability(status: Mapping[str, Any]) -> tuple[NameState, Reason, str]:
    """Returns state, reason and message.

    A name is Serving if the service's own condition Available is True, and an engine that serves has the port for
    gateways. A name is also Serving if only the service's own gateway pods are missing.
    """
    conditions: Sequence[Mapping[str, Any]] = status.get("conditions") or ()
    found = next((each for each in conditions if each.get("type") == "Available"), None)
    if found is None:
        return "Waiting", Reason.STARTING, "The operator has not reported about the service yet."
    reason = Reason(found["reason"]) if found.get("reason") in _REASONS else Reason.ENGINE_FAILED
    message = str(found.get("message", ""))
    gateway = status.get("gateway")
    is_reached = gateway is not None and gateway.get("reason") != NO_PORT
    if reason is Reason.GATEWAY_NOT_READY and is_reached:
        # An engine of the service generates tokens, and only the gateway pods of the service itself are missing. The
        # LLMGateway does not need those pods.
        return "Serving", Reason.SERVING, ""
    if found.get("status") != "True":
        return "Waiting", reason, message
    if not is_reached:
        return "Waiting", Reason.STARTING, _NO_PORT_YET
    return "Serving", Reason.SERVING, ""

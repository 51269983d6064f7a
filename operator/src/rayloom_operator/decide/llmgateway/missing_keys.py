"""Decides which names of an LLMGateway have no API keys in the gateway pods, and what to change. Pure.

The file of a name's keys is a key of a Secret. It is missing in the pods if the Secret or its key does not exist, and
it cannot be used if it is empty. A gateway then refuses every request for the name, so it opens nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rayloom_operator.api.llmgateway.spec import LLMGateway
from rayloom_operator.api.pods import Auth
from rayloom_operator.api.status import Reason
from rayloom_operator.decide.llmgateway.aliases import AliasState
from rayloom_operator.decide.llmgateway.members import SelectedService
from rayloom_operator.engines.status import GatewayReport


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFault:
    """A name whose API keys at least one gateway pod cannot read."""

    name: str
    is_closed: bool  # every gateway pod that answers refuses all requests for the name
    message: str


def key_faults(
    gateway: LLMGateway,
    members: Iterable[SelectedService],
    aliases: Iterable[AliasState],
    reports: Sequence[GatewayReport],
) -> tuple[KeyFault, ...]:
    """Returns the faults of all names, those of services first. `reports`: of the gateway pods that have answered."""
    with_keys = {each.name for each in gateway.spec.aliases if each.auth is not None}
    common = "spec.auth" if gateway.spec.auth is not None else ""
    found: list[KeyFault] = []
    for member in members:
        if member.entry is not None and member.entry.auth is not None:
            field = common or f"spec.auth of the LLMService {member.service}"
            found += _faults(member.name, member.entry.auth, field, reports)
    for alias in aliases:
        if alias.entry is not None and alias.entry.auth is not None:
            field = common or "spec.auth of the LLMServices behind the alias"
            if alias.name in with_keys:
                field = f"auth of the alias {alias.name} in spec.aliases"
            found += _faults(alias.name, alias.entry.auth, field, reports)
    return tuple(found)


Name = TypeVar("Name", SelectedService, AliasState)


def with_closed(names: Iterable[Name], faults: Iterable[KeyFault]) -> tuple[Name, ...]:
    """Returns the services or aliases, with the state Closed for those whose requests are all refused."""
    closed = {each.name: each.message for each in faults if each.is_closed}
    return tuple(
        replace(each, state="Closed", reason=Reason.KEYS_MISSING, message=closed[each.name])
        if each.entry is not None and each.name in closed
        else each
        for each in names
    )


def _faults(name: str, auth: Auth, field: str, reports: Sequence[GatewayReport]) -> list[KeyFault]:
    accepted = [{each.name: each.accepted for each in report.unusable_keys}.get(name) for report in reports]
    if all(each is None for each in accepted):
        return []
    is_closed = all(each == 0 for each in accepted)
    effect = "Requests for it are refused" if is_closed else "A gateway pod refuses requests for it, or knows old keys"
    ref = auth.api_key_secret_ref
    message = (
        f"Gateway pods find no API keys of {name!r}. {effect} until the Secret {ref.name} has a key {ref.key!r} "
        f"with one API key a line: create it in this namespace, or change {field}."
    )
    return [KeyFault(name=name, is_closed=is_closed, message=message)]

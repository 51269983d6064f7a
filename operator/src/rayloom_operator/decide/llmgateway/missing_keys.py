"""Decides which names of an LLMGateway have no API keys in the gateway pods, and what to change. Pure.

The API keys of a name are in a file, which is an entry of a Secret. The file is missing in the pods if the Secret or
the entry does not exist. An empty file cannot be used. In both cases a gateway accepts only the keys that it has read
before. A gateway that has read no keys refuses every request for the name, so nobody gets access without a key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rayloom_operator.api.llmgateway.spec import LLMGateway
from rayloom_operator.api.llmgateway.stored import AliasStatus, LLMGatewayStatus, ModelStatus
from rayloom_operator.api.pods import SecretKey
from rayloom_operator.api.status import Reason
from rayloom_operator.decide.llmgateway.aliases import AliasState
from rayloom_operator.decide.llmgateway.members import SelectedService
from rayloom_operator.engines.status import GatewayReport

LISTED_NAMES = 32  # the largest number of names that a gateway pod's report lists


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFault:
    """A name whose API keys at least one gateway pod cannot read."""

    name: str
    is_closed: bool  # every ready gateway pod has answered, and refuses all requests for the name
    message: str


def key_faults(
    gateway: LLMGateway,
    members: Iterable[SelectedService],
    aliases: Iterable[AliasState],
    reports: Sequence[GatewayReport | None],
) -> tuple[KeyFault, ...]:
    """Returns the faults of all names, the names of services first.

    `reports`: the report of each ready gateway pod; None for a pod without a recent answer.
    """
    with_keys = {each.name for each in gateway.spec.aliases if each.auth is not None}
    common = "spec.auth" if gateway.spec.auth is not None else ""
    named: dict[str, tuple[SecretKey, str]] = {}  # name -> (Secret and key of its API keys, field that gives them)
    for member in members:
        if member.entry is not None and member.entry.auth is not None:
            field = common or f"spec.auth of the LLMService {member.service}"
            named[member.name] = (member.entry.auth.api_key_secret_ref, field)
    for alias in aliases:
        if alias.entry is not None and alias.entry.auth is not None:
            field = common or "spec.auth of the LLMServices behind the alias"
            if alias.name in with_keys:
                field = f"auth of the alias {alias.name} in spec.aliases"
            named[alias.name] = (alias.entry.auth.api_key_secret_ref, field)
    found: list[KeyFault] = []
    for name, (ref, field) in named.items():
        accepted = [None if report is None else _accepted(report, name, named) for report in reports]
        if any(each is not None for each in accepted):
            found.append(_fault(name, ref, field, is_closed=all(each == 0 for each in accepted)))
    return tuple(found)


def _accepted(report: GatewayReport, name: str, named: Mapping[str, tuple[SecretKey, str]]) -> int | None:
    """Returns how many keys a pod still accepts for a name whose file the pod cannot read; None if it can read the
    file.

    A report lists a limited number of names. A name beyond that limit gets the number of a listed name with the same
    file.
    """
    listed = {each.name: each.accepted for each in report.unusable_keys}
    if name in listed or len(listed) < LISTED_NAMES:
        return listed.get(name)
    ref, _ = named[name]
    return next((number for other, number in listed.items() if other in named and named[other][0] == ref), None)


def stored_faults(status: LLMGatewayStatus) -> tuple[KeyFault, ...]:
    """Returns the names that the last written status calls Closed."""
    names: tuple[ModelStatus | AliasStatus, ...] = (*status.models, *status.aliases)
    return tuple(
        KeyFault(name=each.name, is_closed=True, message=each.message) for each in names if each.state == "Closed"
    )


Name = TypeVar("Name", SelectedService, AliasState)


def with_closed(names: Iterable[Name], faults: Iterable[KeyFault]) -> tuple[Name, ...]:
    """Returns `names`, which are services or aliases. If all requests for a name are refused, its state is Closed."""
    closed = {each.name: each.message for each in faults if each.is_closed}
    return tuple(
        replace(each, state="Closed", reason=Reason.KEYS_MISSING, message=closed[each.name])
        if each.entry is not None and each.name in closed
        else each
        for each in names
    )


def _fault(name: str, ref: SecretKey, field: str, *, is_closed: bool) -> KeyFault:
    effect = "Requests for it are refused" if is_closed else "A gateway pod refuses requests for it, or knows old keys"
    message = (
        f"Gateway pods find no API keys of {name!r}. {effect} until the Secret {ref.name} has a key {ref.key!r} "
        f"with one API key a line: create it in this namespace, or change {field}."
    )
    return KeyFault(name=name, is_closed=is_closed, message=message)

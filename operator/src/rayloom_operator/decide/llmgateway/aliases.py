"""Decides which aliases of an LLMGateway are served, and by which services. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayloom_operator.api.llmgateway.alias import Alias
from rayloom_operator.api.llmgateway.spec import LLMGateway
from rayloom_operator.api.llmgateway.stored import NameState
from rayloom_operator.api.status import Reason
from rayloom_operator.decide.llmgateway.members import SelectedService
from rayloom_operator.objects.llmgateway.models_file import AliasEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasState:
    """An alias, and the services that answer requests for the alias."""

    name: str
    state: NameState
    reason: Reason
    message: str = ""
    entry: AliasEntry | None = None  # None: the gateway pods do not know the alias


def alias_states(gateway: LLMGateway, members: Sequence[SelectedService]) -> tuple[AliasState, ...]:
    """Returns the state of each alias, in the order of the spec."""
    owners = {each.name: each.service for each in reversed(members)}
    by_service = {each.service: each for each in members}
    return tuple(_state(gateway, alias, owners, by_service) for alias in gateway.spec.aliases)


def _state(
    gateway: LLMGateway, alias: Alias, owners: Mapping[str, str], by_service: Mapping[str, SelectedService]
) -> AliasState:
    if alias.name in owners:
        return _absent(
            alias,
            Reason.NAME_CONFLICT,
            f"The service {owners[alias.name]} has the served name {alias.name!r}, and services come before aliases: "
            "give the alias or the service another name.",
        )
    found = {each.service: by_service[each.service] for each in alias.targets if each.service in by_service}
    reached = {service: member.entry for service, member in found.items() if member.entry is not None}
    problem = " ".join(_problem(each.service, found) for each in alias.targets if each.service not in reached)
    weights = {each.service: each.weight for each in alias.targets if each.service in reached}
    if not any(weights.values()):
        rest = "No target with a weight above 0 is left, so the alias is not served."
        return _absent(alias, Reason.TARGET_MISSING, f"{problem} {rest}")
    if problem:
        problem = f"{problem} The other targets get its requests."
    auth = alias.auth or gateway.spec.auth
    if auth is None:
        keys = {entry.auth for entry in reached.values()}
        if len(keys) > 1:
            return _absent(
                alias,
                Reason.KEYS_DIFFER,
                f"The targets {', '.join(sorted(reached))} have different spec.auth, so the alias would open one with "
                "the keys of another: give the alias keys of its own in `auth`.",
            )
        (auth,) = keys
    entry = AliasEntry(
        name=alias.name,
        targets=tuple((reached[service].served_name, weight) for service, weight in weights.items()),
        is_sticky=alias.sticky_by == "user",
        auth=auth,
    )
    drawn = [found[service] for service, weight in weights.items() if weight > 0]
    state: NameState = "Serving" if any(each.state == "Serving" for each in drawn) else "Waiting"
    if problem:
        return AliasState(name=alias.name, state=state, reason=Reason.TARGET_MISSING, message=problem, entry=entry)
    waiting = [each for each in drawn if each.state != "Serving"]
    reason = Reason.SERVING if state == "Serving" else waiting[0].reason
    message = f"No engine serves for {', '.join(each.service for each in waiting)}." if waiting else ""
    return AliasState(name=alias.name, state=state, reason=reason, message=message, entry=entry)


def _problem(service: str, found: Mapping[str, SelectedService]) -> str:
    """Returns the reason why a target gets no requests, as a sentence."""
    if service not in found:
        return (
            f"spec.services selects no LLMService {service}: add its labels to the service, or remove the target "
            "from the alias."
        )
    return f"The target {service} gets no requests: {found[service].message}"


def _absent(alias: Alias, reason: Reason, message: str) -> AliasState:
    return AliasState(name=alias.name, state="Absent", reason=reason, message=message)

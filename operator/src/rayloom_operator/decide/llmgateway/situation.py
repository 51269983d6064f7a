"""The input of the decisions about an LLMGateway: everything that one reconcile has gathered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayloom_operator.api.llmgateway.spec import LLMGateway
from rayloom_operator.decide.llmgateway.aliases import AliasState, alias_states
from rayloom_operator.decide.llmgateway.members import SelectedService, members
from rayloom_operator.decide.settings import Settings
from rayloom_operator.names import Manifest
from rayloom_operator.observe.observed import DeploymentProgress, Pod, SeenRoute, Verdict
from rayloom_operator.times import Now


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySituation:
    """An LLMGateway with the services that it selects and its pods. Equal situations give equal decisions."""

    now: Now
    settings: Settings
    generation: int
    previous: Mapping[str, Any]  # last written status
    gateway: LLMGateway | None  # None while the spec cannot be read
    accepted: Verdict  # VALID, or why the spec cannot be used
    members: tuple[SelectedService, ...] = ()
    aliases: tuple[AliasState, ...] = ()
    pods: tuple[Pod, ...] = ()  # gateway pods, without terminating ones
    progress: DeploymentProgress | None = None  # None if the Deployment is not known
    routes: Mapping[str, SeenRoute] = field(default_factory=dict)  # kind -> existing route to the gateway pods
    unknown_kinds: frozenset[str] = frozenset()  # kinds of routes that the API server does not know
    route_refusal: str = ""  # why the HTTPRoute or Ingress could not be written; known after the attempt

    @property
    def num_ready(self) -> int:
        """The number of gateway pods that take requests."""
        return sum(each.is_ready for each in self.pods)


def names_of(
    gateway: LLMGateway, services: tuple[Manifest, ...]
) -> tuple[tuple[SelectedService, ...], tuple[AliasState, ...]]:
    """Returns those of `services` (all of the namespace) that the LLMGateway selects, and its aliases."""
    found = members(gateway, services)
    return found, alias_states(gateway, found)

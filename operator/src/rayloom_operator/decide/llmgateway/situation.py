"""The input of the decisions about an LLMGateway: everything that one reconcile has gathered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rayloom_operator.api.llmgateway.spec import LLMGateway
from rayloom_operator.api.llmgateway.stored import stored_status
from rayloom_operator.decide.llmgateway.aliases import AliasState, alias_states
from rayloom_operator.decide.llmgateway.members import SelectedService, members
from rayloom_operator.decide.llmgateway.missing_keys import KeyFault, key_faults, stored_faults, with_closed
from rayloom_operator.decide.llmgateway.pod_models import PodModels, fresh_report, pod_models
from rayloom_operator.decide.settings import Settings
from rayloom_operator.names import Manifest
from rayloom_operator.objects.llmgateway.models_file import content_hash, models_document, models_text
from rayloom_operator.observe.observed import DeploymentProgress, Pod, Reading, SeenRoute, Verdict
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
    pods: tuple[Pod, ...] = ()  # gateway pods, without terminating pods
    progress: DeploymentProgress | None = None  # None if the Deployment is not known
    routes: Mapping[str, SeenRoute] = field(default_factory=dict)  # kind -> existing route to the gateway pods
    unknown_kinds: frozenset[str] = frozenset()  # kinds of routes that the API server does not know
    readings: Mapping[str, Reading] = field(default_factory=dict)  # gateway pod -> its last answer to /status
    route_refusal: str = ""  # why the HTTPRoute or Ingress could not be written; known after the attempt
    # Seconds for which a pod has had another models file than the present one; None if no pod has another file.
    unread_s: float | None = None

    @property
    def num_ready(self) -> int:
        """The number of gateway pods that are ready, and so accept requests."""
        return sum(each.is_ready for each in self.pods)

    @property
    def models_text(self) -> str:
        """The content of the models file for `members` and `aliases`."""
        models = [each.entry for each in self.members if each.entry is not None]
        aliases = [each.entry for each in self.aliases if each.entry is not None]
        return models_text(models_document(models, aliases, self.settings.operator_key, self.settings.previous_key))

    @property
    def models_hash(self) -> str:
        """The hash of the present models file."""
        return content_hash(self.models_text)

    @property
    def pod_models(self) -> tuple[PodModels, ...]:
        """The models file of each gateway pod, compared with the present file."""
        stored = stored_status(self.previous).pods
        return pod_models(self.pods, self.readings, stored, self.models_hash, self.now.mono)

    @property
    def has_unread(self) -> bool:
        """True if a gateway pod has answered that it has another models file than the present one.

        A pod that refuses a whole file has such a file, or cannot use the present one. A pod that refuses a part of the
        present file has read it, for example a pod of an earlier release: another write of the file would not help.
        """
        reports = [fresh_report(self.readings.get(each.name), self.now.mono) for each in self.pods]
        if any(each is not None and each.refusal for each in reports):
            return True
        return any(each.state == "Outdated" for each in self.pod_models)

    @property
    def key_faults(self) -> tuple[KeyFault, ...]:
        """The names whose API keys gateway pods cannot read.

        Empty while pods are replaced: an old pod cannot read a Secret that only the new pods mount.
        """
        if self.gateway is None or self.progress is None or self.progress.num_updated < self.progress.num_pods:
            return ()
        ready = [each.name for each in self.pods if each.is_ready]
        if any(name not in self.readings for name in ready):
            return stored_faults(stored_status(self.previous))  # a ready pod has not answered this process yet
        reports = [fresh_report(self.readings[name], self.now.mono) for name in ready]
        return key_faults(self.gateway, self.members, self.aliases, reports)


def with_closed_names(situation: GatewaySituation) -> GatewaySituation:
    """Returns the situation, with the state Closed for names that all gateway pods refuse for lack of API keys."""
    faults = situation.key_faults
    members, aliases = with_closed(situation.members, faults), with_closed(situation.aliases, faults)
    return replace(situation, members=members, aliases=aliases)


def names_of(
    gateway: LLMGateway, services: tuple[Manifest, ...]
) -> tuple[tuple[SelectedService, ...], tuple[AliasState, ...]]:
    """Returns the services that the LLMGateway selects, and its aliases. `services`: all services of the namespace."""
    found = members(gateway, services)
    return found, alias_states(gateway, found)

"""The reconcile of an LLMGateway: gather, decide, carry out, write the status."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from rayloom_operator.api.llmgateway.spec import LLMGateway, parse_gateway
from rayloom_operator.api.llmgateway.stored import stored_status
from rayloom_operator.api.status import Reason
from rayloom_operator.decide.conditions.accepted import VALID
from rayloom_operator.decide.llmgateway.plan import gateway_plan, reapply_after_s, requeue_after_s
from rayloom_operator.decide.llmgateway.route import route_status
from rayloom_operator.decide.llmgateway.situation import GatewaySituation, names_of, with_closed_names
from rayloom_operator.decide.llmgateway.status import gateway_status
from rayloom_operator.decide.route import missing_kind
from rayloom_operator.decide.settings import Settings
from rayloom_operator.errors import Refused, SpecError
from rayloom_operator.kube.client import Kube
from rayloom_operator.names import Manifest, ServiceKey
from rayloom_operator.objects.llmgateway.identity import object_name
from rayloom_operator.observe.drift import Drift
from rayloom_operator.observe.observed import Pod, Reading, Verdict
from rayloom_operator.observe.pods import staying_pods
from rayloom_operator.observe.poller import EnginePoller, Target
from rayloom_operator.reconcile.apply.applier import ROUTE_RETRY_S, Applier
from rayloom_operator.reconcile.llmgateway.status_writer import GatewayStatusWriter
from rayloom_operator.times import Now

# The requeue delay while some LLMServices of the namespace are unknown, or while an Event has yet to be created.
_SOON_S = 1.0

# Returns the LLMServices of a namespace; None while some of them are unknown.
ServicesOf = Callable[[str], Sequence[Manifest] | None]
PodsOf = Callable[[ServiceKey], Sequence[Manifest]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The models of the services that the pods of an LLMGateway serve."""

    uid: str  # uid of the LLMGateway
    replicas: int
    models: Mapping[str, str]  # LLMService -> name of its model


class GatewayReconciler:
    """Reconciles one LLMGateway per call. Not thread-safe: used in one event loop."""

    def __init__(
        self,
        kube: Kube,
        settings: Settings,
        *,
        services_of: ServicesOf,
        pods_of: PodsOf,
        drift: Drift,
        poller: EnginePoller,
    ) -> None:
        self._settings = settings
        self._services_of = services_of
        self._pods_of = pods_of
        self._drift = drift
        self._poller = poller
        # LLMGateway -> the models that its pods serve, according to the last spec that could be read.
        self._served: dict[ServiceKey, Served] = {}
        # LLMGateway -> the hash of its models file, and the event loop time since which a pod has had another file.
        self._unread_since: dict[ServiceKey, tuple[str, float]] = {}
        # The two callbacks do nothing, because an LLMGateway has no RayClusters and no engines to drain.
        self._applier = Applier(kube, drift, lambda key, name: None, lambda key, name, wanted: None)
        self._statuses = GatewayStatusWriter(kube)

    def forget(self, key: ServiceKey) -> None:
        """Drops the state of a deleted LLMGateway. Kubernetes deletes its objects by their owner references."""
        self._applier.forget(key)
        self._statuses.forget(key)
        self._served.pop(key, None)
        self._unread_since.pop(key, None)
        self._poller.follow(key, {})

    def served(self, key: ServiceKey) -> Served | None:
        """Returns the models that the pods of an LLMGateway serve; None before its first reconcile."""
        return self._served.get(key)

    async def reconcile(self, key: ServiceKey, document: Manifest) -> float:
        """Makes the cluster match the spec of the LLMGateway in `document`.

        Returns the seconds until the next reconcile, unless an event comes before. Raises Refused if the API server
        refuses an object until a user changes something, and other OperatorErrors if a retry may help.
        """
        services = self._services_of(key[0])
        if services is None:
            # A reconcile before all LLMServices are reported would remove the missing names from the gateway pods.
            return _SOON_S
        situation = self._situation(key, document, services)
        self._note_served(key, document["metadata"]["uid"], situation)
        if kind := missing_kind(route_status(situation)):
            self._drift.need_kind(key, kind)
        refused: Refused | None = None
        try:
            await self._applier.carry_out(key, gateway_plan(situation), reapply_after_s(situation))
        except Refused as error:
            refused = error
        situation = replace(situation, route_refusal=self._applier.route_refusal(key))
        after_s = [requeue_after_s(situation)]
        if situation.route_refusal:
            after_s.append(ROUTE_RETRY_S)
        unwritten_s = await self._statuses.write(key, document, gateway_status(situation, str(refused or "")))
        if unwritten_s is not None:
            after_s.append(unwritten_s)
        if not await self._statuses.send_events(key):
            after_s.append(_SOON_S)
        if refused is not None:
            raise refused
        return min(after_s)

    def _note_served(self, key: ServiceKey, uid: str, situation: GatewaySituation) -> None:
        gateway = situation.gateway
        if gateway is not None:
            models = {each.service: each.name for each in situation.members if each.entry is not None}
            self._served[key] = Served(uid=uid, replicas=gateway.spec.replicas, models=models)
        elif key not in self._served or self._served[key].uid != uid:
            # After a restart of the operator, the gateway pods serve the last spec that could be read. `status.models`
            # has the names of that spec, at most MAX_LISTED. A new LLMGateway has an empty status, and no pods.
            kept = stored_status(situation.previous)
            models = {each.service: each.name for each in kept.models if each.state != "Absent"}
            self._served[key] = Served(uid=uid, replicas=kept.replicas, models=models)

    def _situation(self, key: ServiceKey, document: Manifest, services: Sequence[Manifest]) -> GatewaySituation:
        gateway: LLMGateway | None = None
        accepted = VALID
        try:
            gateway = parse_gateway(document)
        except SpecError as error:
            accepted = Verdict(reason=Reason.INVALID_SPEC, message="; ".join(error.problems))
        members, aliases = ((), ()) if gateway is None else names_of(gateway, tuple(services))
        pods = staying_pods(self._pods_of(key))
        situation = GatewaySituation(
            now=Now(wall=datetime.now(UTC), mono=asyncio.get_running_loop().time()),
            settings=self._settings,
            generation=document["metadata"]["generation"],
            previous=self._statuses.newest_status(key, document),
            gateway=gateway,
            accepted=accepted,
            members=members,
            aliases=aliases,
            pods=pods,
            readings=self._readings(key, document["metadata"]["uid"], pods),
            progress=self._drift.deployments.of(key, object_name(key[1])),
            routes=self._drift.routes.of(key, object_name(key[1])),
            unknown_kinds=self._drift.unknown_kinds(),
        )
        found = with_closed_names(situation)
        return replace(found, unread_s=self._unread_s(key, found))

    def _unread_s(self, key: ServiceKey, situation: GatewaySituation) -> float | None:
        """Returns the seconds for which a pod has had another models file than the present one; None if none has."""
        since = self._unread_since.pop(key, ("", 0.0))
        if situation.gateway is None or not situation.has_unread:
            return None
        if since[0] != situation.models_hash:
            since = situation.models_hash, situation.now.mono
        self._unread_since[key] = since
        return situation.now.mono - since[1]

    def _readings(self, key: ServiceKey, uid: str, pods: Sequence[Pod]) -> dict[str, Reading]:
        """Polls these gateway pods and no others of the LLMGateway. Returns pod -> its last answer to /status."""
        token, old_token = self._settings.admin_tokens(key[0], uid, object_name(key[1]))
        targets = {
            each.name: Target(
                ip=each.ip, token=token, pod_uid=each.uid, old_token=old_token, is_gateway=True, has_models=True
            )
            for each in pods
            if each.ip
        }
        self._poller.follow(key, targets)
        return {name: found for name in targets if (found := self._poller.reading(key, name)) is not None}

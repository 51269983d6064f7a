"""Carries out the plan of a reconcile: route labels, objects to apply, adapters, drains, deletions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from rayloom_operator.decide.adapters import AdapterListRequest
from rayloom_operator.decide.changes.deletion import Deletion
from rayloom_operator.decide.changes.plan import Drain, Plan
from rayloom_operator.decide.changes.pod_label import PodLabel
from rayloom_operator.decide.changes.routes import Route
from rayloom_operator.engines.request import ask_either
from rayloom_operator.engines.status import shown
from rayloom_operator.errors import EngineUnavailable, OperatorError, Refused
from rayloom_operator.kube.client import NOT_FOUND, Deposed, Kube, KubeError, KubeUnreachable
from rayloom_operator.names import ADMIN_PORT, ROUTE_LABEL, ServiceKey, object_path
from rayloom_operator.objects.ownership import is_owned
from rayloom_operator.observe.drift import Drift
from rayloom_operator.observe.observed import Pod
from rayloom_operator.reconcile.apply.objects import ObjectApplier
from rayloom_operator.reconcile.apply.refusals import as_refusal, most_urgent
from rayloom_operator.reconcile.apply.scale import write_scale
from rayloom_operator.reconcile.apply.writer import ObjectWriter, OnCluster

logger = logging.getLogger(__name__)

# After a failed write of an HTTPRoute or Ingress, each reconcile tries the write again. The next reconcile comes after
# at most 30 s.
ROUTE_RETRY_S = 30.0

# Called with the service, the name of an engine replica, and the request to its engine: to drain (True) or to accept
# requests again (False). Also called if the engine did not answer.
OnDrain = Callable[[ServiceKey, str, bool], None]


class Applier:
    """Carries out plans.

    Not thread-safe: used in one event loop. `on_cluster` and `on_drain`: see `OnCluster` and `OnDrain`. `on_adapters`
    is called after PUT /adapters was sent to engines of a service, whether or not they have answered.
    """

    def __init__(
        self,
        kube: Kube,
        drift: Drift,
        on_cluster: OnCluster,
        on_drain: OnDrain,
        on_adapters: Callable[[ServiceKey], None] = lambda key: None,
    ) -> None:
        self._kube = kube
        self._objects = ObjectApplier(drift, ObjectWriter(kube, drift, on_cluster))
        self._on_drain = on_drain
        self._on_adapters = on_adapters

    def forget(self, key: ServiceKey) -> None:
        """Drops the state of a deleted service."""
        self._objects.forget(key)

    def route_refusal(self, key: ServiceKey) -> str:
        """Returns why the last write of the gateway's HTTPRoute or Ingress failed; empty if that write succeeded."""
        return self._objects.route_refusal(key)

    async def carry_out(self, key: ServiceKey, planned: Plan, interval_s: float) -> None:
        """Carries out the plan. Objects that were applied before are applied again after `interval_s`.

        If a change fails, the other changes are still made. No further change is made if the API server cannot be
        reached, or if this process lost the Lease. At the end, raises the first Refused, because a user has to act on
        it. Without a Refused, raises the first other failure.
        """
        errors: list[OperatorError] = []

        async def attempt(change: Awaitable[None]) -> bool:
            try:
                await change
            except (KubeUnreachable, Deposed):
                raise
            except OperatorError as error:
                errors.append(as_refusal(error))
                return False
            return True

        await self._drain(key, [each for each in planned.drains if not each.wanted])
        for route in planned.routes:
            await attempt(self._route(key, route))
        if await attempt(self._objects.apply(key, planned, interval_s)):
            for label in planned.labels:
                await self._try_label(label)
        await self._set_adapters(key, planned.adapters)
        await self._drain(key, [each for each in planned.drains if each.wanted])
        for deletion in planned.deletions:
            await attempt(self._delete(key, deletion))
        has_scaled = False
        if planned.scale is not None:
            logger.info("%s/%s: replicas %d", *key, planned.scale.after)
            has_scaled = await attempt(write_scale(self._kube, planned.scale))
        if errors:
            error = most_urgent(errors)
            if isinstance(error, Refused):
                error.has_scaled = has_scaled
            raise error

    async def _drain(self, key: ServiceKey, drains: Sequence[Drain]) -> None:
        """Asks engines to drain or to accept requests again. If an engine refuses, the next reconcile asks it again."""
        if drains and not self._kube.may_write():
            raise Deposed("drains: no engine was asked, because another operator may lead")
        await asyncio.gather(*(self._ask(key, each) for each in drains))

    async def _ask(self, key: ServiceKey, drain: Drain) -> None:
        method, what = ("POST", "drain") if drain.wanted else ("DELETE", "take back the drain of")
        logger.info("%s/%s: %s %s", *key, what, drain.replica)
        tokens = (drain.token, drain.old_token)
        try:
            code, body = await ask_either(drain.ip, ADMIN_PORT, tokens, method, "/drain")
        except EngineUnavailable as error:
            logger.warning("%s/%s: no answer of the engine of %s to /drain: %s", *key, drain.replica, error)
        else:
            if code >= 300:
                logger.warning("%s/%s: the engine of %s refuses: %s %s", *key, drain.replica, code, shown(body))
                return
        # Also called after a request without an answer: the engine may have received the request.
        self._on_drain(key, drain.replica, drain.wanted)

    async def _set_adapters(self, key: ServiceKey, orders: Sequence[AdapterListRequest]) -> None:
        """Sends engines their LoRA adapters. If an engine does not answer, the next reconcile sends them again."""
        if orders and not self._kube.may_write():
            raise Deposed("adapters: no engine was asked, because another operator may lead")
        await asyncio.gather(*(self._set_adapters_of(key, each) for each in orders))
        if orders:
            self._on_adapters(key)

    async def _set_adapters_of(self, key: ServiceKey, order: AdapterListRequest) -> None:
        logger.info("%s/%s: %s shall have %d adapters", *key, order.replica, len(order.adapters))
        tokens = (order.token, order.old_token)
        body = msgspec.json.encode({"adapters": dict(order.adapters)})
        try:
            code, answer = await ask_either(order.ip, ADMIN_PORT, tokens, "PUT", "/adapters", body)
        except EngineUnavailable as error:
            logger.warning("%s/%s: no answer of the engine of %s to /adapters: %s", *key, order.replica, error)
            return
        if code >= 300:
            logger.warning("%s/%s: the engine of %s refuses: %s %s", *key, order.replica, code, shown(answer))

    async def _route(self, key: ServiceKey, route: Route) -> None:
        logger.info("%s/%s: route to pod %s: %s", *key, route.pod.name, "on" if route.wanted else "off")
        await self._label(route.pod, ROUTE_LABEL, "true" if route.wanted else None)

    async def _try_label(self, label: PodLabel) -> None:
        """Sets a label that only makes the kubelet update a pod's files earlier. So a failure is logged, not raised."""
        try:
            await self._label(label.pod, label.name, label.value)
        except (KubeUnreachable, Deposed):
            raise
        except OperatorError as error:
            logger.warning("pod %s/%s: cannot set %s: %s", label.pod.namespace, label.pod.name, label.name, error)

    async def _label(self, pod: Pod, name: str, value: str | None) -> None:
        """Sets a label of a pod, or removes it. Does nothing if the pod is gone."""
        # The uid makes the API server refuse the patch if another pod has this name by now.
        meta = {"uid": pod.uid, "labels": {name: value}}
        try:
            await self._kube.patch(object_path("v1", "Pod", pod.namespace, pod.name), {"metadata": meta})
        except KubeError as error:
            if error.code != NOT_FOUND and not error.is_other_uid:
                raise

    async def _delete(self, key: ServiceKey, deletion: Deletion) -> None:
        uid = deletion.uid
        if deletion.owner_uid:
            uid = await self._uid_of_owned(deletion)
            if not uid:
                return
        logger.info("%s/%s: delete %s", *key, deletion.path)
        await self._kube.delete(deletion.path, uid, grace_s=deletion.grace_s, is_foreground=deletion.is_foreground)

    async def _uid_of_owned(self, deletion: Deletion) -> str:
        """Returns the uid of the object, or an empty text if it is gone or has another owner."""
        try:
            meta = (await self._kube.get(deletion.path))["metadata"]
        except KubeError as error:
            if error.code != NOT_FOUND:
                raise
            return ""
        return str(meta["uid"]) if is_owned(meta, deletion.owner_uid) else ""

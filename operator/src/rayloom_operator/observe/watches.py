"""The watches of the objects of engine replicas, of nodes, and of the definition of RayClusters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from rayloom_operator.kube import shapes
from rayloom_operator.kube.client import Kube
from rayloom_operator.kube.reflector import Reflector, Watched
from rayloom_operator.names import ServiceKey
from rayloom_operator.observe import kuberay
from rayloom_operator.observe.nodes import Nodes
from rayloom_operator.observe.observed import ServingGateway

logger = logging.getLogger(__name__)

# A watch gets an event, a bookmark or a failure within 90 s. A watch that failed begins again at most 60 s later. So a
# watch that is silent for longer than this many seconds counts as hung.
_MAX_SILENCE_S = 180.0
_KUBERAY: ServiceKey = ("", kuberay.DEFINITION)
_CLUSTERS = Watched(api_version="ray.io/v1", kind="RayCluster", shape=shapes.RayClusterFields, slim=shapes.ray_cluster)
_PODS = Watched(api_version="v1", kind="Pod", shape=shapes.PodFields, slim=shapes.pod, mark=shapes.node_of)
_JOBS = Watched(api_version="batch/v1", kind="Job", shape=shapes.OwnedFields)
# Kubernetes gives an EndpointSlice the labels of its Service.
_ENDPOINTS = Watched(
    api_version="discovery.k8s.io/v1",
    kind="EndpointSlice",
    shape=shapes.EndpointSliceFields,
    slim=shapes.endpoint_slice,
)
_DEFINITIONS = Watched(
    api_version="apiextensions.k8s.io/v1",
    kind="CustomResourceDefinition",
    selector={"fieldSelector": f"metadata.name={kuberay.DEFINITION}"},
    key_of=lambda _: _KUBERAY,
    slim=kuberay.slim,
)


def silence(reflectors: Iterable[Reflector]) -> str:
    """Returns which of the watches are silent: they have had no event and no failure for too long. Empty if none is."""
    now = asyncio.get_running_loop().time()
    silent = [each.path for each in reflectors if each.silence_seconds(now) > _MAX_SILENCE_S]
    return f"no event and no failure of {', '.join(silent)} for {_MAX_SILENCE_S:.0f} s" if silent else ""


class Watches:
    """The watches, and the last known documents of the objects that they watch.

    Not thread-safe: used in one event loop. `on_change` is called with the service of a RayCluster, Job or
    EndpointSlice that changed. `on_pod` is called with the service of a pod that changed. `on_node` is called with the
    name of a node whose readiness or cordon changed. `on_kuberay` is called when KubeRay becomes usable or unusable.
    """

    def __init__(
        self,
        kube: Kube,
        namespaces: Sequence[str],
        *,
        on_change: Callable[[ServiceKey], None],
        on_pod: Callable[[ServiceKey], None],
        on_node: Callable[[str], None],
        on_kuberay: Callable[[], None],
    ) -> None:
        reflect = partial(Reflector, kube, namespaces=namespaces)
        self.clusters = reflect(_CLUSTERS, on_change)
        self.pods = reflect(_PODS, on_pod)
        self.jobs = reflect(_JOBS, on_change)
        self.endpoints = reflect(_ENDPOINTS, on_change)
        self.nodes = Nodes(kube, on_node)
        self._definitions = Reflector(kube, _DEFINITIONS, self._definition_changed)
        self._all = (self.clusters, self.pods, self.jobs, self.endpoints, self._definitions, self.nodes.reflector)
        self._on_kuberay = on_kuberay
        # Returns the LLMGateways that send requests to a service; None while some LLMGateways of its namespace are
        # unknown. `Runtime` replaces this function by `GatewayController.serving`.
        self.llmgateways_of: Callable[[ServiceKey], tuple[ServingGateway, ...] | None] = lambda key: ()
        self.kuberay_problem = kuberay.problem(None)  # why no RayCluster can be created; empty if KubeRay can be used
        self.is_synced = asyncio.Event()  # every kind was listed, or cannot be listed

    async def run(self) -> None:
        """Watches until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for reflector in self._all:
                tasks.create_task(reflector.run())
            for answered in (
                self.clusters.has_answered,  # Not `is_synced`, which is never set in a cluster without KubeRay.
                self.pods.is_synced,
                self.jobs.is_synced,
                self.endpoints.is_synced,
                self._definitions.is_synced,
                self.nodes.reflector.was_tried,  # without rights in the whole cluster, the operator cannot list nodes
            ):
                await answered.wait()
            self.is_synced.set()
            if self.kuberay_problem:
                logger.warning("%s", self.kuberay_problem)

    async def relist(self) -> None:
        """Lists RayClusters, pods and EndpointSlices again: a watch may lag. Returns once the copies are new."""
        await asyncio.gather(*(each.relist() for each in (self.clusters, self.pods, self.endpoints)))

    def problem(self) -> str:
        """Returns the result of `silence` for all watches; empty before they are in sync."""
        return silence(self._all) if self.is_synced.is_set() else ""

    def _definition_changed(self, _: ServiceKey) -> None:
        found = self._definitions.of_service(_KUBERAY)
        before = self.kuberay_problem
        self.kuberay_problem = found[0]["problem"] if found else kuberay.problem(None)
        if before != self.kuberay_problem:
            level = logging.WARNING if self.kuberay_problem else logging.INFO
            logger.log(level, "%s", self.kuberay_problem or "The cluster has a KubeRay that can be used.")
            self._on_kuberay()

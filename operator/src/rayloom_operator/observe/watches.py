"""What the operator watches beside LLMServices: the objects of engines, and which KubeRay there is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from rayloom_operator.kube import shapes
from rayloom_operator.kube.client import Kube
from rayloom_operator.kube.reflector import Reflector
from rayloom_operator.names import ServiceKey
from rayloom_operator.observe import kuberay
from rayloom_operator.observe.nodes import Nodes

logger = logging.getLogger(__name__)

# Each watch fails or is told something within 90 s, and is asked for again at most 60 s later.
_MAX_SILENCE_S = 180.0
_KUBERAY: ServiceKey = ("", kuberay.DEFINITION)


class Watches:
    """`on_change` gets the service whose RayCluster, Job or EndpointSlice changed, `on_pod` that of a pod. `on_node`
    gets the name of a node that is ready no more, or again; `on_kuberay` is called when KubeRay can be used no more,
    or again."""

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
        follow = partial(Reflector, kube, namespaces=namespaces)
        self.clusters = follow("ray.io/v1", "RayCluster", on_change, shape=shapes.RayCluster, slim=shapes.ray_cluster)
        self.pods = follow("v1", "Pod", on_pod, shape=shapes.Pod, slim=shapes.pod, mark=shapes.node_of)
        self.jobs = follow("batch/v1", "Job", on_change, shape=shapes.Owned)
        # Kubernetes gives them the labels of their Service.
        slices = ("discovery.k8s.io/v1", "EndpointSlice")
        self.endpoints = follow(*slices, on_change, shape=shapes.EndpointSlice, slim=shapes.endpoint_slice)
        self.nodes = Nodes(kube, on_node)
        self._definitions = Reflector(
            kube,
            "apiextensions.k8s.io/v1",
            "CustomResourceDefinition",
            self._definition_changed,
            selector={"fieldSelector": f"metadata.name={kuberay.DEFINITION}"},
            key_of=lambda _: _KUBERAY,
            slim=kuberay.slim,
        )
        self._all = (self.clusters, self.pods, self.jobs, self.endpoints, self._definitions, self.nodes.reflector)
        self._on_kuberay = on_kuberay
        self.kuberay_problem = kuberay.problem(None)  # why no RayCluster can be made; empty when one can
        self.is_synced = asyncio.Event()  # set once the cluster is known

    async def run(self) -> None:
        """Watches for ever."""
        async with asyncio.TaskGroup() as tasks:
            for reflector in self._all:
                tasks.create_task(reflector.run())
            # Where there is no KubeRay, there is no RayCluster to list.
            for answered in (
                self.clusters.has_answered,
                self.pods.is_synced,
                self.jobs.is_synced,
                self.endpoints.is_synced,
                self._definitions.is_synced,
                self.nodes.reflector.was_tried,  # it may be forbidden
            ):
                await answered.wait()
            self.is_synced.set()
            if self.kuberay_problem:
                logger.warning("%s", self.kuberay_problem)

    def problem(self) -> str:
        """Which watches stand still; empty when none does. A failure is a sign of life."""
        now = asyncio.get_running_loop().time()
        silent = [each.path for each in self._all if each.silence_seconds(now) > _MAX_SILENCE_S]
        return (
            f"no word of {', '.join(silent)} for {_MAX_SILENCE_S:.0f} s" if silent and self.is_synced.is_set() else ""
        )

    def _definition_changed(self, _: ServiceKey) -> None:
        found = self._definitions.of_service(_KUBERAY)
        before, self.kuberay_problem = self.kuberay_problem, found[0]["problem"] if found else kuberay.problem(None)
        if before != self.kuberay_problem:
            level = logging.WARNING if self.kuberay_problem else logging.INFO
            logger.log(level, "%s", self.kuberay_problem or "The cluster has a KubeRay that can be used.")
            self._on_kuberay()

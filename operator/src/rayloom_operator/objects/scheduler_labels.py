"""Labels and annotations by which queues and batch schedulers take a RayCluster, passed on from its LLMService.

Kueue reads its own when the RayCluster is made; KubeRay's plugins for Volcano, YuniKorn and KAI read theirs when they
make its pods. A RayCluster is never changed, so another queue counts for engines that are made from then on, and none
is replaced for it.
"""

from __future__ import annotations

from rayloom_operator.api.spec import Metadata
from rayloom_operator.names import CLUSTER_LABEL, NODE_TYPE_LABEL

_QUEUES = ("kueue.x-k8s.io/", "volcano.sh/", "yunikorn.apache.org/", "kai.scheduler/")
_KUBERAY = "ray.io/"
# KubeRay finds by these what belongs to whom; a RayService would delete a RayCluster that carries its name.
_KUBERAYS_OWN = frozenset(
    {CLUSTER_LABEL, NODE_TYPE_LABEL, "ray.io/originated-from-cr-name", "ray.io/originated-from-crd"}
)


def scheduler_labels(metadata: Metadata) -> dict[str, str]:
    """Labels of the LLMService that its RayClusters get too."""
    read = {name: value for name, value in metadata.labels.items() if name.startswith((*_QUEUES, _KUBERAY))}
    return {name: value for name, value in read.items() if name not in _KUBERAYS_OWN}


def scheduler_annotations(metadata: Metadata) -> dict[str, str]:
    """Annotations of the LLMService that its RayClusters get too. KubeRay's are not among them: they say how KubeRay
    runs the pods, which the operator decides."""
    return {name: value for name, value in metadata.annotations.items() if name.startswith(_QUEUES)}

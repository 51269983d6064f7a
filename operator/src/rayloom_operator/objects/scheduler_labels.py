"""Copies labels and annotations of queues and batch schedulers from the LLMService to its RayClusters.

Kueue reads its labels when the RayCluster is created. KubeRay's plugins for Volcano, YuniKorn and KAI read their labels
when KubeRay creates the pods. A RayCluster is never updated. So a changed queue applies only to engine replicas that
are created later.
"""

from __future__ import annotations

from rayloom_operator.api.spec import Metadata
from rayloom_operator.names import CLUSTER_LABEL, NODE_TYPE_LABEL

_QUEUES = ("kueue.x-k8s.io/", "volcano.sh/", "yunikorn.apache.org/", "kai.scheduler/")
_KUBERAY = "ray.io/"
# These labels are not copied: KubeRay selects objects by them, and a RayService deletes RayClusters whose labels name
# the RayService.
_KUBERAYS_OWN = frozenset(
    {CLUSTER_LABEL, NODE_TYPE_LABEL, "ray.io/originated-from-cr-name", "ray.io/originated-from-crd"}
)


def scheduler_labels(metadata: Metadata) -> dict[str, str]:
    """Labels of the LLMService that are copied to its RayClusters."""
    read = {name: value for name, value in metadata.labels.items() if name.startswith((*_QUEUES, _KUBERAY))}
    return {name: value for name, value in read.items() if name not in _KUBERAYS_OWN}


def scheduler_annotations(metadata: Metadata) -> dict[str, str]:
    """Annotations of the LLMService that are copied to its RayClusters.

    KubeRay's annotations are not copied: they configure how KubeRay runs pods, which the operator decides.
    """
    return {name: value for name, value in metadata.annotations.items() if name.startswith(_QUEUES)}

"""For each object that is watched for drift: the fields that the operator applies, and a digest of their values. Pure.

An object has the same digest as its manifest while each of these fields has the value that was applied. Defaults of the
API server, and fields and labels of other controllers, are not in the shapes below, so the digest ignores them. Lists
and selectors are included whole, because an item that somebody adds to them may admit clients or select pods.
"""

from __future__ import annotations

from typing import Any, TypedDict

import msgspec

from rayloom_operator.names import Manifest

OwnLabels = TypedDict(
    "OwnLabels",
    {"app.kubernetes.io/managed-by": str, "rayloom.dev/service": str, "rayloom.dev/llmgateway": str},
    total=False,
)


class AppliedMetadata(TypedDict, total=False):
    name: str
    namespace: str
    uid: str
    resourceVersion: str
    generation: int
    labels: OwnLabels
    ownerReferences: list[Any]


class ServicePort(TypedDict, total=False):
    """The fields of a Service's port except `nodePort`.

    The API server sets `nodePort` on a Service that is open to other networks.
    """

    name: str
    protocol: str
    appProtocol: str
    port: int
    targetPort: Any


class ServiceSpec(TypedDict, total=False):
    """The fields of all Services, without `clusterIP` and `ipFamilyPolicy`, for which the API server sets defaults."""

    selector: Any
    publishNotReadyAddresses: bool
    ports: list[ServicePort]


SecretsAnnotation = TypedDict("SecretsAnnotation", {"rayloom.dev/secrets": str}, total=False)


class HolderMetadata(AppliedMetadata, total=False):
    """Metadata of an object that may have a digest of Secrets (`objects/secret_digest.py`)."""

    annotations: SecretsAnnotation


class AppliedService(TypedDict, total=False):
    metadata: HolderMetadata
    spec: ServiceSpec


class AppliedServiceAccount(TypedDict, total=False):
    metadata: HolderMetadata
    automountServiceAccountToken: bool


class NetworkPolicySpec(TypedDict, total=False):
    podSelector: Any
    policyTypes: list[str]
    ingress: list[Any]


class AppliedNetworkPolicy(TypedDict, total=False):
    metadata: AppliedMetadata
    spec: NetworkPolicySpec


class DisruptionBudgetSpec(TypedDict, total=False):
    minAvailable: Any
    selector: Any
    unhealthyPodEvictionPolicy: str


class AppliedDisruptionBudget(TypedDict, total=False):
    metadata: AppliedMetadata
    spec: DisruptionBudgetSpec


class AppliedFile(TypedDict, total=False):
    key: str
    path: str
    fieldRef: FieldPath


class FieldPath(TypedDict, total=False):
    fieldPath: str


class AppliedFiles(TypedDict, total=False):
    name: str
    items: list[AppliedFile]
    optional: bool


class VolumeSource(TypedDict, total=False):
    downwardAPI: AppliedFiles
    secret: AppliedFiles


class ProjectedVolume(TypedDict, total=False):
    sources: list[VolumeSource]


class SecretVolume(TypedDict, total=False):
    secretName: str
    items: list[AppliedFile]


class AppliedVolume(TypedDict, total=False):
    name: str
    projected: ProjectedVolume
    secret: SecretVolume
    emptyDir: Any


class HttpGet(TypedDict, total=False):
    path: str
    port: Any


class AppliedProbe(TypedDict, total=False):
    httpGet: HttpGet
    periodSeconds: int
    timeoutSeconds: int
    failureThreshold: int


class AppliedContainer(TypedDict, total=False):
    """The fields of a gateway's container. The operator never applies `env`, so an `env` in the container is drift."""

    name: str
    image: str
    imagePullPolicy: str
    command: list[str]
    args: list[str]
    env: list[Any]
    securityContext: Any
    terminationMessagePolicy: str
    ports: list[Any]
    resources: Any
    readinessProbe: AppliedProbe
    livenessProbe: AppliedProbe
    lifecycle: Any
    volumeMounts: list[Any]


class AppliedPodSpec(TypedDict, total=False):
    serviceAccountName: str
    automountServiceAccountToken: bool
    enableServiceLinks: bool
    securityContext: Any
    tolerations: list[Any]
    imagePullSecrets: list[Any]
    nodeSelector: Any
    priorityClassName: str
    terminationGracePeriodSeconds: int
    topologySpreadConstraints: list[Any]
    containers: list[AppliedContainer]
    volumes: list[AppliedVolume]


class AppliedPodTemplate(TypedDict, total=False):
    metadata: PodTemplateMetadata
    spec: AppliedPodSpec


class PodTemplateMetadata(TypedDict, total=False):
    labels: Any
    annotations: OwnAnnotations


OwnAnnotations = TypedDict("OwnAnnotations", {"rayloom.dev/gateway-config": str}, total=False)


class DeploymentSpec(TypedDict, total=False):
    replicas: int
    revisionHistoryLimit: int
    selector: Any
    strategy: Any
    template: AppliedPodTemplate


class AppliedDeployment(TypedDict, total=False):
    metadata: AppliedMetadata
    spec: DeploymentSpec


class RouteMetadata(TypedDict, total=False):
    """Metadata of a route. All labels and annotations are included, because the user chooses them.

    If a controller adds labels or annotations, the digests differ, and a restarted operator applies the route once.
    """

    name: str
    namespace: str
    uid: str
    resourceVersion: str
    generation: int
    creationTimestamp: str
    labels: Any
    annotations: Any
    ownerReferences: list[Any]


class HttpRouteSpec(TypedDict, total=False):
    parentRefs: list[Any]
    hostnames: list[str]
    rules: list[Any]


class AppliedHttpRoute(TypedDict, total=False):
    metadata: RouteMetadata
    spec: HttpRouteSpec


class IngressSpec(TypedDict, total=False):
    ingressClassName: str
    tls: list[Any]
    rules: list[Any]


class AppliedIngress(TypedDict, total=False):
    metadata: RouteMetadata
    spec: IngressSpec


class WatchedHttpRoute(AppliedHttpRoute, total=False):
    status: Any


class WatchedIngress(AppliedIngress, total=False):
    status: Any


class DeploymentCondition(TypedDict, total=False):
    type: str
    status: str
    reason: str
    message: str


class DeploymentStatus(TypedDict, total=False):
    observedGeneration: int
    replicas: int
    updatedReplicas: int
    conditions: list[DeploymentCondition]


class WatchedDeployment(AppliedDeployment, total=False):
    """The applied fields of a Deployment, and its status, which is not applied."""

    status: DeploymentStatus


# kind -> shape
SHAPES: dict[str, Any] = {
    "Service": AppliedService,
    "ServiceAccount": AppliedServiceAccount,
    "NetworkPolicy": AppliedNetworkPolicy,
    "PodDisruptionBudget": AppliedDisruptionBudget,
    "Deployment": AppliedDeployment,
    "HTTPRoute": AppliedHttpRoute,
    "Ingress": AppliedIngress,
}
# kind -> shape of a watched object, for kinds whose status is read, too
WATCHED_SHAPES: dict[str, Any] = {
    "Deployment": WatchedDeployment,
    "HTTPRoute": WatchedHttpRoute,
    "Ingress": WatchedIngress,
}
# Metadata that the API server sets, and the object's name and namespace.
_NOT_APPLIED = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp")


def digest(kind: str, document: Manifest) -> int:
    """Returns the digest of a manifest, or of an object that the API server returned. `kind` is one of SHAPES.

    Digests can be compared within one process only.
    """
    fields = msgspec.convert(document, SHAPES[kind])
    meta = {name: value for name, value in fields["metadata"].items() if name not in _NOT_APPLIED}
    if not meta.get("annotations"):
        meta.pop("annotations", None)  # all annotations are those of other clients
    return hash(msgspec.json.encode(fields | {"metadata": meta}, order="sorted"))

"""`spec.podTemplate`: a user's additions and changes to the head pod and the worker pods.

Each template is a part of Kubernetes' PodTemplateSpec, merged over the pod that the operator builds
(`objects/pod_merge.py`). Fields that the operator owns are refused by name, here and by the API server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from rayloom_operator.api.base import MAP_BY_NAME, Part
from rayloom_operator.api.base import rules as _rules
from rayloom_operator.api.pod_template.container import Container, PodContainer, covers, owned_in_words
from rayloom_operator.api.pod_template.parts import (
    Affinity,
    DnsConfig,
    HostAlias,
    PodSecurity,
    ResourceClaim,
    TemplateMetadata,
    TopologySpread,
    Volume,
)
from rayloom_operator.api.pod_template.reserved_parts import (
    ADAPTER_VOLUMES,
    DRAFT_VOLUME,
    HEAD_CONTAINERS,
    OWN_CONTAINERS,
    OWN_INIT_CONTAINERS,
    OWN_VOLUMES,
    WORKER_CONTAINERS,
)
from rayloom_operator.api.pods import LocalObject, Toleration

_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
HEAD_ACCELERATORS_IN_WORDS = (
    "accelerators are for the ranks in worker pods: remove them from podTemplate.head, and use spec.accelerator"
)
_VOLUMES_IN_WORDS = f"volumes cannot have a name of the operator's own ({', '.join(OWN_VOLUMES)}): use another name"
ADAPTER_VOLUMES_IN_WORDS = (
    "beside model.adapters the volumes of podTemplate cannot have the names of the adapters' volumes "
    f"({ADAPTER_VOLUMES[0]} to {ADAPTER_VOLUMES[-1]}): use other names"
)
DRAFT_VOLUME_IN_WORDS = (
    f"beside model.draft no volume of podTemplate can be called {DRAFT_VOLUME}, as the draft model's volume is: use "
    "another name"
)
_NO_VOLUME_IN_WORDS = "each volumeMounts[].name must be the name of a volume in the volumes of the same pod template"
_INIT_IN_WORDS = (
    f"initContainers cannot have a name of the operator's own ({', '.join((*OWN_CONTAINERS, *OWN_INIT_CONTAINERS))}): "
    "use another name"
)

# Fields of a pod that a template must not have -> (type in Kubernetes, what to use instead).
_OWNED: dict[str, tuple[str, str]] = {
    "restartPolicy": ("string", "use spec.recovery for when failed pods are replaced"),
    "terminationGracePeriodSeconds": ("integer", "use spec.drainSeconds"),
    "activeDeadlineSeconds": ("integer", "an engine runs until it is replaced; remove it"),
    "shareProcessNamespace": ("boolean", "Ray finds its raylet among the processes of the pod; remove it"),
    "hostPID": ("boolean", "the containers of a pod share a process namespace of their own; remove it"),
    "hostname": ("string", "Ray's nodes are found by the names that KubeRay gives them; remove it"),
    "subdomain": ("string", "Ray's nodes are found by the names that KubeRay gives them; remove it"),
    "nodeName": ("string", "use nodeSelector or affinity, so that pods can move off lost nodes"),
    "serviceAccountName": (
        "string",
        "pods use the account NAME-rayloom, which has no rights; give that account annotations or roles",
    ),
    "serviceAccount": ("string", "pods use the account NAME-rayloom; give that account annotations or roles"),
    "automountServiceAccountToken": ("boolean", "use a projected volume with a serviceAccountToken"),
    "enableServiceLinks": ("boolean", "variables of other Services could be taken for Ray's; remove it"),
    "priority": ("integer", "use priorityClassName"),
}


def _schema(*own_pairs: tuple[str, str]) -> Any:
    """Returns a function that changes a pod's schema: it adds each field of `_OWNED`, with a CEL rule that refuses the
    field.

    The message of such a rule says what to use instead. `own_pairs` are further rules with their messages.
    """

    def add(schema: dict[str, Any]) -> None:
        schema["properties"] |= {
            field: {"type": kind, "description": f"Refused: {owned_in_words(field, cure)}."}
            for field, (kind, cure) in _OWNED.items()
        }
        pairs = (
            *((f"!has(self.{field})", owned_in_words(field, cure)) for field, (_, cure) in _OWNED.items()),
            (
                f"!has(self.volumes) || self.volumes.all(each, !(each.name in {json.dumps(OWN_VOLUMES)}))",
                _VOLUMES_IN_WORDS,
            ),
            (
                "!has(self.initContainers) || self.initContainers.all(each, has(each.image) && "
                f"!(each.name in {json.dumps((*OWN_CONTAINERS, *OWN_INIT_CONTAINERS))}))",
                f"{_INIT_IN_WORDS}; each needs an image",
            ),
            *((_mounts_rule(kind), _NO_VOLUME_IN_WORDS) for kind in ("initContainers", "containers")),
            *own_pairs,
        )
        schema |= dict(_rules(*pairs))

    return add


def _mounts_rule(kind: str) -> str:
    """Returns the CEL rule by which containers in the list `kind` can mount only volumes of their own template."""
    return (
        f"!has(self.{kind}) || self.{kind}.all(each, !has(each.volumeMounts) || each.volumeMounts.all(mount, "
        "has(self.volumes) && self.volumes.exists(volume, volume.name == mount.name)))"
    )


def _only(own: tuple[str, ...], pod: str) -> tuple[str, str]:
    """Returns a CEL rule and its message. `own`: the only containers of the operator that a template may name."""
    others = [name for name in OWN_CONTAINERS if name not in own]
    words = (
        f"containers of {pod} pods cannot have the name {' or '.join(others)}: the operator's own there "
        f"{'is' if len(own) == 1 else 'are'} {' and '.join(own)}"
    )
    rule = f"!has(self.containers) || self.containers.all(each, !(each.name in {json.dumps(others)}))"
    return rule, words


class PodSpec(Part):
    """The `spec` of a pod template. The subclasses are for the head pod and for worker pods."""

    own_containers: ClassVar[tuple[str, ...]] = OWN_CONTAINERS
    pod: ClassVar[str] = ""

    runtime_class_name: str | None = Field(
        None, pattern=_NAME, max_length=253, description="RuntimeClass of the pods, such as nvidia."
    )
    node_selector: dict[str, str] | None = Field(
        None, description="Labels that a node must have, in addition to those of spec.scheduling."
    )
    affinity: Affinity | None = Field(None, description="Nodes and other pods that the pods require or prefer.")
    tolerations: tuple[Toleration, ...] | None = Field(
        None,
        strict=False,
        max_length=64,
        description="Taints that the pods tolerate, in addition to those of spec.scheduling.",
    )
    topology_spread_constraints: tuple[TopologySpread, ...] | None = Field(
        None,
        strict=False,
        max_length=16,
        description="Spread of the pods over nodes. A constraint with the same topologyKey and whenUnsatisfiable as "
        "the operator's constraint changes the operator's.",
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["topologyKey", "whenUnsatisfiable"],
        },
    )
    priority_class_name: str | None = Field(
        None, pattern=_NAME, max_length=253, description="PriorityClass. Default: that of spec.scheduling."
    )
    preemption_policy: str | None = Field(
        None, description="Whether the pods may preempt pods of lower priority: PreemptLowerPriority or Never."
    )
    scheduler_name: str | None = Field(None, max_length=253, description="Scheduler of the pods.")
    image_pull_secrets: tuple[LocalObject, ...] | None = Field(
        None,
        strict=False,
        max_length=16,
        description="Secrets with credentials of registries, in addition to those of spec.engine.",
        json_schema_extra=MAP_BY_NAME,
    )
    host_network: bool | None = Field(
        None,
        description="Whether the pods use their node's network. Must be allowed by the operator's settings; a node "
        "can then run only one such pod.",
    )
    host_ipc: bool | None = Field(
        None,
        alias="hostIPC",
        description="Whether the pods use their node's IPC. Must be allowed by the operator's settings.",
    )
    host_users: bool | None = Field(None, description="false: each pod gets a user namespace of its own.")
    dns_policy: Literal["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"] | None = Field(
        None, description="Default: ClusterFirst, or ClusterFirstWithHostNet with hostNetwork."
    )
    dns_config: DnsConfig | None = Field(None, description="DNS settings of the pods.")
    host_aliases: tuple[HostAlias, ...] | None = Field(
        None, strict=False, max_length=64, description="Further lines of /etc/hosts."
    )
    security_context: PodSecurity | None = Field(
        None, description="Users, groups and profiles for all containers of a pod."
    )
    resource_claims: tuple[ResourceClaim, ...] | None = Field(
        None,
        strict=False,
        max_length=16,
        description="Claims of dynamic resource allocation.",
        json_schema_extra=MAP_BY_NAME,
    )
    volumes: tuple[Volume, ...] | None = Field(
        None,
        strict=False,
        max_length=64,
        description="Volumes for the pods' containers. hostPath must be allowed by the operator's settings.",
        json_schema_extra=MAP_BY_NAME,
    )
    init_containers: tuple[Container, ...] | None = Field(
        None,
        strict=False,
        max_length=16,
        description="Containers that run before the others, or beside them with restartPolicy Always.",
        json_schema_extra=MAP_BY_NAME,
    )
    containers: tuple[PodContainer, ...] | None = Field(
        None,
        strict=False,
        max_length=16,
        description="Changes of the operator's containers, by their names, and additional containers.",
        json_schema_extra=MAP_BY_NAME,
    )

    @model_validator(mode="before")
    @classmethod
    def _gives_no_owned_field(cls, given: object) -> object:
        if isinstance(given, Mapping) and (found := [field for field in _OWNED if field in given]):
            raise ValueError("; ".join(owned_in_words(field, _OWNED[field][1]) for field in found))
        return given

    @field_validator("volumes")
    @classmethod
    def _volumes_are_new(cls, volumes: tuple[Volume, ...] | None) -> tuple[Volume, ...] | None:
        if bad := [each.name for each in volumes or () if each.name in OWN_VOLUMES]:
            raise ValueError(f"{', '.join(bad)}: {_VOLUMES_IN_WORDS}")
        return volumes

    @field_validator("init_containers")
    @classmethod
    def _init_containers_are_new(cls, containers: tuple[Container, ...] | None) -> tuple[Container, ...] | None:
        for each in containers or ():
            if each.name in (*OWN_CONTAINERS, *OWN_INIT_CONTAINERS):
                raise ValueError(f"{each.name}: {_INIT_IN_WORDS}")
            if each.image is None:
                raise ValueError(f"{each.name}: each needs an image")
        return containers

    @model_validator(mode="after")
    def _parts_fit_together(self) -> PodSpec:
        every = self.every_container
        for kind, names in (("containers", [each.name for each in every]), ("volumes", self.volume_names)):
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{', '.join(repeated)} is given more than once in {kind}; keep one of each name")
        if bad := [each.name for each in every if each.is_own and each.name not in self.own_containers]:
            raise ValueError(f"{', '.join(bad)}: {_only(self.own_containers, self.pod)[1]}")
        for container in every:
            for mount in container.volume_mounts or ():
                if mount.name not in self.volume_names:
                    raise ValueError(f"{mount.name} of container {container.name}: {_NO_VOLUME_IN_WORDS}")
        return self

    @property
    def volume_names(self) -> list[str]:
        return [each.name for each in self.volumes or ()]

    def container(self, name: str) -> Container | None:
        """Returns the template's entry for the container `name`; None if there is none."""
        return next((each for each in self.containers or () if each.name == name), None)

    @property
    def every_container(self) -> tuple[Container, ...]:
        return (*(self.init_containers or ()), *(self.containers or ()))


class HeadPodSpec(PodSpec):
    model_config = ConfigDict(json_schema_extra=_schema(_only(HEAD_CONTAINERS, "head")))

    own_containers: ClassVar[tuple[str, ...]] = HEAD_CONTAINERS
    pod: ClassVar[str] = "head"


class WorkerPodSpec(PodSpec):
    model_config = ConfigDict(json_schema_extra=_schema(_only(WORKER_CONTAINERS, "worker")))

    own_containers: ClassVar[tuple[str, ...]] = WORKER_CONTAINERS
    pod: ClassVar[str] = "worker"


class HeadTemplate(Part):
    metadata: TemplateMetadata = Field(default_factory=TemplateMetadata, description="Labels and annotations.")
    spec: HeadPodSpec = Field(
        default_factory=HeadPodSpec, description="Spec of the pod with Ray's head and the engine."
    )


class WorkerTemplate(Part):
    metadata: TemplateMetadata = Field(default_factory=TemplateMetadata, description="Labels and annotations.")
    spec: WorkerPodSpec = Field(default_factory=WorkerPodSpec, description="Spec of the pods with the ranks.")


class PodTemplates(Part):
    """Templates for the pods of the service, merged over the pods that the operator builds."""

    user: Literal["Operator", "Cluster"] = Field(
        "Operator",
        description="Who chooses the pods' user and group. Operator: both are 1000. Cluster: the pods' specs set "
        "neither, and the cluster assigns both, as OpenShift does.",
    )
    head: HeadTemplate = Field(
        default_factory=HeadTemplate, description="The head pod: containers ray-head and engine."
    )
    worker: WorkerTemplate = Field(default_factory=WorkerTemplate, description="Worker pods: container ray-worker.")

    def problems(
        self,
        *,
        accelerator: str | None,
        model_paths: Sequence[str],
        claim_folders: Sequence[str] = (),
        taken_volumes: Sequence[tuple[Sequence[str], str]] = (),
    ) -> list[str]:
        """Returns messages about conflicts with the rest of the spec.

        `accelerator`: the resource of spec.accelerator; None without spec.accelerator. `model_paths`: the paths of
        file:// models, of adapters and of the draft model in containers. `claim_folders`: the folders at which pods
        mount the claims of adapters and of the draft model. `taken_volumes`: names of the volumes of adapters or of a
        draft model, with a message for each group of names.
        """
        found = []
        resources = [each.resources for each in self.head.spec.every_container if each.resources is not None]
        head_resources = {name for each in resources for name in (*(each.requests or ()), *(each.limits or ()))}
        if accelerator in head_resources:
            found.append(f"{accelerator} of podTemplate.head: {HEAD_ACCELERATORS_IN_WORDS}")
        for spec in (self.head.spec, self.worker.spec):
            for names, in_words in taken_volumes:
                if bad := [name for name in spec.volume_names if name in names]:
                    found.append(f"{', '.join(bad)}: {in_words}")
            for container in spec.containers or ():
                if container.is_own:
                    found += _mount_problems(container, model_paths, claim_folders)
        return found


def _mount_problems(container: Container, model_paths: Sequence[str], claim_folders: Sequence[str]) -> Iterator[str]:
    for path in (each.mount_path for each in container.volume_mounts or ()):
        given = f"{path}: this mountPath of container {container.name}"
        if any(covers(path, model_path) for model_path in model_paths):
            yield f"{given} hides the model, its draft model or its adapters; use another one"
        # The claims are mounted read-only, so no folder for another mount can be made in them.
        elif folder := next((each for each in claim_folders if covers(each, path)), None):
            yield (
                f"{given} is in {folder}, where pods mount a claim of the draft model or of adapters read-only; use "
                "another one"
            )


def has_template(templates: PodTemplates) -> bool:
    """True if the templates change or add anything."""
    return templates != PodTemplates()

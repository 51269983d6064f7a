"""A container of a pod template: changes of a container that the operator builds, or an additional container.

Types are checked here, and by the API server at `kubectl apply`. The contents of parts such as probes and `valueFrom`
are not checked here. KubeRay's CRD has the schemas of these parts. So the API server refuses a RayCluster with a
misspelt field in such a part. The condition Accepted then shows the API server's message.
"""

from __future__ import annotations

import json
import posixpath
from typing import Any

from pydantic import ConfigDict, Field, field_validator, model_validator

from rayloom_operator.api.base import MAP_BY_NAME, Free, Part, Quantity
from rayloom_operator.api.base import rules as _rules
from rayloom_operator.api.pod_template.reserved_env import RESERVED_IN_WORDS, RESERVED_RULE, is_reserved
from rayloom_operator.api.pod_template.reserved_parts import OWN_CONTAINERS, OWN_FOLDERS, OWN_VOLUMES, SEALED_FOLDERS

CONTAINER_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_OURS = f"self.name in {json.dumps(OWN_CONTAINERS)}"
_NAMES = ", ".join(OWN_CONTAINERS)

# Fields of the operator's own containers that a template cannot change -> what to use instead.
_OWNED = (
    (("image",), "use spec.engine.image"),
    (("imagePullPolicy",), "use spec.engine.imagePullPolicy"),
    (("command", "args", "workingDir"), "use spec.engine.args for settings of the engine"),
    (("ports",), "add a container of your own for another port"),
    (
        ("livenessProbe", "readinessProbe", "startupProbe"),
        "use spec.recovery.hangSeconds and rebuildSeconds for how long an engine may hang",
    ),
    (
        ("lifecycle", "terminationMessagePath", "terminationMessagePolicy"),
        "use spec.drainSeconds for how long a pod may take to end",
    ),
    (("restartPolicy",), "use spec.recovery.restartBudget"),
)
_WORKER_RESOURCES_IN_WORDS = (
    "resources.requests and resources.limits of ray-worker are the operator's: use spec.engine.resources and "
    "spec.accelerator; resources.claims may be given here"
)
_OWN_VOLUMES_IN_WORDS = (
    f"volumeMounts cannot name a volume of the operator's ({', '.join(OWN_VOLUMES)}): add a volume of your own, also "
    "for the same claim or Secret"
)
_OWN_FOLDERS_IN_WORDS = (
    f"volumeMounts cannot cover a folder of the operator's ({', '.join(OWN_FOLDERS)}): use another mountPath"
)
_ONE_VALUE_IN_WORDS = "give either value or valueFrom"


def owned_in_words(field: str, cure: str) -> str:
    return f"{field} is the operator's own: {cure}"


def _of_containers(fields: tuple[str, ...], cure: str) -> str:
    subject = f"{', '.join(fields)} of the containers {_NAMES}"
    return f"{subject} {'are' if len(fields) > 1 else 'is'} the operator's own: {cure}"


class TemplateEnvVar(Part):
    model_config = ConfigDict(
        json_schema_extra=_rules(("!(has(self.value) && has(self.valueFrom))", _ONE_VALUE_IN_WORDS))
    )

    name: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256, description="Name of an environment variable."
    )
    value: str | None = Field(
        None, description="Value of the variable, a string: put numbers and true/false in quotes."
    )
    value_from: Free | None = Field(
        None, description="Source of the value: secretKeyRef, configMapKeyRef, fieldRef or resourceFieldRef."
    )

    @model_validator(mode="after")
    def _has_one_value(self) -> TemplateEnvVar:
        if self.value is not None and self.value_from is not None:
            raise ValueError(_ONE_VALUE_IN_WORDS)
        return self


class EnvFrom(Part):
    prefix: str | None = Field(None, description="Prefix of the name of each variable.")
    config_map_ref: Free | None = Field(None, description="A ConfigMap. Each of its keys becomes a variable.")
    secret_ref: Free | None = Field(None, description="A Secret. Each of its keys becomes a variable.")


class VolumeMount(Part):
    name: str = Field(max_length=63, description="Name of a volume of this template.")
    mount_path: str = Field(
        min_length=1, max_length=1024, description="Path in the container at which the volume is mounted."
    )
    read_only: bool | None = Field(None, description="Whether the container may only read the volume.")
    recursive_read_only: str | None = Field(
        None, description="Whether mounts below a read-only mount are read-only too: Disabled, IfPossible or Enabled."
    )
    sub_path: str | None = Field(None, description="Path in the volume that is mounted instead of its root.")
    sub_path_expr: str | None = Field(None, description="Like subPath, with $(NAME) for the value of a variable.")
    mount_propagation: str | None = Field(
        None,
        description="Whether later mounts reach the container, or the node: None, HostToContainer or Bidirectional.",
    )


class ResourceClaimRef(Part):
    name: str = Field(max_length=63, description="Name of an entry of the pod's resourceClaims.")
    request: str | None = Field(None, description="Name of one request of the claim. Left out: all requests.")


class ContainerResources(Part):
    requests: dict[str, Quantity] | None = Field(
        None, description="Amounts that a node must have free, by resource name; text such as '500m' or '1Gi'."
    )
    limits: dict[str, Quantity] | None = Field(
        None, description="Amounts that may be used at most, by resource name; text such as '4' or '8Gi'."
    )
    claims: tuple[ResourceClaimRef, ...] | None = Field(
        None,
        strict=False,
        max_length=16,
        description="Claims of dynamic resource allocation that the container uses.",
        json_schema_extra=MAP_BY_NAME,
    )


class Capabilities(Part):
    add: tuple[str, ...] | None = Field(
        None,
        strict=False,
        max_length=32,
        description="Capabilities that the container keeps, such as IPC_LOCK. All others are dropped. Each must be "
        "allowed by the operator's settings.",
    )


class ContainerSecurity(Part):
    run_as_user: int | None = Field(None, ge=0, description="User id. 0 must be allowed by the operator's settings.")
    run_as_group: int | None = Field(None, ge=0, description="Group id.")
    run_as_non_root: bool | None = Field(
        None, description="Whether the kubelet refuses to run the container as root. Default: the value of the pod."
    )
    privileged: bool | None = Field(
        None, description="Whether the container is privileged. true must be allowed by the operator's settings."
    )
    allow_privilege_escalation: bool | None = Field(
        None,
        description="Whether a process may get more privileges than its parent. Default: false. true must be allowed "
        "by the operator's settings.",
    )
    read_only_root_filesystem: bool | None = Field(
        None,
        description="Whether the container may write to volumes only. Default: true for the operator's own containers.",
    )
    capabilities: Capabilities | None = Field(None, description="Capabilities of the container's processes.")
    proc_mount: str | None = Field(
        None, description="Default or Unmasked. Unmasked must be allowed by the operator's settings."
    )
    seccomp_profile: Free | None = Field(None, description="Seccomp profile. Default: the value of the pod.")
    app_armor_profile: Free | None = Field(None, description="AppArmor profile. Default: the container runtime's.")
    se_linux_options: Free | None = Field(None, description="Labels of SELinux.")


class Container(Part):
    """A container of any kind. The pod template that has the container checks the container's name."""

    name: str = Field(
        pattern=CONTAINER_NAME,
        max_length=63,
        description="Name of the container. ray-head and engine in the head pod and ray-worker in worker pods are the "
        "operator's own; any other name adds a container.",
    )
    image: str | None = Field(
        None,
        min_length=1,
        description="Image of an additional container. For the operator's own containers, use spec.engine.image.",
    )
    image_pull_policy: str | None = Field(None, description="Pull policy of the image: Always, IfNotPresent or Never.")
    command: tuple[str, ...] | None = Field(None, strict=False, description="Command instead of the image's.")
    args: tuple[str, ...] | None = Field(None, strict=False, description="Arguments instead of the image's.")
    working_dir: str | None = Field(None, description="Folder in which the command starts.")
    ports: tuple[Free, ...] | None = Field(
        None, strict=False, max_length=64, description="Ports on which the container listens."
    )
    env: tuple[TemplateEnvVar, ...] | None = Field(
        None,
        strict=False,
        max_length=256,
        description="Environment variables. They override those of spec.engine.env. In the operator's own containers, "
        "variables that the operator sets are refused.",
        json_schema_extra=MAP_BY_NAME,
    )
    env_from: tuple[EnvFrom, ...] | None = Field(
        None, strict=False, max_length=32, description="ConfigMaps and Secrets whose keys are variables."
    )
    resources: ContainerResources | None = Field(
        None, description="Resources of the container. For ray-worker use spec.engine.resources."
    )
    volume_mounts: tuple[VolumeMount, ...] | None = Field(
        None,
        strict=False,
        max_length=64,
        description="Volumes of this template that the container mounts.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["mountPath"]},
    )
    volume_devices: tuple[Free, ...] | None = Field(
        None, strict=False, max_length=64, description="Block devices of volumes."
    )
    security_context: ContainerSecurity | None = Field(
        None, description="User, group and privileges of the container's processes."
    )
    liveness_probe: Free | None = Field(
        None, description="Probe. When this probe fails, the kubelet restarts the container."
    )
    readiness_probe: Free | None = Field(None, description="Probe. The pod is ready only while this probe succeeds.")
    startup_probe: Free | None = Field(None, description="Probe. The other probes begin once this probe has succeeded.")
    lifecycle: Free | None = Field(None, description="Hooks postStart and preStop.")
    restart_policy: str | None = Field(
        None, description="With Always, a container in initContainers keeps running beside the other containers."
    )
    termination_message_path: str | None = Field(
        None, description="File whose text the pod's status shows once the container has ended."
    )
    termination_message_policy: str | None = Field(
        None,
        description="Source of that text: File, or FallbackToLogsOnError (the log, if the container failed and the "
        "file is empty).",
    )

    @field_validator("volume_mounts")
    @classmethod
    def _mounts_no_own_volume(cls, mounts: tuple[VolumeMount, ...] | None) -> tuple[VolumeMount, ...] | None:
        if bad := [mount.name for mount in mounts or () if mount.name in OWN_VOLUMES]:
            raise ValueError(f"{', '.join(bad)}: {_OWN_VOLUMES_IN_WORDS}")
        return mounts

    @property
    def is_own(self) -> bool:
        """True if the operator builds this container. If so, the template only changes parts of the container."""
        return self.name in OWN_CONTAINERS


def _container_rules() -> dict[str, Any]:
    owned = (
        (" && ".join(f"!has(self.{field})" for field in fields), _of_containers(fields, cure))
        for fields, cure in _OWNED
    )
    reserved = RESERVED_RULE.replace("self", "each.name")
    folders = json.dumps([path for folder in OWN_FOLDERS for path in (folder, f"{folder}/")])
    pairs = (
        *((f"!({_OURS}) || ({rule})", words) for rule, words in owned),
        (f"!({_OURS}) || !has(self.env) || self.env.all(each, {reserved})", RESERVED_IN_WORDS),
        (
            f"!({_OURS}) || !has(self.volumeMounts) || self.volumeMounts.all(each, !(each.mountPath in {folders}))",
            _OWN_FOLDERS_IN_WORDS,
        ),
        (
            f"!has(self.volumeMounts) || self.volumeMounts.all(each, !(each.name in {json.dumps(OWN_VOLUMES)}))",
            _OWN_VOLUMES_IN_WORDS,
        ),
        (
            "self.name != 'ray-worker' || !has(self.resources) || "
            "(!has(self.resources.requests) && !has(self.resources.limits))",
            _WORKER_RESOURCES_IN_WORDS,
        ),
        (f"({_OURS}) || has(self.image)", "a container of your own needs an image"),
    )
    return dict(_rules(*pairs))


class PodContainer(Container):
    """A container in `containers`, all of which run side by side."""

    model_config = ConfigDict(json_schema_extra=_container_rules())

    @model_validator(mode="after")
    def _changes_no_owned_field(self) -> PodContainer:
        if problems := _problems(self):
            raise ValueError("; ".join(problems))
        return self


def _problems(container: PodContainer) -> list[str]:
    if not container.is_own:
        return [] if container.image is not None else [f"{container.name}: a container of your own needs an image"]
    given = {type(container).model_fields[name].alias for name in container.model_fields_set}
    found = [_of_containers(fields, cure) for fields, cure in _OWNED if given & set(fields)]
    found += [f"env {each.name}: {RESERVED_IN_WORDS}" for each in container.env or () if is_reserved(each.name)]
    covered = [each.mount_path for each in container.volume_mounts or () if _covers_own(each.mount_path)]
    found += [f"{path}: {_OWN_FOLDERS_IN_WORDS}" for path in covered]
    resources = container.resources
    if container.name == "ray-worker" and resources is not None and (resources.requests or resources.limits):
        found.append(_WORKER_RESOURCES_IN_WORDS)
    return found


def covers(path: str, folder: str) -> bool:
    """True if a mount at `path` would hide `folder`."""
    outer = posixpath.normpath("/" + path.strip("/"))
    inner = posixpath.normpath("/" + folder.strip("/"))
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


def _covers_own(path: str) -> bool:
    """True if a mount at `path` would hide a folder of the operator, or lie inside one of SEALED_FOLDERS."""
    return any(covers(path, folder) for folder in OWN_FOLDERS) or any(covers(folder, path) for folder in SEALED_FOLDERS)

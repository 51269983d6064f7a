"""Lists the fields of a pod template that need permission, because restricted pod security refuses them. Pure.

The operator's setting `--allow-in-pod-templates` gives the permission.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rayloom_operator.api.pod_template.container import Container, ContainerSecurity
from rayloom_operator.api.pod_template.parts import PodSecurity
from rayloom_operator.api.pod_template.template import HeadTemplate, PodSpec, PodTemplates, WorkerTemplate

# Value of the setting -> the fields that this value allows. Names of capabilities are also values of the setting.
PRIVILEGES = {
    "hostIPC": "hostIPC",
    "hostNetwork": "hostNetwork, and another host in probes and lifecycle hooks",
    "hostPorts": "hostPort of ports",
    "privileged": "privileged, allowPrivilegeEscalation, procMount, Bidirectional mounts, Unconfined profiles, options "
    "of SELinux, and sysctls that are not safe",
    "root": "runAsUser 0 and runAsNonRoot false",
    "volumes": "kinds of volumes other than VOLUME_KINDS and hostPath",
}
# Kinds of volumes that restricted pod security accepts, and the kind `image`: a volume with the files of an image
# exposes no more than a container of the same image.
VOLUME_KINDS = frozenset(
    {
        *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image"),
        *("persistentVolumeClaim", "projected", "secret"),
    }
)
# The values that https://kubernetes.io/docs/concepts/security/pod-security-standards/#baseline allows.
_SE_LINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_PROFILE_TYPES = ("RuntimeDefault", "Localhost")
SAFE_SYSCTLS = (
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_syncookies",
)
# Annotations that older clusters read in place of appArmorProfile and seccompProfile.
_PROFILE_ANNOTATIONS = (
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
    "seccomp.security.alpha.kubernetes.io/",
)
_CONFINED = ("docker/default", "runtime/default")


def privileges(templates: PodTemplates) -> Iterator[tuple[str, str]]:
    """Yields each field that needs permission, with the value that allows it: a key of PRIVILEGES, or a capability."""
    for where, template in _templates(templates):
        for key, value in template.metadata.annotations.items():
            if key.startswith(_PROFILE_ANNOTATIONS) and not _is_confined_by(value):
                yield f"{where}.metadata.annotations[{key}]", "privileged"
        yield from _of_pod(f"{where}.spec", template.spec)


def _of_pod(where: str, spec: PodSpec) -> Iterator[tuple[str, str]]:
    if spec.host_network:
        yield f"{where}.hostNetwork", "hostNetwork"
    if spec.host_ipc:
        yield f"{where}.hostIPC", "hostIPC"
    for number, volume in enumerate(spec.volumes or ()):
        # hostPath is allowed by another setting, `--allow-host-paths`.
        if others := volume.kinds.keys() - VOLUME_KINDS - {"hostPath"}:
            yield f"{where}.volumes[{number}].{min(others)}", "volumes"
    security = spec.security_context
    yield from _of_security(f"{where}.securityContext", security)
    for number, sysctl in enumerate((security.sysctls if security is not None else None) or ()):
        if sysctl.get("name") not in SAFE_SYSCTLS:
            yield f"{where}.securityContext.sysctls[{number}]", "privileged"
    for kind, containers in (("initContainers", spec.init_containers), ("containers", spec.containers)):
        for number, container in enumerate(containers or ()):
            yield from _of_container(f"{where}.{kind}[{number}]", container)


def host_paths(templates: PodTemplates) -> Iterator[tuple[str, str]]:
    """Yields (name of the field, host path) for each volume of kind hostPath."""
    for where, template in _templates(templates):
        for number, volume in enumerate(template.spec.volumes or ()):
            if "hostPath" in volume.kinds:
                yield f"{where}.spec.volumes[{number}].hostPath.path", str(volume.kinds["hostPath"].get("path", ""))


def variables(templates: PodTemplates, name: str) -> Iterator[tuple[str, str]]:
    """Yields (name of the field, value) for each variable `name` that a template sets in the operator's containers."""
    for where, template in _templates(templates):
        for number, container in enumerate(template.spec.containers or ()):
            for place, each in enumerate((container.env if container.is_own else None) or ()):
                if each.name == name:
                    given = each.value if each.value is not None else "of valueFrom"
                    yield f"{where}.spec.containers[{number}].env[{place}]", given


def _templates(templates: PodTemplates) -> tuple[tuple[str, HeadTemplate | WorkerTemplate], ...]:
    return ("spec.podTemplate.head", templates.head), ("spec.podTemplate.worker", templates.worker)


def _of_container(where: str, container: Container) -> Iterator[tuple[str, str]]:
    for number, port in enumerate(container.ports or ()):
        if port.get("hostPort"):
            yield f"{where}.ports[{number}].hostPort", "hostPorts"
    for number, mount in enumerate(container.volume_mounts or ()):
        if mount.mount_propagation == "Bidirectional":
            yield f"{where}.volumeMounts[{number}].mountPropagation", "privileged"
    for field in _hosts(container):
        yield f"{where}.{field}", "hostNetwork"
    security = container.security_context
    if security is None:
        return
    where = f"{where}.securityContext"
    yield from _of_security(where, security)
    if security.privileged:
        yield f"{where}.privileged", "privileged"
    if security.allow_privilege_escalation:
        yield f"{where}.allowPrivilegeEscalation", "privileged"
    if security.proc_mount not in (None, "Default"):
        yield f"{where}.procMount", "privileged"
    for number, name in enumerate((security.capabilities.add if security.capabilities else None) or ()):
        yield f"{where}.capabilities.add[{number}]", name.removeprefix("CAP_")


def _hosts(container: Container) -> Iterator[str]:
    """Yields the names of the fields that give a host in a probe or hook.

    The kubelet sends the request of such a probe or hook to that host, from the node's network.
    """
    hooks = container.lifecycle or {}
    handlers = (
        ("livenessProbe", container.liveness_probe),
        ("readinessProbe", container.readiness_probe),
        ("startupProbe", container.startup_probe),
        *((f"lifecycle.{name}", hook) for name, hook in hooks.items()),
    )
    for where, handler in handlers:
        for kind in ("httpGet", "tcpSocket"):
            action = handler.get(kind) if isinstance(handler, dict) else None
            if isinstance(action, dict) and action.get("host"):
                yield f"{where}.{kind}.host"


def _of_security(where: str, security: PodSecurity | ContainerSecurity | None) -> Iterator[tuple[str, str]]:
    if security is None:
        return
    if security.run_as_user == 0:
        yield f"{where}.runAsUser", "root"
    if security.run_as_non_root is False:
        yield f"{where}.runAsNonRoot", "root"
    for name, profile in (
        ("seccompProfile", security.seccomp_profile),
        ("appArmorProfile", security.app_armor_profile),
    ):
        if profile is not None and profile.get("type") not in _PROFILE_TYPES:
            yield f"{where}.{name}", "privileged"
    if security.se_linux_options is not None and not _is_confined(security.se_linux_options):
        yield f"{where}.seLinuxOptions", "privileged"


def _is_confined(options: Mapping[str, Any]) -> bool:
    return not options.get("user") and not options.get("role") and options.get("type", "") in _SE_LINUX_TYPES


def _is_confined_by(profile: str) -> bool:
    """True if restricted pod security accepts this profile, the value of a profile annotation."""
    return profile in _CONFINED or profile.startswith("localhost/")

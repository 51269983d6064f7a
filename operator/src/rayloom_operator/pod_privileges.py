"""What in a pod template restricted pod security would refuse, and so needs a setting of the operator. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rayloom_operator.api_container import Container, ContainerSecurity
from rayloom_operator.api_pod_parts import PodSecurity
from rayloom_operator.api_pod_template import PodSpec, PodTemplates

# Settings beside the names of capabilities, and what each allows.
PRIVILEGES = {
    "hostIPC": "hostIPC",
    "hostNetwork": "hostNetwork",
    "hostPorts": "hostPort of ports",
    "privileged": "privileged, allowPrivilegeEscalation, procMount, Unconfined profiles and options of SELinux",
    "root": "runAsUser 0 and runAsNonRoot false",
}
# https://kubernetes.io/docs/concepts/security/pod-security-standards/#baseline
_SE_LINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")


def privileges(templates: PodTemplates) -> Iterator[tuple[str, str]]:
    """(field, the setting that it needs): one of PRIVILEGES, or a capability."""
    for where, spec in _pods(templates):
        if spec.host_network:
            yield f"{where}.hostNetwork", "hostNetwork"
        if spec.host_ipc:
            yield f"{where}.hostIPC", "hostIPC"
        yield from _of_security(f"{where}.securityContext", spec.security_context)
        for kind, containers in (("initContainers", spec.init_containers), ("containers", spec.containers)):
            for number, container in enumerate(containers or ()):
                yield from _of_container(f"{where}.{kind}[{number}]", container)


def host_paths(templates: PodTemplates) -> Iterator[tuple[str, str]]:
    """(field, path) of each volume that is a path of the nodes."""
    for where, spec in _pods(templates):
        for number, volume in enumerate(spec.volumes or ()):
            if "hostPath" in volume.kinds:
                yield f"{where}.volumes[{number}].hostPath.path", str(volume.kinds["hostPath"].get("path", ""))


def variables(templates: PodTemplates, name: str) -> Iterator[tuple[str, str]]:
    """(field, value) of each environment variable `name` of a container of the operator's own."""
    for where, spec in _pods(templates):
        for number, container in enumerate(spec.containers or ()):
            for place, each in enumerate((container.env if container.is_own else None) or ()):
                if each.name == name:
                    given = each.value if each.value is not None else "of valueFrom"
                    yield f"{where}.containers[{number}].env[{place}]", given


def _pods(templates: PodTemplates) -> tuple[tuple[str, PodSpec], ...]:
    return (
        ("spec.podTemplate.head.spec", templates.head.spec),
        ("spec.podTemplate.worker.spec", templates.worker.spec),
    )


def _of_container(where: str, container: Container) -> Iterator[tuple[str, str]]:
    for number, port in enumerate(container.ports or ()):
        if port.get("hostPort"):
            yield f"{where}.ports[{number}].hostPort", "hostPorts"
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
        if profile is not None and profile.get("type") == "Unconfined":
            yield f"{where}.{name}", "privileged"
    if security.se_linux_options is not None and not _is_confined(security.se_linux_options):
        yield f"{where}.seLinuxOptions", "privileged"


def _is_confined(options: Mapping[str, Any]) -> bool:
    return not options.get("user") and not options.get("role") and options.get("type", "") in _SE_LINUX_TYPES

"""Parts of a pod template that are not containers: metadata, volumes, affinity, DNS, security. See `template.py`."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from rayloom_operator.api.base import Free, Part, no_nulls
from rayloom_operator.api.base import rules as _rules
from rayloom_operator.api.pod_template.container import CONTAINER_NAME
from rayloom_operator.api.pod_template.reserved_parts import OWN_LABELS, OWN_PREFIXES

# https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set
_LABEL_VALUE = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_PREFIXES_IN_WORDS = " and ".join(OWN_PREFIXES)
_LABELS_IN_WORDS = (
    f"labels that begin with {_PREFIXES_IN_WORDS}, and {', '.join(OWN_LABELS)}, are the operator's own or KubeRay's: "
    "use another key"
)
_ANNOTATIONS_IN_WORDS = (
    f"annotations that begin with {_PREFIXES_IN_WORDS} are the operator's own or KubeRay's: use another key"
)


class Volume(Part):
    """A volume: its name, and one of Kubernetes' kinds of volumes as an extra field."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": True})

    name: str = Field(
        pattern=CONTAINER_NAME, max_length=63, description="Name by which volumeMounts refer to the volume."
    )

    @model_validator(mode="after")
    def _has_one_kind(self) -> Volume:
        given = self.kinds
        if len(given) != 1:
            found = f"has {' and '.join(given)}" if given else "has no kind"
            raise ValueError(
                f"volume {self.name} {found}: give exactly one, such as persistentVolumeClaim or configMap"
            )
        if not isinstance(given[next(iter(given))], dict):
            raise ValueError(f"{next(iter(given))} of volume {self.name} must be a map")
        no_nulls(given)
        return self

    @property
    def kinds(self) -> dict[str, Any]:
        """All fields but the name: kind of volume -> its settings."""
        return self.model_extra or {}


class TopologySpread(Part):
    max_skew: int = Field(ge=1, description="Largest difference between the numbers of pods in two domains.")
    topology_key: str = Field(
        min_length=1,
        max_length=317,
        description="Label of nodes. Nodes with the same value of this label are one domain.",
    )
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = Field(
        description="Treatment of a pod that would exceed maxSkew."
    )
    label_selector: Free | None = Field(None, description="Pods that are counted. Left out: none.")
    match_label_keys: tuple[str, ...] | None = Field(
        None,
        strict=False,
        description="Labels, such as ray.io/cluster. Only pods that have the same values of these labels as the pod to "
        "schedule are counted.",
    )
    min_domains: int | None = Field(
        None,
        ge=1,
        description="Least number of domains. If there are fewer, the smallest number of pods in a domain counts as 0.",
    )
    node_affinity_policy: str | None = Field(
        None,
        description="Honor: nodes that nodeSelector or affinity of the pod exclude are not counted. Ignore: they are.",
    )
    node_taints_policy: str | None = Field(
        None, description="Honor: nodes with taints that the pod does not tolerate are not counted. Ignore: they are."
    )


class NodeAffinity(Part):
    required_during_scheduling_ignored_during_execution: Free | None = Field(
        None, description="Nodes on which a pod may run: a map with nodeSelectorTerms."
    )
    preferred_during_scheduling_ignored_during_execution: tuple[Free, ...] | None = Field(
        None, strict=False, max_length=64, description="Nodes that a pod prefers, each with a weight."
    )


class PodAffinity(Part):
    """podAffinity or podAntiAffinity."""

    required_during_scheduling_ignored_during_execution: tuple[Free, ...] | None = Field(
        None, strict=False, max_length=64, description="Terms that must hold."
    )
    preferred_during_scheduling_ignored_during_execution: tuple[Free, ...] | None = Field(
        None, strict=False, max_length=64, description="Terms that are preferred, each with a weight."
    )


class Affinity(Part):
    node_affinity: NodeAffinity | None = Field(None, description="Nodes that a pod requires or prefers.")
    pod_affinity: PodAffinity | None = Field(
        None, description="Other pods in whose domain, such as a node, a pod must or should run."
    )
    pod_anti_affinity: PodAffinity | None = Field(
        None, description="Other pods in whose domain, such as a node, a pod must not or should not run."
    )


class DnsConfig(Part):
    nameservers: tuple[str, ...] | None = Field(None, strict=False, description="Addresses of name servers.")
    searches: tuple[str, ...] | None = Field(None, strict=False, description="Domains in which names are looked up.")
    options: tuple[Free, ...] | None = Field(None, strict=False, description="Options of the resolver.")


class HostAlias(Part):
    ip: str = Field(min_length=1, max_length=64, description="IP address.")
    hostnames: tuple[str, ...] | None = Field(None, strict=False, description="Names of this address.")


class ResourceClaim(Part):
    name: str = Field(pattern=CONTAINER_NAME, max_length=63, description="Name by which containers refer to the claim.")
    resource_claim_name: str | None = Field(None, description="A ResourceClaim that all pods share.")
    resource_claim_template_name: str | None = Field(
        None, description="A ResourceClaimTemplate. Each pod gets a claim of its own from it."
    )


class PodSecurity(Part):
    run_as_user: int | None = Field(
        None, ge=0, description="User id. Default: 1000. 0 must be allowed by the operator's settings."
    )
    run_as_group: int | None = Field(None, ge=0, description="Group id. Default: 1000.")
    run_as_non_root: bool | None = Field(
        None,
        description="Whether the kubelet refuses to run a container as root. Default: true. false must be allowed by "
        "the operator's settings.",
    )
    fs_group: int | None = Field(None, ge=0, description="Group of the files in volumes. Default: 1000.")
    fs_group_change_policy: str | None = Field(
        None, description="When the files in volumes get that group: Always or OnRootMismatch. Default: OnRootMismatch."
    )
    supplemental_groups: tuple[int, ...] | None = Field(
        None, strict=False, description="Further groups of the containers' processes."
    )
    supplemental_groups_policy: str | None = Field(
        None, description="Merge: groups of the image's user are added. Strict: they are not."
    )
    seccomp_profile: Free | None = Field(None, description="Seccomp profile. Default: RuntimeDefault.")
    app_armor_profile: Free | None = Field(None, description="AppArmor profile. Default: the container runtime's.")
    se_linux_options: Free | None = Field(None, description="Labels of SELinux.")
    se_linux_change_policy: str | None = Field(
        None, description="How the files in volumes get these labels: Recursive or MountOption."
    )
    sysctls: tuple[Free, ...] | None = Field(None, strict=False, description="Kernel settings of the pod.")


def _labels(given: dict[str, str]) -> dict[str, str]:
    own = [key for key in given if key.startswith(OWN_PREFIXES) or key in OWN_LABELS]
    return _checked_keys(given, own, _LABELS_IN_WORDS)


def _annotations(given: dict[str, str]) -> dict[str, str]:
    return _checked_keys(given, [key for key in given if key.startswith(OWN_PREFIXES)], _ANNOTATIONS_IN_WORDS)


def _checked_keys(given: dict[str, str], own: list[str], words: str) -> dict[str, str]:
    if own:
        raise ValueError(f"{', '.join(own)}: {words}")
    if bad := [key for key in given if not _KEY.fullmatch(key)]:
        raise ValueError(
            f"{bad[0]!r} is not a key of a label or annotation: use letters, digits, '-', '_' and '.', with or without "
            "a domain and '/' before them"
        )
    return given


_NO_OWN_PREFIX = " && ".join(f"!key.startsWith({json.dumps(prefix)})" for prefix in OWN_PREFIXES)


class TemplateMetadata(Part):
    labels: Annotated[
        dict[str, Annotated[str, Field(pattern=_LABEL_VALUE, max_length=63)]], AfterValidator(_labels)
    ] = Field(
        default_factory=dict,
        max_length=64,
        description="Labels of the pods, in addition to the operator's.",
        json_schema_extra=_rules(
            (f"self.all(key, {_NO_OWN_PREFIX} && !(key in {json.dumps(OWN_LABELS)}))", _LABELS_IN_WORDS)
        ),
    )
    annotations: Annotated[dict[str, str], AfterValidator(_annotations)] = Field(
        default_factory=dict,
        max_length=64,
        description="Annotations of the pods, in addition to the operator's.",
        json_schema_extra=_rules((f"self.all(key, {_NO_OWN_PREFIX})", _ANNOTATIONS_IN_WORDS)),
    )

"""The parts of pods that belong to the operator: their lists, and that no `spec.podTemplate` changes them."""

import json
import re
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from rayloom_operator.api.adapters import MAX_PLACES
from rayloom_operator.api.pod_template.reserved_env import is_reserved
from rayloom_operator.api.pod_template.reserved_parts import (
    ADAPTER_VOLUMES,
    ADAPTERS_FOLDER,
    HEAD_CONTAINERS,
    OWN_CONTAINERS,
    OWN_FOLDERS,
    OWN_VOLUMES,
    WORKER_CONTAINERS,
)
from rayloom_operator.resolve.resolved import Hub, resolve
from rt_operator import make_resolved, make_service
from rt_pod_template import build, by_name, templates

HUB = Hub(endpoint="https://mirror", ca_config_map="ca")
SOURCES = (
    {"source": "builtin://smollm2-135m"},
    {"source": "pvc://claim/m.gguf", "draft": {"source": "pvc://drafts/d"}},
    {
        "source": "builtin://smollm2-135m",
        "adapters": [{"name": f"a{n}", "source": f"pvc://a{n}/a"} for n in range(MAX_PLACES)],
    },
    {"source": "hf://a/b", "tokenSecretRef": {"name": "n", "key": "k"}, "cache": {"persistentVolumeClaim": "c"}},
)


def test_the_lists_of_own_parts_equal_those_of_the_pods():
    volumes, folders, containers = set(), set(), []
    for model, auth in product(SOURCES, ({}, {"auth": {"apiKeySecretRef": {"name": "a", "key": "k"}}})):
        resolved = resolve(make_service(model=model, **auth), "image", hub=HUB)
        head, worker = templates(resolved)
        containers = [list(by_name(head)), list(by_name(worker))]
        for template in (head, worker):
            volumes |= by_name(template, "volumes").keys()
            for container in template["spec"]["containers"]:
                # The claims of adapters are mounted below one folder.
                paths = [each["mountPath"] for each in container["volumeMounts"]]
                folders |= {re.sub("^/adapters/.*", ADAPTERS_FOLDER, path) for path in paths}

    assert containers == [list(HEAD_CONTAINERS), list(WORKER_CONTAINERS)]
    assert sorted(volumes) == sorted((*OWN_VOLUMES, *ADAPTER_VOLUMES, "draft-model"))
    assert sorted(folders) == sorted((*OWN_FOLDERS, ADAPTERS_FOLDER, "/draft-model"))


NAME = st.sampled_from(["a", "engine2", "proxy"])
FREE_PATH = st.sampled_from(["/a", "/tmp/a", "/cache/b", "/opt/c"])
ENV = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["A", "HF_HOME", "NCCL_DEBUG", "RAYLOOM_CACHE", "RAY_health_check_period_ms"])},
        optional={"value": st.sampled_from(["", "1"])},
    ),
    max_size=3,
    unique_by=lambda each: each["name"],
)
CONTAINER = {
    "env": ENV,
    "envFrom": st.lists(st.sampled_from([{"prefix": "P"}, {"secretRef": {"name": "s"}}]), max_size=2),
    "volumeMounts": st.lists(
        st.fixed_dictionaries({"name": st.just("data"), "mountPath": FREE_PATH}),
        max_size=2,
        unique_by=lambda each: each["mountPath"],
    ),
    "securityContext": st.fixed_dictionaries(
        {}, optional={"runAsUser": st.integers(0, 2000), "privileged": st.booleans()}
    ),
}
HEAD_RESOURCES = st.fixed_dictionaries({}, optional={"limits": st.dictionaries(st.just("cpu"), st.just("4"))})


def containers(own):
    ours = st.fixed_dictionaries(
        {"name": st.sampled_from(own)}, optional=CONTAINER | ({"resources": HEAD_RESOURCES} if len(own) > 1 else {})
    )
    others = st.fixed_dictionaries({"name": NAME, "image": st.just("i")}, optional=CONTAINER)
    return st.lists(st.one_of(ours, others), max_size=3, unique_by=lambda each: each["name"])


def pod_templates(own):
    spec = st.fixed_dictionaries(
        {"volumes": st.just([{"name": "data", "emptyDir": {}}])},
        optional={
            "containers": containers(own),
            "hostNetwork": st.booleans(),
            "dnsPolicy": st.sampled_from(["Default", "ClusterFirst"]),
            "nodeSelector": st.dictionaries(st.sampled_from(["a", "b"]), st.just("c")),
            "tolerations": st.just([{"operator": "Exists"}]),
            "securityContext": st.fixed_dictionaries({}, optional={"runAsNonRoot": st.booleans()}),
            "priorityClassName": st.just("high"),
        },
    )
    labels = st.dictionaries(st.sampled_from(["a", "b"]), st.just("c"))
    metadata = st.fixed_dictionaries({}, optional={"labels": labels, "annotations": labels})
    return st.fixed_dictionaries({}, optional={"metadata": metadata, "spec": spec})


def owned(template):
    """The parts of a pod template that no manifest may change, as text."""
    spec, labels = template["spec"], template["metadata"]["labels"]
    pod = ("serviceAccountName", "automountServiceAccountToken", "shareProcessNamespace", "enableServiceLinks")
    fields = ("image", "imagePullPolicy", "command", "ports", "readinessProbe", "livenessProbe", "lifecycle")
    found = {field: spec.get(field) for field in (*pod, "terminationGracePeriodSeconds")}
    found["labels"] = {key: labels[key] for key in labels if key.startswith("rayloom.dev/") and "host-" not in key}
    found["volumes"] = [each for each in spec["volumes"] if each["name"] in OWN_VOLUMES]
    found["tolerations"] = spec["tolerations"][:2]
    for place, container in enumerate(each for each in spec["containers"] if each["name"] in OWN_CONTAINERS):
        assert spec["containers"][place] == container  # the operator's containers come first
        found[container["name"]] = {
            **{field: container.get(field) for field in fields},
            "resources": container["resources"] if container["name"] == "ray-worker" else None,
            "mounts": [each for each in container["volumeMounts"] if each["mountPath"] in OWN_FOLDERS],
            "env": [each for each in container["env"] if is_reserved(each["name"]) and each.get("value") != ""],
        }
    return json.dumps(found, sort_keys=True)


PLAIN = tuple(owned(template) for template in templates(make_resolved()))


@given(pod_templates(HEAD_CONTAINERS), pod_templates(WORKER_CONTAINERS))
def test_no_template_changes_a_field_that_the_operator_owns(head, worker):
    assert tuple(owned(template) for template in build(head, worker)) == PLAIN

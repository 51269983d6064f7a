"""`spec.podTemplate`: pods with a template, the stored spec, the revision, and fields that no template changes."""

import json
import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_operator.api.adapters import MAX_PLACES
from rayloom_operator.api.manifest import load_service
from rayloom_operator.api.pod_template.reserved_env import RESERVED_NAMES, is_reserved
from rayloom_operator.api.pod_template.reserved_parts import (
    ADAPTER_VOLUMES,
    ADAPTERS_FOLDER,
    HEAD_CONTAINERS,
    OWN_CONTAINERS,
    OWN_FOLDERS,
    OWN_VOLUMES,
    WORKER_CONTAINERS,
)
from rayloom_operator.api.shipped_facts import builtin_facts
from rayloom_operator.api.spec import parse
from rayloom_operator.objects.inspect_job import inspect_job
from rayloom_operator.objects.old_spec import old_spec, resolved_of
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.resolve.resolved import Hub, resolve
from rayloom_operator.resolve.revision import revision
from rt_operator import make_resolved, make_service
from rt_shapes import LLAMA31_8B

EXAMPLES = Path(__file__).parents[2] / "examples"
HUB = Hub(endpoint="https://mirror", ca_config_map="ca")
REVISION = "00000000"
DOCUMENT = {"metadata": {"name": "chat", "namespace": "team", "uid": "uid-1"}}
# Revisions of the examples, computed with the last version without pod templates.
REVISIONS = {
    "private-hub-model.yaml": "beb61b51",
    "pvc-model.yaml": "a81006c6",
    "qwen2.5-72b-tp8-pp2.yaml": "664a7527",
    "qwen3-8b-gpu.yaml": "56a99ffd",
    "smollm2-pp2.yaml": "d75c983a",
    "smollm2-tp3.yaml": "04183dea",
    "smollm2-two-replicas.yaml": "4a4dc1f7",
    "smollm2.yaml": "5584056f",
}


def templates(resolved):
    """The pod templates in the RayCluster: head, worker."""
    spec = ray_cluster(resolved, REVISION)["spec"]
    (workers,) = spec["workerGroupSpecs"]
    return spec["headGroupSpec"]["template"], workers["template"]


def build(head=None, worker=None, **spec):
    given_templates = {"head": head or {}, "worker": worker or {}}
    return templates(make_resolved(podTemplate=given_templates, **spec))


def by_name(template, kind="containers"):
    return {each["name"]: each for each in template["spec"].get(kind, ())}


def variables(container):
    assert len({each["name"] for each in container["env"]}) == len(container["env"])
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def test_pods_without_a_template_are_unchanged():
    plain = templates(make_resolved())

    assert build() == plain
    assert build(head={"metadata": {}, "spec": {}}, worker={"spec": {"containers": []}}) == plain


def test_head_and_worker_have_templates_of_their_own():
    head, worker = build(
        head={"metadata": {"annotations": {"sidecar.istio.io/inject": "false"}}, "spec": {"priorityClassName": "high"}},
        worker={"metadata": {"labels": {"team": "a"}}, "spec": {"runtimeClassName": "nvidia"}},
    )

    # The operator's annotation, which replaces KubeRay's command for the head, stays.
    assert head["metadata"]["annotations"] == {
        "ray.io/overwrite-container-cmd": "true",
        "sidecar.istio.io/inject": "false",
    }
    assert (head["spec"]["priorityClassName"], "runtimeClassName" in head["spec"]) == ("high", False)
    assert (worker["spec"]["runtimeClassName"], "priorityClassName" in worker["spec"]) == ("nvidia", False)
    assert worker["metadata"]["labels"]["team"] == "a"
    assert worker["metadata"]["labels"]["rayloom.dev/service"] == "chat"
    assert "team" not in head["metadata"]["labels"]


def test_own_containers_are_changed_and_others_are_added_after_them():
    head, _ = build(
        head={
            "spec": {
                "volumes": [{"name": "certificates", "secret": {"secretName": "tls"}}],
                "containers": [
                    {"name": "proxy", "image": "envoy:1", "args": ["-c", "/etc/proxy.yaml"]},
                    {
                        "name": "engine",
                        "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
                        "volumeMounts": [{"name": "certificates", "mountPath": "/certificates", "readOnly": True}],
                        "resources": {"limits": {"memory": "2Gi"}, "requests": {"cpu": "2"}},
                    },
                ],
            }
        }
    )
    found = by_name(head)

    # KubeRay treats the first container as Ray's.
    assert list(found) == ["ray-head", "engine", "proxy"]
    assert variables(found["engine"])["A"] == {"secretKeyRef": {"name": "s", "key": "k"}}
    assert {"name": "certificates", "mountPath": "/certificates", "readOnly": True} in found["engine"]["volumeMounts"]
    assert found["engine"]["resources"] == {"requests": {"cpu": "2", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
    assert found["ray-head"]["resources"] == {"requests": {"cpu": "200m", "memory": "512Mi"}}
    assert by_name(head, "volumes")["certificates"]["secret"] == {"secretName": "tls"}


def test_added_containers_have_restricted_security():
    head, _ = build(
        head={
            "spec": {
                "initContainers": [{"name": "fetch", "image": "i", "restartPolicy": "Always"}],
                "containers": [
                    {"name": "proxy", "image": "i", "securityContext": {"runAsUser": 7, "capabilities": {"add": ["A"]}}}
                ],
            }
        }
    )

    assert by_name(head, "initContainers")["fetch"]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert by_name(head)["proxy"]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": ["A"]},
        "runAsUser": 7,
    }


@pytest.mark.parametrize("security", [{"privileged": True}, {"capabilities": {"add": ["SYS_ADMIN"]}}])
def test_privileges_that_need_privilege_escalation_allow_it(security):
    containers = [
        {"name": "engine", "securityContext": security},
        {"name": "x", "image": "i", "securityContext": security},
    ]
    head, _ = build(head={"spec": {"containers": containers}})
    found = {name: each["securityContext"]["allowPrivilegeEscalation"] for name, each in by_name(head).items()}

    assert found == {"ray-head": False, "engine": True, "x": True}


def test_a_variable_of_the_template_overrides_that_of_the_engine():
    head, worker = build(
        head={"spec": {"containers": [{"name": "engine", "env": [{"name": "A", "value": "template"}]}]}},
        engine={"env": [{"name": "A", "value": "engine"}]},
    )

    assert variables(by_name(head)["engine"])["A"] == "template"
    assert variables(by_name(head)["ray-head"])["A"] == variables(by_name(worker)["ray-worker"])["A"] == "engine"


def test_env_from_cannot_set_a_reserved_variable():
    source = [{"secretRef": {"name": "anything"}}]
    head, worker = build(
        head={"spec": {"containers": [{"name": name, "envFrom": source} for name in HEAD_CONTAINERS]}},
        worker={"spec": {"containers": [{"name": "ray-worker", "envFrom": source}]}},
        model={"source": "hf://a/b", "tokenSecretRef": {"name": "hub", "key": "token"}},
    )
    # KubeRay sets these variables in Ray's containers. An empty RAY_REDIS_ADDRESS would enable Redis.
    of_kuberay = {"FQ_RAY_IP", "KUBERAY_GEN_RAY_START_CMD", "RAY_ADDRESS", "RAY_IP", "RAY_PORT"}
    for container in (*by_name(head).values(), *by_name(worker).values()):
        found = variables(container)
        set_later = of_kuberay if container["name"] != "engine" else set()
        assert set(RESERVED_NAMES) - {"RAY_REDIS_ADDRESS"} - set_later <= found.keys()
        assert found["RAY_AUTH_MODE"] == "token"
        assert found["RAY_AUTH_TOKEN"]["secretKeyRef"]["key"] == "auth_token"
        assert not set_later & found.keys()
    assert variables(by_name(head)["engine"])["RAY_ADDRESS"] == "127.0.0.1:6379"
    # The token is sent to the hub, even if the ConfigMap has another HF_ENDPOINT.
    assert variables(by_name(worker)["ray-worker"])["HF_ENDPOINT"] == "https://huggingface.co"


def test_pods_in_the_nodes_network_are_alone_on_their_node_in_all_namespaces():
    wanted = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}}
    rule = "requiredDuringSchedulingIgnoredDuringExecution"
    head, worker = build(worker={"spec": {"hostNetwork": True, "affinity": {"podAntiAffinity": {rule: [wanted]}}}})

    assert worker["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert worker["spec"]["affinity"]["podAntiAffinity"][rule] == [
        wanted,
        {
            "topologyKey": "kubernetes.io/hostname",
            "labelSelector": {"matchLabels": {"rayloom.dev/host-network": "true"}},
            "namespaceSelector": {},
        },
    ]
    assert worker["metadata"]["labels"]["rayloom.dev/host-network"] == "true"
    assert "rayloom.dev/host-network" not in head["metadata"]["labels"]
    assert not {"dnsPolicy", "affinity", "hostNetwork"} & head["spec"].keys()


def test_the_cluster_assigns_users_if_the_manifest_asks_for_it():
    resolved = make_resolved(podTemplate={"user": "Cluster"})
    job = inspect_job(resolved.service, "image", Hub(), 0)["spec"]["template"]

    for template in (*templates(resolved), job):
        assert template["spec"]["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }


def test_the_inspection_has_the_template_of_the_engine_without_sidecars():
    head = {
        "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}},
        "spec": {
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "imagePullSecrets": [{"name": "registry"}],
            "runtimeClassName": "nvidia",
            "hostNetwork": True,
            "securityContext": {"supplementalGroups": [7]},
            "volumes": [
                {"name": "ca", "configMap": {"name": "ca"}},
                {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
            ],
            "containers": [
                {"name": "proxy", "image": "i"},
                {
                    "name": "engine",
                    "env": [{"name": "HTTPS_PROXY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
                    "envFrom": [{"configMapRef": {"name": "more"}}],
                    "resources": {"limits": {"memory": "9Gi"}},
                    "volumeMounts": [
                        {"name": "ca", "mountPath": "/ca"},
                        {"name": "data", "mountPath": "/data"},
                    ],
                },
            ],
        },
    }
    service = make_service(model={"source": "hf://a/b"}, podTemplate={"head": head})
    plain = inspect_job(make_service(model={"source": "hf://a/b"}), "image", Hub(), 0)["spec"]["template"]
    found = inspect_job(service, "image", Hub(), 0)["spec"]["template"]
    (container,) = found["spec"]["containers"]

    assert found["metadata"] == plain["metadata"]
    assert not {"runtimeClassName", "hostNetwork", "affinity"} & found["spec"].keys()
    assert found["spec"]["nodeSelector"] == {"pool": "gpu"}
    assert found["spec"]["tolerations"][-1] == {"key": "gpu", "operator": "Exists"}
    assert found["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert found["spec"]["securityContext"]["supplementalGroups"] == [7]
    assert [each["name"] for each in found["spec"]["volumes"]] == ["scratch", "ca"]
    assert [each["mountPath"] for each in container["volumeMounts"]] == ["/tmp", "/ca"]
    assert variables(container)["HTTPS_PROXY"]["secretKeyRef"] == {"name": "s", "key": "k"}
    assert variables(container)["RAY_AUTH_MODE"] == "" and container["envFrom"]
    assert container["resources"] == plain["spec"]["containers"][0]["resources"]


@pytest.mark.parametrize(("name", "before"), REVISIONS.items())
def test_objects_that_were_stored_before_pod_templates_roll_nothing(name, before):
    service = load_service(EXAMPLES / name)
    facts = builtin_facts(service.spec.model) or LLAMA31_8B.model_copy(update={"commit": "c" * 40})
    image = service.spec.engine.image or "rayloom/engine:1"

    assert revision(resolve(service, image, facts)) == before
    document = {"apiVersion": "rayloom.dev/v1alpha1", "kind": "LLMService", "metadata": {"name": service.metadata.name}}
    spec = service.spec.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    # The template holds only the defaults of the definition, or is an empty map.
    empty = {"user": "Operator", "head": {"metadata": {}, "spec": {}}, "worker": {}}
    stored = parse(document | {"spec": spec | {"podTemplate": empty}})
    assert revision(resolve(stored, image, facts)) == before


def test_a_template_is_part_of_the_revision_and_of_its_stored_spec():
    template = {"worker": {"spec": {"volumes": [{"name": "a", "emptyDir": {}}], "hostIPC": True}}}
    resolved = make_resolved(podTemplate=template)
    read = resolved_of(old_spec(resolved, revision(resolved), None), DOCUMENT, Hub())

    assert revision(resolved) != revision(make_resolved())
    assert revision(read) == revision(resolved)
    assert ray_cluster(read, REVISION) == ray_cluster(resolved, REVISION)
    other = {"worker": {"spec": {"volumes": [{"name": "a", "emptyDir": {"medium": "Memory"}}], "hostIPC": True}}}
    assert revision(make_resolved(podTemplate=other)) != revision(resolved)


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

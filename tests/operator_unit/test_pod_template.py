"""`spec.podTemplate`: pods with a template, and the pod that inspects the model.

The lists of parts that no template changes are in test_pod_template_own_parts.py, revisions in
test_pod_template_revisions.py.
"""

import pytest

from rayloom_operator.api.pod_template.reserved_env import RESERVED_NAMES
from rayloom_operator.api.pod_template.reserved_parts import HEAD_CONTAINERS
from rayloom_operator.objects.inspect_job import inspect_job
from rayloom_operator.resolve.resolved import Hub
from rt_operator import make_resolved, make_service
from rt_pod_template import build, by_name, templates, variables


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

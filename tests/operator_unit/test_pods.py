"""The manifest's settings for pods reach all pods: sources, Secrets, caches, scheduling."""

import json
from pathlib import Path

import pytest

from rayloom_operator.api.manifest import load_service
from rayloom_operator.objects.engine_config import pod_engine_config
from rayloom_operator.objects.inspect_job import inspect_job
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.resolve.resolved import Hub, resolve
from rt_operator import make_service

EXAMPLES = Path(__file__).parents[2] / "examples"
HUB = Hub(endpoint="https://mirror", ca_config_map="ca")
PRIVATE = {"source": "hf://acme/tiny", "tokenSecretRef": {"name": "hf", "key": "token"}}


def pods(hub=HUB, **spec):
    """The pod specs by name: head, worker, inspect."""
    service = make_service(**spec)
    cluster = ray_cluster(resolve(service, "image", hub=hub), "00000000")["spec"]
    (workers,) = cluster["workerGroupSpecs"]
    return {
        "head": cluster["headGroupSpec"]["template"]["spec"],
        "worker": workers["template"]["spec"],
        "inspect": inspect_job(service, "image", hub, 0)["spec"]["template"]["spec"],
    }


def readers(found):
    """The containers that read the model, by name."""
    every = {each["name"]: each for pod in found.values() for each in pod["containers"]}
    assert set(every) == {"ray-head", "engine", "ray-worker", "inspect"}
    return {name: each for name, each in every.items() if name != "ray-head"}


def variables(container):
    return {each["name"]: each for each in container["env"]}


def mounts(container):
    return {each["mountPath"]: each for each in container["volumeMounts"]}


def volume(pod, name):
    return next((each for each in pod["volumes"] if each["name"] == name), None)


def config(**spec):
    return pod_engine_config(resolve(make_service(**spec), "image"))


def test_only_containers_that_read_the_model_get_the_token():
    found = pods(model=PRIVATE)

    for container in readers(found).values():
        assert variables(container)["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hf", "key": "token"}
    (ray,) = [each for each in found["head"]["containers"] if each["name"] == "ray-head"]
    assert "HF_TOKEN" not in variables(ray)


def test_a_mirror_and_its_certificates_are_for_models_of_the_hub():
    for container in readers(pods(model={"source": "hf://acme/tiny"})).values():
        assert variables(container)["HF_ENDPOINT"]["value"] == "https://mirror"
        path = variables(container)["SSL_CERT_FILE"]["value"]
        assert mounts(container)[path.removesuffix("/ca.crt")]["readOnly"] is True
    for pod in pods(model={"source": "hf://acme/tiny"}).values():
        assert volume(pod, "hub-ca")["configMap"] == {"name": "ca"}
    for container in readers(pods(model={"source": "builtin://smollm2-135m"})).values():
        assert not {"HF_ENDPOINT", "SSL_CERT_FILE"} & set(variables(container))


def test_the_manifests_own_variable_wins():
    found = pods(model=PRIVATE, engine={"env": [{"name": "HF_ENDPOINT", "value": "https://other"}]})

    for container in readers(found).values():
        assert variables(container)["HF_ENDPOINT"] == {"name": "HF_ENDPOINT", "value": "https://other"}
        assert len(variables(container)) == len(container["env"])


@pytest.mark.parametrize(
    ("cache", "place"),
    [
        ({"persistentVolumeClaim": "models"}, {"persistentVolumeClaim": {"claimName": "models"}}),
        ({"hostPath": "/var/models"}, {"hostPath": {"path": "/var/models", "type": "Directory"}}),
    ],
)
def test_a_cache_is_where_ranks_fetch_to_and_no_part_of_the_inspection(cache, place):
    found = pods(model={"source": "hf://acme/tiny", "cache": cache})

    for name in ("head", "worker"):
        assert volume(found[name], "model-cache") == {"name": "model-cache", **place}
    for name in ("engine", "ray-worker"):
        container = readers(found)[name]
        folder = variables(container)["HF_HUB_CACHE"]["value"].rsplit("/", 1)[0]
        assert "readOnly" not in mounts(container)[folder]
    assert volume(found["inspect"], "model-cache") is None
    assert "HF_HUB_CACHE" not in variables(readers(found)["inspect"])


@pytest.mark.parametrize(
    ("source", "path"),
    [("pvc://claim", "file:///models"), ("pvc://claim/", "file:///models"), ("pvc://claim/a/b", "file:///models/a/b")],
)
def test_a_claim_is_mounted_read_only_at_the_engines_path(source, path):
    found = pods(model={"source": source})

    assert config(model={"source": source})["model"] == path
    assert path in readers(found)["inspect"]["command"]
    for container in readers(found).values():
        assert mounts(container)["/models"] == {"name": "model", "mountPath": "/models", "readOnly": True}
    for pod in found.values():
        assert volume(pod, "model")["persistentVolumeClaim"] == {"claimName": "claim"}


@pytest.mark.parametrize("source", ["file:///models/m.gguf", "pvc://claim/m.gguf"])
def test_a_gguf_file_is_converted_where_a_pod_may_write(source):
    for container in readers(pods(model={"source": source})).values():
        path = variables(container)["RAYLOOM_CACHE"]["value"]
        assert any(
            path.startswith(f"{folder}/") for folder, each in mounts(container).items() if "readOnly" not in each
        )
    for container in readers(pods(model={"source": "builtin://smollm2-135m"})).values():
        assert "RAYLOOM_CACHE" not in variables(container)


def test_api_keys_are_a_file_of_the_engine_and_of_nobody_else():
    auth = {"apiKeySecretRef": {"name": "keys", "key": "api-keys"}}
    found = pods(auth=auth)
    folder, _, name = config(auth=auth)["api_key_file"].rpartition("/")

    assert mounts(readers(found)["engine"])[folder]["readOnly"] is True
    items = [{"key": "api-keys", "path": name}]
    assert volume(found["head"], "api-keys")["secret"] == {"secretName": "keys", "items": items}
    assert "keys" not in json.dumps([found["worker"], found["inspect"]])
    assert "api_key_file" not in config()


def test_every_pod_goes_where_it_may_and_pulls_its_image():
    toleration = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
    found = pods(
        scheduling={"nodeSelector": {"pool": "gpu"}, "tolerations": [toleration], "priorityClassName": "high"},
        engine={"imagePullSecrets": [{"name": "registry"}]},
    )

    for pod in found.values():
        assert pod["nodeSelector"] == {"pool": "gpu"}
        assert pod["tolerations"][-1] == toleration and len(pod["tolerations"]) == 3
        assert pod["priorityClassName"] == "high"
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
    for pod in pods().values():
        assert not {"nodeSelector", "priorityClassName", "imagePullSecrets"} & set(pod)


def test_the_job_is_as_restricted_as_an_engine_and_ends_once():
    job = inspect_job(make_service(model=PRIVATE), "image", HUB, 0)["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]

    assert (job["backoffLimit"], pod["restartPolicy"]) == (0, "Never")
    assert (pod["securityContext"]["runAsNonRoot"], pod["automountServiceAccountToken"]) == (True, False)
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert variables(container)["RAYLOOM_TERMINATION_LOG"]["value"] == "/dev/termination-log"
    assert {next(iter(each.keys() - {"name"})) for each in pod["volumes"]} == {"emptyDir", "configMap"}


@pytest.mark.parametrize("name", ["private-hub-model", "pvc-model"])
def test_the_examples_of_sources_make_pods(name):
    service = load_service(EXAMPLES / f"{name}.yaml")

    assert inspect_job(service, "image", HUB, 0)["metadata"]["name"].startswith(f"{service.metadata.name}-inspect-")
    assert ray_cluster(resolve(service, "image"), "00000000")["kind"] == "RayCluster"


@pytest.mark.parametrize(
    ("limits", "resources"),
    [
        ({"memory": "9Gi"}, {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "2Gi"}}),
        (
            {"cpu": "2", "memory": "9Gi", "ephemeral-storage": "1Gi"},
            {
                "requests": {"cpu": "100m", "memory": "128Mi"},
                "limits": {"cpu": "2", "memory": "2Gi", "ephemeral-storage": "1Gi"},
            },
        ),
        ({"cpu": "50m"}, {"requests": {"memory": "128Mi"}, "limits": {"cpu": "50m", "memory": "2Gi"}}),
    ],
)
def test_the_inspection_has_the_limits_that_a_quota_demands(limits, resources):
    template = {"head": {"spec": {"containers": [{"name": "engine", "resources": {"limits": limits}}]}}}

    (container,) = pods(model=PRIVATE, podTemplate=template)["inspect"]["containers"]

    assert container["resources"] == resources


def test_a_spread_has_no_label_in_its_selector_that_is_in_its_match_label_keys():
    """Kubernetes would refuse the pods."""
    constraint = {
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "maxSkew": 2,
        "labelSelector": {"matchLabels": {"rayloom.dev/service": "chat"}},
        "matchLabelKeys": ["ray.io/cluster"],
    }
    template = {"worker": {"spec": {"topologySpreadConstraints": [constraint]}}}

    (spread,) = pods(podTemplate=template)["worker"]["topologySpreadConstraints"]

    selector = {"matchLabels": {"ray.io/node-type": "worker", "rayloom.dev/service": "chat"}}
    assert spread == constraint | {"labelSelector": selector}

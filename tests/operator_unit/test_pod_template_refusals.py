"""Fields that `spec.podTemplate` may not change, and messages that tell users what to do."""

import pytest

from rayloom_operator.errors import SpecError
from rayloom_operator.objects.ray_cluster import ray_cluster
from rt_operator import make_resolved, make_service

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def problem(**spec):
    with pytest.raises(SpecError) as refused:
        make_service(**spec)
    (found,) = refused.value.problems
    return found


def of_head(**spec):
    return problem(podTemplate={"head": {"spec": spec}})


def of_container(name, **fields):
    pod = "worker" if name == "ray-worker" else "head"
    return problem(podTemplate={pod: {"spec": {"containers": [{"name": name, **fields}]}}})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"terminationGracePeriodSeconds": 5},
            "terminationGracePeriodSeconds is the operator's own: use spec.drainSeconds",
        ),
        ({"serviceAccountName": "admin"}, "pods use the account NAME-rayloom"),
        ({"hostPID": True, "hostname": "a"}, "hostPID is the operator's own"),
        ({"runtimeClas": "nvidia"}, "is not a field; did you mean runtimeClassName?"),
        ({"zzz": 1}, "Fields here: runtimeClassName, nodeSelector, affinity, tolerations"),
        ({"volumes": [{"name": "config", "emptyDir": {}}]}, "config: volumes cannot have a name of the operator's own"),
        ({"volumes": [{"name": "a"}]}, "volume a has no kind: give exactly one"),
        (
            {"volumes": [{"name": "a", "emptyDir": {}, "secret": {}}]},
            "volume a has emptyDir and secret: give exactly one",
        ),
        ({"volumes": [{"name": "a", "emptyDir": 7}]}, "emptyDir of volume a must be a map"),
        ({"volumes": [{"name": "a", "emptyDir": {}}] * 2}, "a is given more than once in volumes"),
        ({"containers": [{"name": "ray-worker"}]}, "the operator's own there are ray-head and engine"),
        ({"containers": [{"name": "x"}]}, "x: a container of your own needs an image"),
        ({"initContainers": [{"name": "x"}]}, "x: each needs an image"),
        (
            {"initContainers": [{"name": "engine", "image": "i"}]},
            "initContainers cannot have a name of the operator's own",
        ),
        (
            {"affinity": {"nodeAffinity": {_REQUIRED: {"a": {"b": None}}}}},
            "a.b is empty; give it a value, or remove it",
        ),
        (
            {"affinity": {"podAffinity": {"a": []}}},
            "a: is not a field; remove it. Fields here: requiredDuring",
        ),
        ({"affinity": {"nodeAffinity": {_REQUIRED: []}}}, "[] is not allowed; this must be a map"),
        ({"affinity": {"nodeAffinity": {_PREFERRED: 5}}}, "5 is not allowed; this must be a list"),
        ({"affinity": {"podAffinity": {_REQUIRED: {"a": 1}}}}, "this must be a list"),
        (
            {"affinity": {"podAntiAffinity": {_REQUIRED: 5}}, "hostNetwork": True},
            "5 is not allowed; this must be a list",
        ),
        ({"affinity": {"podAntiAffinity": {_REQUIRED: "x"}}}, "'x' is not allowed; this must be a list"),
        ({"affinity": {"podAntiAffinity": {_PREFERRED: [5]}}}, "5 is not allowed; this must be a map"),
        ({"securityContext": {"windowsOptions": {"hostProcess": True}}}, "windowsOptions: is not a field"),
        ({"shareProcessNamespace": False}, "shareProcessNamespace is the operator's own"),
        ({"automountServiceAccountToken": True}, "use a projected volume with a serviceAccountToken"),
        ({"hostNetwork": "true"}, "'true' is not allowed; this must be true or false"),
        ({"securityContext": {"runAsUser": "1000"}}, "'1000' is not allowed; this must be a whole number"),
        ({"securityContext": {"runAsUser": -1}}, "-1 is too small; use 0 or more"),
    ],
)
def test_owned_fields_of_a_pod_are_refused_with_the_cure(fields, sentence):
    found = of_head(**fields)

    assert found.startswith("spec.podTemplate.head.spec")
    assert sentence in found


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        ("engine", {"image": "mine"}, "the operator's own: use spec.engine.image"),
        ("ray-head", {"command": ["sh"]}, "use spec.engine.args for settings of the engine"),
        ("engine", {"livenessProbe": {}}, "use spec.recovery"),
        ("ray-worker", {"lifecycle": {}}, "use spec.drainSeconds for how long a pod may take to end"),
        ("engine", {"ports": []}, "add a container of your own for another port"),
        ("ray-worker", {"resources": {"requests": {"cpu": "1"}}}, "use spec.engine.resources"),
        ("engine", {"env": [{"name": "RAY_AUTH_TOKEN", "value": "x"}]}, "the operator sets this variable itself"),
        ("ray-head", {"env": [{"name": "KUBERAY_X", "valueFrom": {}}]}, "the operator sets this variable itself"),
        ("engine", {"env": [{"name": "A", "value": "1", "valueFrom": {}}]}, "give either value or valueFrom"),
        (
            "engine",
            {"volumeMounts": [{"name": "none", "mountPath": "/x"}]},
            "none of container engine: each volumeMounts",
        ),
        ("x", {"image": "i", "volumeMounts": [{"name": "config", "mountPath": "/x"}]}, "add a volume of your own"),
        ("engine", {"securityContext": {"capabilities": {"drop": []}}}, "drop: is not a field"),
    ],
)
def test_owned_fields_of_a_container_are_refused_with_the_cure(name, fields, sentence):
    assert sentence in of_container(name, **fields)


@pytest.mark.parametrize(
    ("path", "is_taken"),
    [
        ("/tmp", True),
        ("/tmp/", True),
        ("//tmp/../tmp", True),
        ("/", True),
        ("/etc", True),
        ("/dev", True),
        ("/dev/shm", True),
        ("/etc/rayloom/config.json", True),
        ("/etc/rayloom-ca/x", True),
        ("/tmp/mine", False),
        ("/cache/mine", False),
        ("/etc/rayloom2", False),
        ("/dev/infiniband", False),
    ],
)
def test_a_mount_over_a_folder_of_the_operator_is_refused(path, is_taken):
    part = {
        "volumes": [{"name": "a", "emptyDir": {}}],
        "containers": [{"name": "engine", "volumeMounts": [{"name": "a", "mountPath": path}]}],
    }
    if is_taken:
        assert "use another mountPath" in of_head(**part)
    else:
        built = ray_cluster(make_resolved(podTemplate={"head": {"spec": part}}), "00000000")
        containers = built["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
        engine = next(each for each in containers if each["name"] == "engine")
        assert {"name": "a", "mountPath": path} in engine["volumeMounts"]


@pytest.mark.parametrize("path", ["/models-of-mine/llama", "/models-of-mine/"])
def test_a_mount_over_the_model_of_a_file_source_is_refused(path):
    part = {
        "volumes": [{"name": "a", "emptyDir": {}}],
        "containers": [{"name": "ray-worker", "volumeMounts": [{"name": "a", "mountPath": path}]}],
    }
    found = problem(model={"source": "file:///models-of-mine/llama"}, podTemplate={"worker": {"spec": part}})

    assert f"{path}: this mountPath of container ray-worker hides the model" in found


def test_accelerators_in_the_head_pod_are_refused():
    limits = {"containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}
    found = problem(accelerator={"memory": "80Gi"}, podTemplate={"head": {"spec": limits}})

    assert "nvidia.com/gpu of podTemplate.head: accelerators are for the ranks" in found


@pytest.mark.parametrize(
    ("kind", "key", "sentence"),
    [
        ("labels", "rayloom.dev/route", "use another key"),
        ("labels", "app.kubernetes.io/name", "use another key"),
        ("annotations", "ray.io/overwrite-container-cmd", "use another key"),
        ("labels", "a b", "'a b' is not a key of a label or annotation"),
        ("annotations", "a/b/c", "'a/b/c' is not a key of a label or annotation"),
    ],
)
def test_labels_and_annotations_of_the_operator_are_refused(kind, key, sentence):
    assert sentence in problem(podTemplate={"head": {"metadata": {kind: {key: "x"}}}})

"""The objects of a service: the fields on which a cluster depends."""

import base64
import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rayloom_operator.objects.companions import (
    admin_secret,
    admin_token,
    client_service,
    config_map,
    endpoint,
    service_account,
)
from rayloom_operator.objects.ray_cluster import RAY_VERSION, ray_cluster
from rayloom_operator.resolve.revision import revision
from rt_operator import make_resolved, make_service

ROOT = Path(__file__).resolve().parents[2]
REVISION = "00000000"


def build(**spec):
    return ray_cluster(make_resolved(**spec), REVISION)["spec"]


def pod_specs(spec):
    (workers,) = spec["workerGroupSpecs"]
    return spec["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]


def containers(**spec):
    """The containers by name: ray-head, engine, ray-worker."""
    return {each["name"]: each for part in pod_specs(build(**spec)) for each in part["containers"]}


def values(container):
    return {each["name"]: each.get("value") for each in container["env"]}


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("rayloom/engine:0.1.0", "0.1.0"),
        ("registry.example.com:5000/team/engine:v2_rc-1", "v2_rc-1"),
        ("registry.example.com:5000/team/engine:1.0@sha256:" + "a" * 64, "1.0"),
        ("registry.example.com:5000/team/engine", None),
        ("engine@sha256:" + "a" * 64, None),
        ("engine:" + "x" * 64, None),
        ("engine:1.0-", None),
    ],
)
def test_pods_have_the_labels_that_tools_show(image, version):
    resolved = make_resolved(image=image)
    spec = ray_cluster(resolved, REVISION)["spec"]
    (workers,) = spec["workerGroupSpecs"]
    expected = {"instance": "chat", "component": "engine", "part-of": "rayloom", "name": "rayloom-engine"}
    expected |= {} if version is None else {"version": version}

    for template in (spec["headGroupSpec"]["template"], workers["template"]):
        found = {
            name.removeprefix("app.kubernetes.io/"): value
            for name, value in template["metadata"]["labels"].items()
            if name.startswith("app.kubernetes.io/")
        }
        assert found == expected | {"managed-by": "rayloom-operator"}


def test_one_worker_pod_for_each_stage_and_none_of_its_ranks_on_the_head():
    spec = build(parallelism={"pipeline": 3})
    (workers,) = spec["workerGroupSpecs"]

    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (3, 3, 3)
    assert workers["rayStartParams"]["num-cpus"] == "1"
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert all(isinstance(value, str) for value in workers["rayStartParams"].values())


def test_the_ranks_of_a_stage_share_a_pod_that_has_room_for_them():
    spec = build(parallelism={"tensor": 3, "pipeline": 2})
    (workers,) = spec["workerGroupSpecs"]

    assert (workers["replicas"], workers["rayStartParams"]["num-cpus"]) == (2, "3")
    (worker,) = workers["template"]["spec"]["containers"]
    assert worker["resources"] == {"requests": {"cpu": "1500m", "memory": "3Gi"}}


def test_ray_is_the_first_container_of_the_head_and_the_engine_the_second():
    head, worker = pod_specs(build())

    assert [each["name"] for each in head["containers"]] == ["ray-head", "engine"]
    assert [each["name"] for each in worker["containers"]] == ["ray-worker"]
    assert head["shareProcessNamespace"] is True
    # In a shared process namespace, process 1 is the pause program. A process 1 without a handler ignores SIGTERM.
    assert worker["shareProcessNamespace"] is True


def test_pods_keep_to_restricted_security():
    for pod in pod_specs(build()):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert {next(iter(volume.keys() - {"name"})) for volume in pod["volumes"]} <= {"emptyDir", "projected"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_every_mount_has_its_volume_and_ray_is_shared_in_the_head():
    for pod in pod_specs(build(model={"source": "file:///models/m"})):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert set(mounts.values()) <= volumes
            assert mounts["/tmp/ray"] == "ray"
            assert mounts["/dev/shm"] == "shared-memory"
            assert "/tmp" in mounts


def test_the_engine_waits_longer_for_rays_head_than_ray_itself():
    name = "RAY_gcs_rpc_server_reconnect_timeout_s"
    found = containers()

    assert values(found["engine"])[name] == "60"
    assert values(found["ray-head"])[name] == values(found["ray-worker"])[name] == "5"
    assert values(found["engine"])["RAY_ADDRESS"] == "127.0.0.1:6379"
    assert values(found["engine"])["RAYLOOM_TERMINATION_LOG"] == "/dev/termination-log"


def test_ranks_get_cpu_time_like_other_processes_of_the_node():
    assert values(containers()["ray-worker"])["RAY_worker_niceness"] == "0"


def test_every_ray_node_starts_without_agents():
    found = containers()
    assert {values(found[name]).get("RAYLOOM_LEAN_RAY") for name in ("ray-head", "ray-worker")} == {"1"}


def before_the_end(container):
    return container["lifecycle"]["preStop"]["exec"]["command"]


def test_rays_head_stays_until_the_engine_has_ended(tmp_path):
    found = containers()
    named = values(found["engine"])["RAYLOOM_ALIVE_FILE"]
    shell, option, script = before_the_end(found["ray-head"])
    assert named in script
    wait = [shell, option, script.replace(named, str(tmp_path / "alive"))]

    subprocess.run(wait, check=True, timeout=60)  # Ray was never started, or has ended in order
    engine = subprocess.Popen(["sleep", "600"])
    try:
        (tmp_path / "alive").write_text(str(engine.pid))
        head = subprocess.Popen(wait)
        with pytest.raises(subprocess.TimeoutExpired):
            head.wait(0.5)
    finally:
        engine.kill()
        engine.wait()
    assert head.wait(60) == 0  # also if the engine was killed and could not remove its file


def test_rays_head_stays_as_long_as_the_file_of_an_engine_that_wrote_nothing_into_it(tmp_path):
    found, file = containers(), tmp_path / "alive"
    shell, option, script = before_the_end(found["ray-head"])
    file.touch()

    head = subprocess.Popen([shell, option, script.replace(values(found["engine"])["RAYLOOM_ALIVE_FILE"], str(file))])

    with pytest.raises(subprocess.TimeoutExpired):
        head.wait(0.5)
    file.unlink()
    assert head.wait(60) == 0


@pytest.mark.parametrize(
    ("ran", "starts"),
    [
        ("10 10 0", 3),  # the third start ends at once
        ("300 100 150 250", 4),  # the first of four ends is 500 s ago
        ("10 100 300 190", 4),  # 590 s ago
        ("10 100 300 210 100 0", 6),  # 610 s ago, so Ray starts again; the last start ends at once
    ],
)
def test_rays_head_is_started_again_in_its_container_unless_it_ends_at_once_or_too_often(ran, starts):
    command = containers()["ray-head"]["command"]
    ray = f'n=$((n + 1)); echo "start $n"; ran=({ran} 0); SECONDS=$((SECONDS + ${{ran[n - 1]}})); (exit 7)'

    done = subprocess.run(command, env={**os.environ, "KUBERAY_GEN_RAY_START_CMD": ray}, capture_output=True, text=True)

    assert (done.stdout.split("\n")[:-1], done.returncode) == ([f"start {n + 1}" for n in range(starts)], 1)
    *again, last = [line for line in done.stderr.splitlines() if line.startswith("Ray")]
    assert again == ["Ray's head has ended with exit code 7 and is started again"] * (starts - 1)
    assert "exit code 7" in last


def test_pods_have_the_drain_and_a_little_more_to_end():
    head, worker = pod_specs(build(drainSeconds=100))

    assert head["terminationGracePeriodSeconds"] == worker["terminationGracePeriodSeconds"] == 115
    found = containers()
    # The engine's container waits, because nodes need a moment to stop sending requests to the pod. The ranks stay
    # while the engine drains.
    assert before_the_end(found["engine"]) == ["sleep", "2"]
    assert before_the_end(found["ray-worker"])[:3] == ["python3", "-m", "rayloom_engine.linger"]


def test_every_container_of_ray_has_the_token_of_its_cluster():
    for container in containers().values():
        (token,) = [each for each in container["env"] if each["name"] == "RAY_AUTH_TOKEN"]
        assert token["valueFrom"]["secretKeyRef"] == {"name": "chat-00000000-0", "key": "auth_token"}
        assert values(container)["RAY_AUTH_MODE"] == "token"


def test_probes_are_our_own_and_loading_is_no_reason_to_kill():
    found = containers()

    assert found["engine"]["readinessProbe"]["httpGet"] == {"path": "/ready", "port": 8000}
    assert "livenessProbe" not in found["engine"]
    # While Ray's head restarts, requests wait in the engine.
    assert found["ray-head"]["readinessProbe"]["tcpSocket"] == {"port": 8000}
    assert found["ray-head"]["livenessProbe"]["tcpSocket"] == {"port": 6379}
    assert found["ray-worker"]["readinessProbe"]["tcpSocket"] == {"port": 6380}
    # KubeRay adds its own probes to containers without a liveness or readiness probe.
    assert "livenessProbe" in found["ray-head"] and "livenessProbe" in found["ray-worker"]


def test_a_file_model_is_mounted_read_only_where_it_is_on_the_node():
    for pod in pod_specs(build(model={"source": "file:///models/m/"})):
        assert {"name": "model", "hostPath": {"path": "/models/m", "type": "Directory"}} in pod["volumes"]
    found = containers(model={"source": "file:///models/m/"})

    mount = {"name": "model", "mountPath": "/models/m", "readOnly": True}
    assert mount in found["engine"]["volumeMounts"]
    assert mount in found["ray-worker"]["volumeMounts"]
    assert mount not in found["ray-head"]["volumeMounts"]


@pytest.mark.parametrize(
    ("given", "resources"),
    [
        ({}, {"requests": {"cpu": "500m", "memory": "1Gi"}}),
        ({"requests": {"cpu": "2"}}, {"requests": {"cpu": "2", "memory": "1Gi"}}),
        ({"limits": {"memory": "2Gi"}}, {"requests": {"cpu": "500m"}, "limits": {"memory": "2Gi"}}),
    ],
)
def test_resources_of_a_worker_pod(given, resources):
    assert containers(engine={"resources": given})["ray-worker"]["resources"] == resources


def test_the_manifests_variables_reach_engine_and_ranks():
    found = containers(engine={"env": [{"name": "HF_ENDPOINT", "value": "http://hub"}]})

    assert {values(each)["HF_ENDPOINT"] for each in found.values()} == {"http://hub"}


def test_a_variable_of_the_manifest_replaces_ours_and_no_name_is_there_twice():
    name = "RAY_gcs_rpc_server_reconnect_timeout_s"
    for container in containers(engine={"env": [{"name": name, "value": "9"}]}).values():
        assert values(container)[name] == "9"
        assert len(values(container)) == len(container["env"])


def test_the_service_selects_only_pods_that_are_routed_to():
    resolved = make_resolved()
    service = resolved.service
    manifest = client_service(service)

    assert manifest["spec"]["selector"] == {"rayloom.dev/service": "chat", "rayloom.dev/route": "true"}
    assert "rayloom.dev/route" not in json.dumps(ray_cluster(resolved, REVISION))
    assert endpoint(service) == "http://chat.team.svc:8000"


def every_object(resolved):
    service = resolved.service
    return [
        service_account(service),
        client_service(service),
        config_map(resolved, REVISION),
        admin_secret(service, REVISION, b"k"),
        ray_cluster(resolved, REVISION),
    ]


HASH_ORDER = """
import hashlib, json
from rt_operator import make_resolved
from rayloom_operator.objects.ray_cluster import ray_cluster
resolved = make_resolved(engine={"env": [{"name": "B", "value": "1"}, {"name": "A", "value": "2"}]})
print(hashlib.sha256(json.dumps(ray_cluster(resolved, "0")).encode()).hexdigest())
"""


def test_equal_services_give_equal_bytes_in_every_process():
    digests = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        run = [sys.executable, "-c", HASH_ORDER]
        done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=60, check=True)
        digests.add(done.stdout)

    assert len(digests) == 1


def test_a_service_is_left_as_it_is():
    service = make_resolved(parallelism={"pipeline": 2}, engine={"resources": {"limits": {"cpu": "1"}}})
    before = copy.deepcopy(service)
    every_object(service)

    assert service == before


def test_every_object_goes_with_its_service():
    for manifest in every_object(make_resolved()):
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("LLMService", "chat", "uid-1")
        assert manifest["metadata"]["namespace"] == "team"


def test_the_account_of_the_pods_has_a_name_of_its_own():
    account = service_account(make_service("default"))["metadata"]["name"]

    assert account == "default-rayloom"
    assert {pod["serviceAccountName"] for pod in pod_specs(build())} == {"chat-rayloom"}


def test_the_admin_token_is_another_for_another_key_service_or_group():
    token = base64.b64decode(admin_secret(make_service(), REVISION, b"key")["data"]["token"]).decode()

    assert token == admin_token(b"key", "team", "uid-1", "chat-00000000-0")
    others = {
        admin_token(b"other", "team", "uid-1", "chat-00000000-0"),
        admin_token(b"key", "team", "uid-2", "chat-00000000-0"),
        admin_token(b"key", "team", "uid-1", "chat-11111111-0"),
    }
    assert len(others | {token}) == 4


def test_the_longest_name_fits_kuberays_limit():
    manifest = ray_cluster(make_resolved("a" * 40), REVISION)

    assert len(manifest["metadata"]["name"]) <= 53


def test_the_version_of_ray_is_that_of_the_image():
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)

    assert pinned is not None and pinned[1] == RAY_VERSION


def test_a_revision_follows_spec_and_image_and_nothing_else():
    base = revision(make_resolved(image="a"))

    assert re.fullmatch("[0-9a-f]{8}", base)
    assert base == revision(make_resolved(drainSeconds=31, parallelism={"tensor": 1, "pipeline": 1}, image="a"))
    assert base == revision(make_resolved(engine={"imagePullPolicy": "Never", "image": "x"}, image="a"))
    others = {
        revision(make_resolved(image="b")),
        revision(make_resolved(parallelism={"pipeline": 2}, image="a")),
        revision(make_resolved(engine={"env": [{"name": "A", "value": "1"}]}, image="a")),
        revision(make_resolved(engine={"resources": {"requests": {"cpu": "1"}}}, image="a")),
        revision(make_resolved(scheduling={"priorityClassName": "high"}, image="a")),
    }
    assert len(others | {base}) == 6


def test_the_revision_of_a_plain_service_never_changes():
    # With another value, an upgrade of the operator would roll every running engine.
    assert revision(make_resolved(image="rayloom/engine:0.1.0")) == "2a1e22a9"

"""kubectl apply -> token, on real pods: two ranks on two nodes, pods that die, an operator that restarts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.kubectl import Kubectl
from conftest import Client, new_namespace
from service import CHAT, OPERATOR_NAMESPACE, READY_SECONDS, ROOT, Service, is_ready, manifest, tokens_of, wait

EXAMPLE = ROOT / "examples" / "smollm2-pp2.yaml"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the engine says on this machine, with one rank, in float32."""
    log = tmp_path_factory.mktemp("engine") / "log"
    command = [sys.executable, "-m", "rayloom_engine", "serve", "--port", "0", "--admin-port", "0"]
    command += ["--dtype", "float32", "--served-model-name", "smollm2-pp2", "--num-kv-blocks", "64"]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        wait(lambda: " ready: " in log.read_text() or process.poll() is not None, 120.0, log.read_text)
        assert process.poll() is None, log.read_text()
        url = log.read_text().split("API at ")[1].split(",")[0]
        request = urllib.request.Request(
            f"{url}/chat/completions",
            json.dumps({"model": "smollm2-pp2", **CHAT}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return tokens_of(json.load(answer))
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10.0)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def pipeline(operator: Kubectl) -> Iterator[tuple[Service, float]]:
    """smollm2-pp2.yaml as it is, and the seconds from `kubectl apply` to the first token that a client saw."""
    with new_namespace(operator, "pp2") as namespace:
        client = Client.start(operator, namespace)
        service = Service(operator, client, namespace, "smollm2-pp2")
        began = time.monotonic()
        operator.apply(manifest(EXAMPLE, namespace))
        wait(
            lambda: service.chat(max_tokens=1)[0] == 200,
            READY_SECONDS,
            lambda: json.dumps(service.get().get("status"), indent=1),
        )
        yield service, time.monotonic() - began


def _seconds(later: str, earlier: str) -> float:
    form = "%Y-%m-%dT%H:%M:%SZ"
    return time.mktime(time.strptime(later, form)) - time.mktime(time.strptime(earlier, form))


def test_the_first_token_and_where_the_seconds_went(
    pipeline: tuple[Service, float], capsys: pytest.CaptureFixture[str]
) -> None:
    service, seconds = pipeline
    created = service.get()["metadata"]["creationTimestamp"]
    rows = []
    for pod in [*service.pods("head"), *service.pods("worker")]:
        times = {item["type"]: item["lastTransitionTime"] for item in pod["status"]["conditions"]}
        containers = pod["status"]["containerStatuses"]
        started = max(item["state"]["running"]["startedAt"] for item in containers)
        name = pod["metadata"]["labels"]["ray.io/node-type"]
        rows.append((f"{name} pod scheduled", _seconds(times["PodScheduled"], created)))
        rows.append((f"{name} containers started", _seconds(started, created)))
    status = service.engine_status()
    phases = [(phase["name"], phase["seconds"]) for phase in status["startup"]]
    assert {"discover", "reserve", "start_ranks", "load", "rendezvous", "warm_up"} <= {name for name, _ in phases}
    with capsys.disabled():
        print(f"\n  kubectl apply -> first token at a client: {seconds:.1f} s (images present)")
        for name, value in rows:
            print(f"    {name:<28} after {value:5.0f} s")
        for name, value in phases:
            print(f"    engine: {name:<20} took  {value:5.2f} s")


def test_two_ranks_on_two_nodes_say_what_one_rank_says_here(
    pipeline: tuple[Service, float], expected: list[str]
) -> None:
    service, _ = pipeline
    assert service.tokens() == expected
    service.wait_available(15.0)
    status = service.engine_status()
    assert (status["state"], status["executor"]) == ("serving", "ray")
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
    nodes = [rank["node"] for rank in status["ranks"]]
    assert len(set(nodes)) == 2, f"both ranks are on {nodes[0]}"
    assert list(service.get()["status"]["groups"][0]["nodes"]) == nodes
    assert {pod["metadata"]["name"] for pod in service.pods("worker")} == {rank["host"] for rank in status["ranks"]}


def test_kubectl_get_shows_model_shape_ready_reason_url_age(pipeline: tuple[Service, float]) -> None:
    service, _ = pipeline
    service.wait_available(15.0)
    header, row = service.kubectl("get", "llm", "--namespace", service.namespace).splitlines()
    assert header.split() == ["NAME", "MODEL", "SHAPE", "READY", "REASON", "URL", "AGE"]
    assert row.split()[:5] == ["smollm2-pp2", "builtin://smollm2-135m", "TP1xPP2", "1/1", "Serving"]
    url = row.split()[5]
    status, body = service.client.request(f"{url}/v1/models")
    assert (status, json.loads(body)["data"][0]["id"]) == (200, "smollm2-pp2")


def test_a_restarted_operator_recreates_nothing(pipeline: tuple[Service, float]) -> None:
    service, _ = pipeline
    service.wait_available(15.0)
    before = _objects(service)
    assert len([name for name in before if name.startswith("pod/")]) == 3
    operators = ("get", "pods", "--namespace", OPERATOR_NAMESPACE)
    old = {pod["metadata"]["uid"] for pod in service.kubectl.json(*operators)["items"]}
    service.kubectl("delete", "pods", "--all", "--namespace", OPERATOR_NAMESPACE, timeout_s=90)

    def is_back() -> bool:
        pods = service.kubectl.json(*operators)["items"]
        return [is_ready(pod) for pod in pods if pod["metadata"]["uid"] not in old] == [True]

    wait(is_back, 60.0, lambda: service.kubectl(*operators))
    # A label that only the operator sets: when it is back, the new one has worked on the service.
    head = service.pods("head")[0]["metadata"]["name"]
    service.kubectl("label", "pod", head, "--namespace", service.namespace, "rayloom.dev/route-")
    wait(
        lambda: "rayloom.dev/route" in service.pods("head")[0]["metadata"]["labels"],
        30.0,
        lambda: json.dumps(service.get(), indent=1),
    )
    service.wait_available(30.0)
    assert _objects(service) == before


def _objects(service: Service) -> dict[str, tuple[str, str]]:
    """uid of everything of the service, and what changes when it is written.

    For objects that have a status, that is the generation: others write the status.
    """
    found = {}
    selector = f"rayloom.dev/service={service.name}"
    for kind in ("raycluster", "service", "configmap", "secret", "serviceaccount", "pod"):
        listed = service.kubectl.json("get", kind, "--namespace", service.namespace, "--selector", selector)
        for metadata in [item["metadata"] for item in listed["items"]]:
            version = metadata.get("generation", 0) if kind in ("raycluster", "pod") else metadata["resourceVersion"]
            found[f"{kind}/{metadata['name']}"] = (metadata["uid"], str(version))
    return found


def test_a_deleted_worker_pod_is_replaced_and_the_service_is_available_again(
    pipeline: tuple[Service, float], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    service, _ = pipeline
    service.wait_available(15.0)
    before = service.engine_status()
    head = service.pods("head")[0]["metadata"]["uid"]
    victim = service.pods("worker")[0]["metadata"]["name"]
    began = time.monotonic()
    service.kubectl("delete", "pod", victim, "--namespace", service.namespace, "--wait=false")

    def is_rebuilt() -> bool:
        status = service.engine_status()
        return status["state"] == "serving" and status["epoch"] > before["epoch"]

    wait(is_rebuilt, 90.0, lambda: json.dumps(service.get().get("status"), indent=1))
    service.wait_available(30.0)
    seconds = time.monotonic() - began
    assert service.tokens() == expected
    after = service.engine_status()
    assert victim not in {rank["host"] for rank in after["ranks"]}
    kept = {rank["host"]: rank["pid"] for rank in before["ranks"] if rank["host"] != victim}
    assert kept.items() <= {rank["host"]: rank["pid"] for rank in after["ranks"]}.items(), "the other rank lives on"
    assert service.pods("head")[0]["metadata"]["uid"] == head
    with capsys.disabled():
        print(f"\n  worker pod deleted -> Available again with tokens flowing: {seconds:.1f} s")


def test_a_model_path_that_is_not_there_ends_in_a_condition_that_says_so(
    operator: Kubectl, client: Client, namespace: str
) -> None:
    service = Service(operator, client, namespace, "smollm2")
    model = {"source": "file:///models/not-there"}
    operator.apply(manifest(ROOT / "examples" / "smollm2.yaml", namespace, model=model))
    wait(
        lambda: service.condition("ModelReady")["reason"] == "ModelNotFound",
        60.0,
        lambda: json.dumps(service.get().get("status"), indent=1),
    )
    assert service.condition("ModelReady")["status"] == "False"
    assert "/models/not-there" in service.condition("ModelReady")["message"]
    available = service.condition("Available")
    assert (available["status"], available["reason"]) == ("False", "ModelNotFound")
    # No shape before the model is known.
    row = operator("get", "llm", "--namespace", namespace).splitlines()[1].split()
    assert row[2:4] == ["0/1", "ModelNotFound"]


def test_one_rank_serves_a_folder_of_the_node(operator: Kubectl, client: Client, namespace: str) -> None:
    folder = _model_on_the_nodes()
    service = Service(operator, client, namespace, "smollm2")
    operator.apply(
        manifest(
            ROOT / "examples" / "smollm2.yaml", namespace, model={"source": f"file://{folder}", "dtype": "float32"}
        )
    )
    service.wait_available()
    status, body = service.chat(messages=[{"role": "user", "content": "What is the capital of France?"}])
    assert status == 200 and "Paris" in body, body
    assert len(service.engine_status()["ranks"]) == 1


def test_three_ranks_of_one_pod_say_what_one_rank_says_here(
    operator: Kubectl, client: Client, namespace: str, expected: list[str]
) -> None:
    service = Service(operator, client, namespace, "smollm2-tp3")
    model = {"source": "builtin://smollm2-135m", "dtype": "float32"}
    operator.apply(manifest(ROOT / "examples" / "smollm2-tp3.yaml", namespace, model=model))
    service.wait_available()
    assert service.tokens() == expected
    ranks = service.engine_status()["ranks"]
    (pod,) = service.pods("worker")
    assert [(rank["rank"], rank["host"]) for rank in ranks] == [
        (number, pod["metadata"]["name"]) for number in range(3)
    ]
    assert service.get()["status"]["shape"] == "TP3xPP1"


def _model_on_the_nodes() -> Path:
    """The embedded model as a folder that every node has at the same path, readable for everybody."""
    from rayloom_engine.models.source import resolve

    converted = resolve("builtin://smollm2-135m").path
    if os.environ.get("E2E_CLUSTER") == "kind" or os.environ.get("E2E_KUBECONFIG"):
        pytest.skip("the nodes do not see this machine's folders")
    # Not below HOME, which other users cannot enter. Its name is that of the conversion, so it is never out of date.
    folder = Path("/var/tmp") / f"rayloom-e2e-{converted.name}"
    if not folder.exists():
        draft = Path(tempfile.mkdtemp(prefix="rayloom-e2e-draft-", dir=folder.parent))
        shutil.copytree(converted, draft, dirs_exist_ok=True, copy_function=shutil.copyfile)
        draft.chmod(0o755)
        for path in draft.iterdir():
            path.chmod(0o644)
        draft.rename(folder)
    return folder

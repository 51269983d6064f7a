"""An LLMService in the test cluster: its objects through kubectl, its API from a client's pod."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml

from clients.client_pod import Client
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.shell import ClusterError

ROOT = Path(__file__).parents[2]
OPERATOR_NAMESPACE = "rayloom-system"
# Limits for a busy machine, on which a start takes several times as long as on an idle machine.
READY_SECONDS = 600.0
STATUS_SECONDS = 60.0  # until the operator, which polls a serving engine each second, has written the status
_RULES_S = 60.0  # until kube-proxy has updated its rules from the EndpointSlices
# A connection that begins while a node changes its rules for a Service hangs until its timeout.
_TRY_S = 2.0

CHAT = {
    "messages": [{"role": "user", "content": "Tell me a short story about a lighthouse and a whale."}],
    "temperature": 0,
    "max_tokens": 48,
    "logprobs": True,
}


class Service:
    """One LLMService, with the client's pod that sends its requests."""

    def __init__(self, kubectl: Kubectl, client: Client, namespace: str, name: str) -> None:
        self.kubectl = kubectl
        self.client = client
        self.namespace = namespace
        self.name = name

    @property
    def url(self) -> str:
        """The base URL for clients in the cluster."""
        return f"http://{self.name}.{self.namespace}.svc.cluster.local:8000"

    def get(self) -> dict[str, Any]:
        document: dict[str, Any] = self.kubectl.json("get", "llm", self.name, "--namespace", self.namespace)
        return document

    def condition(self, kind: str) -> dict[str, Any]:
        found = [item for item in self.get().get("status", {}).get("conditions", []) if item["type"] == kind]
        return found[0] if found else {"status": "", "reason": "", "message": ""}

    def is_available(self) -> bool:
        return bool(self.condition("Available")["status"] == "True")

    def wait_available(self, seconds: float = READY_SECONDS) -> float:
        """Waits until the service is Available, and returns the seconds of this wait.

        Then waits until requests from the client's pod reach the service. kube-proxy updates the rules of that pod's
        node about a second after the EndpointSlices change.
        """
        found = wait(self.is_available, seconds, self.story)
        wait(lambda: self.client.request(f"{self.url}/v1/models", None, _TRY_S)[0] != 0, _RULES_S, self.story)
        return found

    def chat(self, timeout_s: float = 120, **other: Any) -> tuple[int, str]:
        return self.client.request(f"{self.url}/v1/chat/completions", {"model": self.name, **CHAT, **other}, timeout_s)

    def tokens(self) -> list[str]:
        status, body = self.chat()
        assert status == 200, body
        return tokens_of(json.loads(body))

    def change(self, **spec: Any) -> None:
        """Merges these fields into the spec; None removes a field."""
        patch = json.dumps({"spec": spec})
        self.kubectl("patch", "llm", self.name, "--namespace", self.namespace, "--type", "merge", "--patch", patch)

    def scale(self, replicas: int) -> None:
        self.kubectl("scale", f"llm/{self.name}", "--namespace", self.namespace, f"--replicas={replicas}")

    def clusters(self) -> list[str]:
        """Names of the service's RayClusters, including terminating RayClusters."""
        selector = f"rayloom.dev/service={self.name}"
        found = self.kubectl.json("get", "rayclusters", "--namespace", self.namespace, "--selector", selector)["items"]
        return [each["metadata"]["name"] for each in found]

    def has(self, number: int) -> bool:
        """True when exactly this number of engine replicas exist and all serve."""
        return self.get().get("status", {}).get("ready") == f"{number}/{number}" and len(self.clusters()) == number

    def story(self) -> str:
        """The service's status, for the message of a failed wait."""
        return json.dumps(self.get().get("status"), indent=1)

    def pods(self, kind: str) -> list[dict[str, Any]]:
        """Pods of the service's RayClusters. `kind`: "head" or "worker"."""
        selector = f"rayloom.dev/service={self.name},ray.io/node-type={kind}"
        found: dict[str, list[dict[str, Any]]]
        found = self.kubectl.json("get", "pods", "--namespace", self.namespace, "--selector", selector)
        return found["items"]

    def delete_pod(self, name: str, *options: str) -> None:
        self.kubectl("delete", "pod", name, "--namespace", self.namespace, "--wait=false", *options)

    def engine_status(self) -> dict[str, Any]:
        """/status of the first engine replica, requested by the client's pod with the replica's token.

        Raises ClusterError while there is no engine replica.
        """
        groups = self.get().get("status", {}).get("groups", ())
        # The pod of a removed or lost engine replica may still be terminating.
        heads = [pod["status"] for pod in self.pods("head") if "deletionTimestamp" not in pod["metadata"]]
        if not groups or not heads or "podIP" not in heads[0]:
            raise ClusterError(f"{self.name} has no engine replica with a running head pod")
        secret = self.kubectl.json("get", "secret", f"{groups[0]['name']}-admin", "--namespace", self.namespace)
        token = base64.b64decode(secret["data"]["token"]).decode()
        url = f"http://{heads[0]['podIP']}:8001/status"
        code, body = self.client.request(url, timeout_s=30, headers={"Authorization": f"Bearer {token}"})
        if code != HTTPStatus.OK:
            raise ClusterError(f"{url}: {code} {body}")
        status: dict[str, Any] = json.loads(body)
        return status


def tokens_of(answer: dict[str, Any]) -> list[str]:
    return [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]


def manifest(path: Path, namespace: str, **spec: Any) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text())
    document["metadata"]["namespace"] = namespace
    document["spec"].update(spec)
    return document


def wait(condition: Callable[[], bool], seconds: float, story: Callable[[], str], pause_s: float = 0.25) -> float:
    """Waits until `condition()` is true, at most `seconds`. Returns the seconds of the wait.

    A ClusterError counts as False. The message of a failed wait has the text of `story()`.
    """
    began = time.monotonic()
    problem: ClusterError | None = None
    while True:
        try:
            if condition():
                return time.monotonic() - began
        except ClusterError as error:
            problem = error
        assert time.monotonic() - began < seconds, f"{story()}\nlast failure: {problem}"
        time.sleep(pause_s)


def is_ready(pod: dict[str, Any]) -> bool:
    return any(item["type"] == "Ready" and item["status"] == "True" for item in pod["status"].get("conditions", []))

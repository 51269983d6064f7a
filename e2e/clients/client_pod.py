"""A pod that sends requests as any other pod of its namespace would."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from typing import Any

from clients.kept_requests import PROGRAM, Answer, KeptRequests
from local_kubernetes.images.build import OPERATOR
from local_kubernetes.machine.kubectl import Kubectl


@dataclass(frozen=True, slots=True)
class Client:
    """A running pod with Python in it."""

    kubectl: Kubectl
    namespace: str
    name: str = "client"
    _requests: KeptRequests = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_requests", KeptRequests(self._start_requests))

    @classmethod
    def start(cls, kubectl: Kubectl, namespace: str, name: str = "client", node: str = "") -> Client:
        """Starts a pod of this name. Returns when the pod is Ready. `node`: its node; empty: any node."""
        image = OPERATOR.name.removeprefix("docker.io/")
        container: dict[str, Any] = {"name": "client", "image": image, "command": ["sleep", "infinity"]}
        # The client measures whether an answer is late, so its pod must get CPU time beside busy neighbours.
        container["resources"] = {"requests": {"cpu": "200m", "memory": "64Mi"}}
        pod: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
        }
        if node:
            pod["spec"]["nodeName"] = node
        kubectl.apply(pod)
        wait = ("wait", "--namespace", namespace, "--for=condition=Ready", f"pod/{name}", "--timeout=180s")
        kubectl(*wait, timeout_s=200)
        return cls(kubectl, namespace, name)

    def python(self, code: str, stdin: bytes | None = None, timeout_s: float = 60) -> str:
        """Standard output of the code, run by the pod's Python."""
        return self.kubectl(*self._exec("-c", code), stdin=stdin or b"", timeout_s=timeout_s + 10)

    def request(
        self, url: str, json_body: object = None, timeout_s: float = 60, headers: dict[str, str] | None = None
    ) -> Answer:
        """HTTP status and body of a GET, or of a POST of `json_body`. Without an answer: status 0 and the reason."""
        return self._requests.send(url, json_body, timeout_s, headers or {})

    def _start_requests(self) -> subprocess.Popen[str]:
        return self.kubectl.start(*self._exec("-u", "-c", PROGRAM))

    def _exec(self, *arguments: str) -> tuple[str, ...]:
        return ("exec", "--stdin", "--namespace", self.namespace, self.name, "--", "python3", *arguments)

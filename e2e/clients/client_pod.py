"""A pod that sends requests as any other pod of its namespace would."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from local_kubernetes.images.build import OPERATOR
from local_kubernetes.machine.kubectl import Kubectl

_REQUEST = """
import json, sys, urllib.error, urllib.request
url, body, timeout_s, headers = json.load(sys.stdin)
data = None if body is None else json.dumps(body).encode()
request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
try:
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        status, content = answer.status, answer.read()
except urllib.error.HTTPError as error:
    status, content = error.code, error.read()
except OSError as error:
    status, content = 0, str(error).encode()
print(json.dumps([status, content.decode(errors="replace")]))
"""


@dataclass(frozen=True, slots=True)
class Client:
    """A running pod with Python in it."""

    kubectl: Kubectl
    namespace: str
    name: str = "client"

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
        command = ("exec", "--stdin", "--namespace", self.namespace, self.name, "--", "python3", "-c", code)
        return self.kubectl(*command, stdin=stdin or b"", timeout_s=timeout_s + 10)

    def request(
        self, url: str, json_body: object = None, timeout_s: float = 60, headers: dict[str, str] | None = None
    ) -> tuple[int, str]:
        """HTTP status and body of a GET, or of a POST of `json_body`. Without an answer: status 0 and the reason."""
        question = json.dumps([url, json_body, timeout_s, headers or {}]).encode()
        status, content = json.loads(self.python(_REQUEST, question, timeout_s))
        return status, content

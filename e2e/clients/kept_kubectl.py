"""A kubectl that keeps its connection to the API server for reads of objects.

A kubectl process takes 40 ms of CPU time. The API server takes about as much, to authenticate a new connection. A test
that waits for a state reads objects several times a second. So one `kubectl proxy` answers these reads.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import tempfile
import threading
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.shell import PROGRAM_S, ClusterError, wait_until

_OURS = "apis/rayloom.dev/v1alpha1"
# Name of a kind in tests -> (path of its API group, its name in paths).
_NAMESPACED = {
    "pod": ("api/v1", "pods"),
    "pods": ("api/v1", "pods"),
    "secret": ("api/v1", "secrets"),
    "events.events.k8s.io": ("apis/events.k8s.io/v1", "events"),
    "rayclusters": ("apis/ray.io/v1", "rayclusters"),
    "llm": (_OURS, "llmservices"),
    "llmgateway": (_OURS, "llmgateways"),
}
_OF_CLUSTER = {kind: ("api/v1", f"{kind.removesuffix('s')}s") for kind in ("node", "nodes", "namespaces")}
_OPTIONS = {"--selector": "labelSelector", "--field-selector": "fieldSelector"}


def read_path(*arguments: object) -> str | None:
    """Returns the path of the API for `kubectl ARGUMENTS --output json`; None if kubectl must run.

    kubectl must run for kinds and options that this module does not know.
    """
    words = [str(word) for word in arguments]
    if len(words) < 2 or words[0] != "get":
        return None
    kind, *rest = words[1:]
    name = f"/{rest.pop(0)}" if len(rest) % 2 else ""
    options = dict(zip(rest[::2], rest[1::2], strict=True))
    namespace = options.pop("--namespace", None)
    if not options.keys() <= _OPTIONS.keys() or kind not in (_OF_CLUSTER if namespace is None else _NAMESPACED):
        return None
    group, plural = _OF_CLUSTER[kind] if namespace is None else _NAMESPACED[kind]
    place = "" if namespace is None else f"/namespaces/{namespace}"
    query = urlencode({_OPTIONS[option]: value for option, value in options.items()})
    return f"/{group}{place}/{plural}{name}" + (f"?{query}" if query else "")


class KeptKubectl(Kubectl):
    """A Kubectl that threads may share. Call `close` at the end."""

    def __init__(self, kubeconfig: Path) -> None:
        super().__init__(kubeconfig)
        self._folder = Path(tempfile.mkdtemp(prefix="rayloom-e2e-"))
        self._socket = self._folder / "api"
        self._proxy: subprocess.Popen[str] | None = None
        self._starting = threading.Lock()
        self._of_thread = threading.local()  # the thread's connection to the proxy

    def json(self, *arguments: object, timeout_s: float = 60) -> Any:
        path = read_path(*arguments)
        if path is None:
            return super().json(*arguments, timeout_s=timeout_s)
        self._ensure_proxy()
        try:
            return self._read(path, timeout_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._of_thread.connection = None
            raise ClusterError(f"kubectl proxy: GET {path}: {error!r}") from error

    def close(self) -> None:
        if self._proxy is not None:
            self._proxy.kill()
            self._proxy.wait()
        shutil.rmtree(self._folder)

    def _ensure_proxy(self) -> None:
        with self._starting:
            if self._proxy is not None and self._proxy.poll() is None:
                return
            self._socket.unlink(missing_ok=True)
            self._proxy = self.start("proxy", f"--unix-socket={self._socket}")
            wait_until("kubectl proxy", self._socket.exists, PROGRAM_S)

    def _read(self, path: str, timeout_s: float) -> Any:
        connection: _UnixConnection | None = getattr(self._of_thread, "connection", None)
        if connection is None:
            connection = self._of_thread.connection = _UnixConnection(self._socket)
        connection.set_timeout(timeout_s)
        connection.request("GET", path)
        answer = connection.getresponse()
        body = json.loads(answer.read())
        if answer.status != HTTPStatus.OK:
            raise ClusterError(f"GET {path}: {answer.status} {body.get('message', '')}")
        return body


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def set_timeout(self, seconds: float) -> None:
        self.timeout = seconds
        if self.sock is not None:
            self.sock.settimeout(seconds)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))

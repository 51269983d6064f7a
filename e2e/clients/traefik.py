"""Traefik as a process of this machine: a controller of HTTPRoutes and of Ingresses, and clients of its ports.

Traefik connects to the pods directly. So it works only with a local cluster, whose pods this machine can reach.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from local_kubernetes.parts.build import gateway_crds, traefik

ADDRESS = "127.0.0.1"
CONTROLLER = "traefik.io/gateway-controller"
CLASS = "traefik"  # name of the GatewayClass and of the IngressClass
CLASSES = (
    {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "GatewayClass",
        "metadata": {"name": CLASS},
        "spec": {"controllerName": CONTROLLER},
    },
    {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "IngressClass",
        "metadata": {"name": CLASS},
        "spec": {"controller": "traefik.io/ingress-controller"},
    },
)
_END_S = 30.0
_LOG_BYTES = 8000


class Traefik:
    """A running Traefik. It needs the kinds of the Gateway API (`crds`) and CLASSES in the cluster.

    These settings are not the defaults: the two providers, no check for new versions, the ports, the address in the
    status of Ingresses, and TLS for every route at `https_port`. Without this TLS, Traefik would serve no Ingress at
    this port.
    """

    def __init__(self, kubeconfig: Path, folder: Path, *, http_port: int, https_port: int) -> None:
        self.http_port = http_port
        self.https_port = https_port
        self._log = folder / "traefik.log"
        # Without NO_PROXY, Traefik would connect to the pods through this machine's proxy, if there is one.
        environment = os.environ | {"KUBECONFIG": str(kubeconfig), "NO_PROXY": "*", "no_proxy": "*"}
        command = (
            traefik(),
            "--global.checkNewVersion=false",
            f"--entryPoints.web.address={ADDRESS}:{self.http_port}",
            f"--entryPoints.websecure.address={ADDRESS}:{self.https_port}",
            "--entryPoints.websecure.http.tls=true",
            "--providers.kubernetesGateway=true",
            "--providers.kubernetesIngress=true",
            f"--providers.kubernetesIngress.ingressEndpoint.ip={ADDRESS}",
        )
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )

    def log(self) -> str:
        """The end of Traefik's log."""
        return self._log.read_bytes()[-_LOG_BYTES:].decode(errors="replace")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        finally:
            self._process.kill()


def crds() -> tuple[str, ...]:
    """Paths of the CRDs of all kinds of the Gateway API that Traefik watches."""
    return tuple(str(path) for path in sorted(gateway_crds().glob("*.yaml")))


class Outsider:
    """A client outside of the cluster, for which every host name has Traefik's address.

    It trusts only the CA certificate `ca`, and checks the names in certificates.
    """

    def __init__(self, ca: bytes) -> None:
        self._tls = ssl.create_default_context(cadata=ca.decode())

    def request(self, url: str, body: object = None, timeout_s: float = 60.0) -> tuple[int, str]:
        """HTTP status and body of a GET, or of a POST of `body` as JSON. Raises OSError without an answer."""
        with self._answer(url, body, timeout_s) as answer:
            return answer.status, answer.read().decode(errors="replace")

    def events(self, url: str, body: object, timeout_s: float = 60.0) -> Generator[tuple[float, dict[str, Any]]]:
        """Yields each event of a stream with the time of its arrival by time.monotonic(), until [DONE].

        `timeout_s`: the longest silence. Closing the generator closes the connection. Raises OSError or
        http.client.HTTPException if the connection breaks, and AssertionError if it ends without [DONE].
        """
        with self._answer(url, body, timeout_s) as answer:
            assert answer.status == 200, answer.read()
            for line in answer:
                if line.startswith(b"data: "):
                    content = line.removeprefix(b"data: ").strip()
                    if content == b"[DONE]":
                        return
                    yield time.monotonic(), json.loads(content)
        raise AssertionError(f"{url}: the stream ended without [DONE]")

    @contextlib.contextmanager
    def _answer(self, url: str, body: object, timeout_s: float) -> Iterator[http.client.HTTPResponse]:
        parts = urlsplit(url)
        connection = _Connection(parts, self._tls if parts.scheme == "https" else None, timeout_s)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body)
            method = "GET" if data is None else "POST"
            connection.request(method, parts.path, data, {"Content-Type": "application/json"})
            yield connection.getresponse()


class _Connection(http.client.HTTPConnection):
    def __init__(self, url: SplitResult, tls: ssl.SSLContext | None, timeout_s: float) -> None:
        assert url.hostname is not None
        assert url.port is not None
        super().__init__(url.hostname, url.port, timeout=timeout_s)
        self._tls = tls

    def connect(self) -> None:
        self.sock = socket.create_connection((ADDRESS, self.port), self.timeout)
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self.host)

"""The helpers that e2e tests keep running: a program that sends requests in a pod, and a proxy for reads of objects."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from clients.kept_kubectl import read_path
from clients.kept_requests import PROGRAM, KeptRequests
from local_kubernetes.machine.shell import ClusterError, CommandTimeout


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ("get pods --namespace n --selector a=b,c=d", "/api/v1/namespaces/n/pods?labelSelector=a%3Db%2Cc%3Dd"),
        ("get llm name --namespace n", "/apis/rayloom.dev/v1alpha1/namespaces/n/llmservices/name"),
        ("get node a", "/api/v1/nodes/a"),
        ("get namespaces --selector a=b", "/api/v1/namespaces?labelSelector=a%3Db"),
        (
            "get events.events.k8s.io --namespace n --field-selector type=Warning",
            "/apis/events.k8s.io/v1/namespaces/n/events?fieldSelector=type%3DWarning",
        ),
        ("get pods --all-namespaces", None),
        ("get pods --namespace n --watch true", None),
        ("get nodes --namespace n", None),
        ("get pods", None),
        ("get configmaps --namespace n", None),
        ("version", None),
        ("create namespace n", None),
    ],
)
def test_reads_of_known_kinds_have_a_path(arguments: str, path: str | None) -> None:
    assert read_path(*arguments.split()) == path


class _Held(BaseHTTPRequestHandler):
    """Answers /held only after a request to another path has arrived. Answers a POST with its body."""

    other_arrived: threading.Event
    held_arrived: threading.Event

    def do_GET(self) -> None:
        if self.path == "/held":
            self.held_arrived.set()
            self.other_arrived.wait(60)
        else:
            self.other_arrived.set()
        self._answer(404 if self.path == "/missing" else 200, self.headers["X-Own"].encode())

    def do_POST(self) -> None:
        self._answer(200, self.rfile.read(int(self.headers["Content-Length"])))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def handler() -> type[_Held]:
    return type("Held", (_Held,), {"other_arrived": threading.Event(), "held_arrived": threading.Event()})


@pytest.fixture
def url(handler: type[_Held]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        handler.other_arrived.set()
        server.shutdown()
        thread.join()


class Programs:
    """Starts PROGRAM on this machine, and keeps the processes."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-u", "-c", PROGRAM]
        pipe = subprocess.PIPE
        self.started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1))
        return self.started[-1]


@pytest.fixture
def programs() -> Iterator[Programs]:
    found = Programs()
    yield found
    for process in found.started:
        process.kill()
        process.wait()


def test_requests_of_threads_run_in_parallel_in_one_program(url: str, programs: Programs) -> None:
    kept = KeptRequests(programs.start)
    with ThreadPoolExecutor() as threads:
        held = threads.submit(kept.send, f"{url}/held", None, 60.0, {"X-Own": "held"})
        assert kept.send(f"{url}/missing", None, 60.0, {"X-Own": "other"}) == (404, "other")
        assert held.result() == (200, "held")
    assert kept.send(url, {"a": 1}, 60.0, {}) == (200, '{"a": 1}')
    status, reason = kept.send("http://127.0.0.1:1", None, 60.0, {})
    assert status == 0 and "refused" in reason
    assert len(programs.started) == 1


def test_the_end_of_the_program_fails_its_requests_and_the_next_request_starts_another(
    url: str, handler: type[_Held], programs: Programs
) -> None:
    kept = KeptRequests(programs.start)
    assert kept.send(url, {}, 60.0, {}) == (200, "{}")
    with ThreadPoolExecutor() as threads:
        held = threads.submit(kept.send, f"{url}/held", None, 60.0, {"X-Own": "held"})
        assert handler.held_arrived.wait(60), "the program has sent the request"
        programs.started[0].kill()
        with pytest.raises(ClusterError):
            held.result()
    assert kept.send(url, {}, 60.0, {}) == (200, "{}")
    assert len(programs.started) == 2


def test_a_program_that_does_not_answer_is_replaced(url: str, programs: Programs) -> None:
    kept = KeptRequests(programs.start)
    with pytest.raises(CommandTimeout):  # the program's own limit for the request is 10 s shorter
        kept.send(f"{url}/held", None, -9.9, {"X-Own": "held"})
    assert kept.send(url, {}, 60.0, {}) == (200, "{}")
    assert len(programs.started) == 2

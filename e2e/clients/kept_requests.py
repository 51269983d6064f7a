"""A program in a client's pod that sends requests for as long as the pod runs.

The start of a program in a pod takes a tenth of a second of CPU time: that of kubectl, the API server, the kubelet, the
container runtime and Python together. Tests that wait for a service send several requests a second.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future

from local_kubernetes.machine.shell import ClusterError, CommandTimeout

# stdin has a JSON list for each request, and stdout a list for each answer. Requests are sent in parallel, so an answer
# has the number of its request.
PROGRAM = """
import json, sys, threading, urllib.error, urllib.request

lock = threading.Lock()

def send(number, url, body, timeout_s, headers):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            status, content = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, content = error.code, error.read()
    except OSError as error:
        status, content = 0, str(error).encode()
    with lock:
        print(json.dumps([number, status, content.decode(errors="replace")]), flush=True)

for line in sys.stdin:
    threading.Thread(target=send, args=json.loads(line), daemon=True).start()
"""

Answer = tuple[int, str]  # HTTP status and body; without an answer: status 0 and the reason


class KeptRequests:
    """Sends requests through one running program, which is started again if it ends. Threads may share this object."""

    def __init__(self, start: Callable[[], subprocess.Popen[str]]) -> None:
        """`start` starts PROGRAM in the pod."""
        self._start = start
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[subprocess.Popen[str], Future[Answer]]] = {}  # by the number of the request

    def send(self, url: str, json_body: object, timeout_s: float, headers: dict[str, str]) -> Answer:
        """Returns the answer. Raises ClusterError if the program ends or does not answer in time."""
        answer: Future[Answer] = Future()
        with self._lock:
            process = self._running()
            number = next(self._numbers)
            self._waiting[number] = (process, answer)
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps([number, url, json_body, timeout_s, headers]) + "\n")
                process.stdin.flush()
            except OSError as error:
                del self._waiting[number]
                raise ClusterError(f"the client's pod is gone: {error}") from error
        try:
            return answer.result(timeout_s + 10.0)
        except TimeoutError:
            # The connection to the pod may be broken, so the next request starts another program.
            process.kill()
            process.wait()
            raise CommandTimeout(f"{url} was not answered within {timeout_s:.0f} s") from None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
            threading.Thread(target=self._receive, args=(self._process,), daemon=True).start()
        return self._process

    def _receive(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # the last line may be incomplete
                number, status, content = json.loads(line)
                with self._lock:
                    _, answer = self._waiting.pop(number)
                answer.set_result((status, content))
        process.wait()
        with self._lock:
            lost = [number for number, (of_process, _) in self._waiting.items() if of_process is process]
            answers = [self._waiting.pop(number)[1] for number in lost]
        for answer in answers:
            answer.set_exception(ClusterError("the program in the client's pod has ended"))

"""Checks that a front answers other clients during a costly request, and measures its memory."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil

EVERY_S = 0.02


@dataclass
class Canary:
    """The delays of repeated GET /health during the block of `canary`."""

    delays_s: list[float] = field(default_factory=list)  # the part of each delay that the front may have caused
    failures: list[str] = field(default_factory=list)
    peak_bytes: int = 0  # peak of the front's resident memory, in bytes
    before_bytes: int = 0

    @property
    def growth_mib(self) -> float:
        return (self.peak_bytes - self.before_bytes) / 2**20

    @property
    def worst_s(self) -> float:
        return max(self.delays_s)


@contextlib.contextmanager
def canary(url: str, front: psutil.Process) -> Iterator[Canary]:
    """Requests /health during the block, and at least five times before and after it."""
    found = Canary(before_bytes=front.memory_info().rss)
    stop = threading.Event()
    thread = threading.Thread(target=_ask, args=(url, front, found, stop), daemon=True)
    thread.start()
    _wait_for_more(found)
    try:
        yield found
        _wait_for_more(found)
    finally:
        stop.set()
        thread.join(60.0)
    assert found.failures == []


def _wait_for_more(found: Canary, num: int = 5) -> None:
    deadline = time.monotonic() + 60.0
    num += len(found.delays_s)
    while len(found.delays_s) < num and not found.failures:
        assert time.monotonic() < deadline, "no answer to /health"
        time.sleep(0.005)


def _ask(url: str, front: psutil.Process, found: Canary, stop: threading.Event) -> None:
    address = urlsplit(url)
    while not stop.is_set():
        cpu_s, queued_s = _cpu_s(front), _queued_s(front)
        started_s = time.monotonic()
        try:
            connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60.0)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                answer = connection.getresponse()
                answer.read()
            if answer.status != 200:
                found.failures.append(f"HTTP {answer.status}")
        except (OSError, http.client.HTTPException) as error:
            found.failures.append(f"{type(error).__name__}: {error}")
        # Waits for a processor do not count as a delay by the front. So the delay of this answer is at most the CPU
        # time that the front used since the request, and does not contain the time for which the front's event loop
        # and this thread were ready to run but had no processor.
        delay_s = time.monotonic() - started_s - (_queued_s(front) - queued_s)
        found.delays_s.append(min(delay_s, _cpu_s(front) - cpu_s))
        found.peak_bytes = max(found.peak_bytes, front.memory_info().rss)
        stop.wait(EVERY_S)


def _queued_s(front: psutil.Process) -> float:
    """Seconds for which the front's event loop and the calling thread were ready to run but had no processor.

    The event loop runs in the main thread of the front. The result is 0 if the kernel does not count these seconds.
    """
    total_ns = 0
    for task in (f"/proc/{front.pid}/task/{front.pid}", "/proc/thread-self"):
        with contextlib.suppress(OSError):  # the front has just ended, or the kernel has no such file
            total_ns += int(Path(task, "schedstat").read_text().split()[1])
    return total_ns / 1e9


def _cpu_s(process: psutil.Process) -> float:
    """CPU seconds of all threads of a process.

    The result is exact to a nanosecond if the kernel counts nanoseconds, and else to a clock tick.
    """
    total = 0
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with contextlib.suppress(OSError, ValueError):  # the thread has just ended
            total += int((task / "schedstat").read_text().split()[0])
    if total:
        return total / 1e9
    times = process.cpu_times()
    return times.user + times.system

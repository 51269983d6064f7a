"""`rayloom-operator local` with two replicas: real engines and a real gateway; one engine and the gateway are killed.

Every answer must equal the answer of an undisturbed run, in float32. The tests share one run, which the last test ends.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rt_examples import TWO_REPLICAS
from rt_faults import breakable, slow_steps
from rt_server import Stream, wait_until
from rt_streams import Said, completion_body, join_streams, said, start_streams

NUM_STREAMS = 4
NUM_TOKENS = 64
EARLY_TOKENS = 8
# On a busy machine the streams may need longer than the default of drainSeconds.
MANIFEST = TWO_REPLICAS.read_text(encoding="utf-8") + "  drainSeconds: 120\n"
MODEL = "smollm2-two-replicas"
PATTERNS = {
    "api": r"URL:    (http://127\.0\.0\.1:\d+)/v1\n",
    "admin": r"Engines, as (http://127\.0\.0\.1:\d+)/engines lists them:\n",
    "folder": r"Logs:   (\S+)\n",
}


@dataclass
class LocalRun:
    """A running `rayloom-operator local`."""

    process: subprocess.Popen[bytes]
    output: Path
    api_url: str = ""
    admin_url: str = ""
    folder: Path = Path()

    def text(self) -> str:
        return self.output.read_text()

    def engines(self) -> dict[str, Any]:
        """The engines in the gateway's `/engines`, by name."""
        document = httpx.get(f"{self.admin_url}/engines", timeout=60.0).json()
        return {engine["name"]: engine for engine in document["engines"]}

    def programs(self) -> dict[str, psutil.Process]:
        """The processes that `local` has started, by their config: engine-0, engine-1, gateway."""
        children = psutil.Process(self.process.pid).children()
        return {Path(child.cmdline()[-1]).stem: child for child in children if child.is_running()}

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.text(), 240.0, self.text)


def begin(local: LocalRun) -> tuple[list[Stream], list[threading.Thread]]:
    return start_streams(local, [body(index, NUM_TOKENS) for index in range(NUM_STREAMS)])


def body(index: int, num_tokens: int) -> dict[str, object]:
    return {**completion_body(index, num_tokens), "model": MODEL}


def wait_for_tokens(streams: list[Stream], local: LocalRun) -> None:
    wait_until(
        lambda: all(len(stream.tokens) >= EARLY_TOKENS or stream.failure for stream in streams), 120.0, local.text
    )


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    folder = tmp_path_factory.mktemp("local")
    manifest = folder / "service.yaml"
    manifest.write_text(MANIFEST)
    flags = ["--port", "0", "--admin-port", "0"]
    output = folder / "output"
    with breakable(folder), output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "rayloom_operator", "local", "-f", str(manifest), *flags],
            stdout=stream,
            stderr=stream,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        )
    running = LocalRun(process, output)
    try:
        wait_until(lambda: "Press Ctrl-C" in running.text() or process.poll() is not None, 240.0, running.text)
        found = {name: re.search(pattern, running.text()) for name, pattern in PATTERNS.items()}
        assert all(found.values()), running.text()
        running.api_url, running.admin_url, place = (match[1] for match in found.values() if match)
        running.folder = Path(place)
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def undisturbed(local: LocalRun) -> list[Said]:
    """The streams of `begin` without a fault. Both engines must have some of these streams."""
    with slow_steps(local.output.parent):  # so that no stream ends before the engines are asked
        streams, threads = begin(local)
        wait_for_tokens(streams, local)
        num_sequences = [engine["sequences"] for engine in local.engines().values()]
    join_streams(threads)
    assert [stream.failure for stream in streams] == [None] * NUM_STREAMS
    assert len(num_sequences) == 2
    assert min(num_sequences) > 0, "the load is spread"
    return [said(stream) for stream in streams]


@pytest.mark.usefixtures("undisturbed")
def test_both_engines_get_work_and_share_the_machine(local: LocalRun) -> None:
    text = local.text()
    assert "> The capital of France is Paris." in text
    for line in ("engine-0: load: done in", "engine-1: load: done in", "gateway: serving\n"):
        assert line in text
    assert re.search(r"  engine-1  serving  http://127\.0\.0\.1:\d+\n", text)

    cores = len(os.sched_getaffinity(0))
    for name in ("engine-0", "engine-1"):
        log = (local.folder / f"{name}.log").read_text()
        threads_of = re.search(r"device cpu, (\d+) threads", log)
        assert threads_of is not None
        assert int(threads_of[1]) <= max(1, cores // 2)
    key = local.folder / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert len(key.read_text().strip()) == 64
    for name, program in local.programs().items():
        if name != "gateway":
            found = [each for child in program.children(recursive=True) for each in child.net_connections("tcp")]
            assert {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}


def test_streams_of_a_killed_engine_continue_and_it_is_started_again(local: LocalRun, undisturbed: list[Said]) -> None:
    with slow_steps(local.output.parent):
        streams, threads = begin(local)
        wait_for_tokens(streams, local)
        before = local.programs()["engine-0"]
        num_moved = local.engines()["engine-0"]["sequences"]
        before.kill()
    join_streams(threads)

    assert num_moved > 0
    assert [stream.failure for stream in streams] == [None] * NUM_STREAMS
    assert [said(stream) for stream in streams] == undisturbed
    local.wait_for("engine-0 was killed by SIGKILL while serving. It is started again now.")
    local.wait_for("engine-0 serves again.\n")
    assert {name: engine["state"] for name, engine in local.engines().items()} == {
        "engine-0": "serving",
        "engine-1": "serving",
    }
    assert local.programs()["engine-0"].pid != before.pid


def test_a_killed_gateway_is_started_again_at_its_port(local: LocalRun) -> None:
    before = local.programs()["gateway"]
    before.kill()
    local.wait_for("gateway was killed by SIGKILL while serving. It is started again now.\n")
    local.wait_for("gateway serves again.\n")

    (stream,), threads = start_streams(local, [body(0, 4)])
    join_streams(threads)
    assert (stream.failure, len(stream.tokens)) == (None, 4)
    assert local.programs()["gateway"].pid != before.pid


def test_ctrl_c_finishes_the_streams_and_leaves_nothing(local: LocalRun, undisturbed: list[Said]) -> None:
    started = psutil.Process(local.process.pid).children(recursive=True)
    streams, threads = begin(local)
    wait_for_tokens(streams, local)
    local.process.send_signal(signal.SIGINT)
    local.process.send_signal(signal.SIGINT)  # as if a wrapper repeated the terminal's signal
    join_streams(threads)

    assert [stream.failure for stream in streams] == [None] * NUM_STREAMS
    assert [said(stream) for stream in streams] == undisturbed
    assert local.process.wait(60.0) == 0, local.text()
    _, alive = psutil.wait_procs(started, timeout=60.0)
    assert alive == []
    assert not local.folder.exists(), "it held the key, the logs and the run folder of the killed engine"
    assert "Traceback" not in local.text()
    assert "was killed.\n" not in local.text()

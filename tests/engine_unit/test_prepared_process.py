"""A core that begins its imports before its arguments are known, and the message with the arguments."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rayloom_engine.common.late_arguments import ARGUMENTS_FD_FLAG, late_arguments, sender_of
from rayloom_engine.supervisor.child import Child
from rayloom_engine.supervisor.prepared import PreparedProcess, prepared_core

CORE = "rayloom_engine.core_server.process"

# Replaces a module that both processes import, so that their imports do not end.
ENDLESS_IMPORT = f"""
import os, signal, sys
if "{CORE}" in sys.orig_argv:
    reached = open(os.environ["REACHED"], "w")
    print(os.getpid(), file=reached, flush=True)
signal.pause()
"""


def test_the_message_has_the_arguments_and_copies_of_the_open_files() -> None:
    sender, receiver = socket.socketpair()
    read_end, write_end = os.pipe()
    sent = ["--run-dir", str(write_end), "--pulse-fd", str(write_end), "--parent", "7"]
    socket.send_fds(sender, [json.dumps({"arguments": sent, "fds": [write_end]}).encode()], [write_end])
    sender.close()

    arguments = late_arguments([ARGUMENTS_FD_FLAG, str(receiver.detach())])

    copy = int(arguments[3])
    assert arguments == ["--run-dir", str(write_end), "--pulse-fd", str(copy), "--parent", "7"]
    assert copy != write_end
    os.write(copy, b"alive")
    assert os.read(read_end, 5) == b"alive"
    for fd in (read_end, write_end, copy):
        os.close(fd)


def test_a_process_without_a_message_ends_with_its_sender() -> None:
    sender, receiver = socket.socketpair()
    sender.close()

    with pytest.raises(SystemExit) as ended:
        late_arguments([ARGUMENTS_FD_FLAG, str(receiver.detach())])

    assert ended.value.code == 0


def test_other_arguments_stay_as_they_are() -> None:
    assert late_arguments(["--run-dir", "x"]) == ["--run-dir", "x"]
    assert sender_of(["--run-dir", "x", "--parent", "7"]) is None


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_core_that_still_imports_names_its_server_and_ends_with_it(how: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text(ENDLESS_IMPORT)
    os.mkfifo(tmp_path / "reached")
    reached = os.open(tmp_path / "reached", os.O_RDONLY | os.O_NONBLOCK)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "REACHED": str(tmp_path / "reached")}
    server = subprocess.Popen([sys.executable, "-m", "rayloom_engine", "serve"], env=environ)
    core = None
    try:
        assert select.select([reached], [], [], 60.0)[0], "the core does not import"
        core = psutil.Process(int(os.read(reached, 20)))
        assert core.cmdline()[-2:] == ["--parent", str(server.pid)]

        server.send_signal(how)

        assert server.wait(60) == -how
        assert select.select([reached], [], [], 20.0)[0], "the core imports on without its server"
        assert os.read(reached, 20) == b"", "the core's end of the pipe is closed"
    finally:
        server.kill()
        server.wait()
        os.close(reached)
        if core is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                core.kill()


def test_only_a_server_that_will_start_has_a_prepared_core(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ([], ["doctor"], ["serve", "--help"], ["serve", "a-model", "-h"]):
        assert prepared_core(arguments) is None
    monkeypatch.setenv("RANK", "1")
    assert prepared_core(["serve", "a-model"]) is None, "rank 1 of a job has no core"


def test_the_prepared_process_runs_with_the_arguments_of_its_message() -> None:
    process = PreparedProcess(CORE).begin(["--no-such-flag"], [])

    assert process is not None
    assert process.wait(60) == 2, "argparse refuses the flag"


def test_a_discarded_process_has_ended() -> None:
    prepared = PreparedProcess(CORE)
    process = prepared._process

    prepared.discard()
    prepared.discard()

    assert process.returncode is not None


def test_only_the_first_start_takes_the_prepared_process() -> None:
    prepared = PreparedProcess(CORE)
    process = prepared._process
    child = Child("core", 5, prepared)
    child.start(CORE, ["--no-such-flag"])
    assert child.process is process
    assert process.wait(60) == 2

    child.start(CORE, ["--no-such-flag"])
    second = child.process
    assert second is not None
    assert second is not process
    assert second.wait(60) == 2


def test_another_process_takes_the_place_of_a_prepared_one_that_died() -> None:
    prepared = PreparedProcess(CORE)
    prepared._process.kill()
    prepared._process.wait()
    child = Child("core", 5, prepared)

    child.start(CORE, ["--no-such-flag"])

    assert isinstance(child.process, subprocess.Popen)
    assert child.process is not prepared._process
    assert child.process.wait(60) == 2

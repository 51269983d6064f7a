"""A core whose imports begin before its arguments are known, and the message with the arguments."""

from __future__ import annotations

import json
import os
import socket
import subprocess

import pytest

from rayloom_engine.common.late_arguments import ARGUMENTS_FD_FLAG, late_arguments
from rayloom_engine.supervisor.child import Child
from rayloom_engine.supervisor.prepared import PreparedProcess, prepared_core

CORE = "rayloom_engine.core_server.process"


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


def test_only_a_server_that_will_start_has_a_prepared_core() -> None:
    for arguments in ([], ["doctor"], ["serve", "--help"], ["serve", "a-model", "-h"]):
        assert prepared_core(arguments) is None


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

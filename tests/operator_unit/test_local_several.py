"""`rayloom-operator local` with several replicas, as a process with fake engines: starts and ends with faults.

tests/engine_real/test_local_several.py runs it with real engines: streams, restarts and an orderly end.
"""

import contextlib
import os
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from rt_local import Local, wait_until_gone, write_manifest

TWO = "  replicas: 2"


@pytest.fixture
def start(tmp_path):
    """Starts `local` with two fake engines and a fake gateway. Ends those of their processes that outlive the test."""
    started = []

    def start_local(scenario="", *flags, spec=TWO):
        environment = {"FAKE_ENGINE_PIDS": str(tmp_path / "pids"), "CUDA_VISIBLE_DEVICES": ""} | (
            {"FAKE_ENGINE": scenario} if scenario else {}
        )
        started.append(Local(tmp_path, write_manifest(tmp_path, environment, spec), *flags))
        return started[-1]

    yield start_local
    for local in started:
        local.kill()
    for pid in pids_of(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # `local` creates these folders elsewhere, because the path of the test's temporary folder is too long for them.
    for folder in {found for local in started for found in re.findall(r"/\S+/rayloom-[a-z0-9_]+", local.output)}:
        shutil.rmtree(folder, ignore_errors=True)


def pids_of(folder):
    """The process ids of the fakes and of their children."""
    pids = folder / "pids"
    return [int(pid) for pid in pids.read_text().split()] if pids.exists() else []


def folder_of(local):
    return Path(local.output.split("Logs:")[1].split()[0])


def test_a_second_ctrl_c_ends_the_wait_for_processes_that_do_not_drain(start, tmp_path):
    local = start("stubborn")
    local.wait_for("Serving. Press Ctrl-C to stop.")
    local.signal(signal.SIGINT)
    local.wait_for("Stopping. Running requests have 30 s to finish; Ctrl-C again stops at once.")
    began = time.monotonic()
    while "Stopping at once." not in local.output and time.monotonic() < began + 20.0:
        local.signal(signal.SIGINT)  # the first signals may count as repetitions by a wrapper
        time.sleep(0.2)

    assert local.exit_code() == 0
    assert time.monotonic() < began + 25.0, "less than the seconds of the drain"
    for name in ("engine-0", "engine-1", "gateway"):
        assert f"{name} did not stop in time and was killed." in local.output
    wait_until_gone(*pids_of(tmp_path))
    assert not folder_of(local).exists()


def test_an_engine_that_cannot_start_ends_all_and_its_log_is_shown(start, tmp_path):
    local = start("crash")

    assert local.exit_code() == 3
    assert "exited with code 3 before it served" in local.output
    assert " | line 40\n" in local.output
    wait_until_gone(*pids_of(tmp_path))


def test_a_gateway_that_keeps_ending_ends_all_with_its_exit_code(start, tmp_path):
    local = start("dies", spec=f"{TWO}\n  recovery: {{restartBudget: 0}}")  # the gateway ends after the sample's answer

    assert local.exit_code() == 7
    assert "rayloom-operator: gateway exited with code 7 while serving" in local.output
    wait_until_gone(*pids_of(tmp_path))
    kept = folder_of(local)
    assert sorted(path.name for path in kept.iterdir()) == ["engine-0.log", "engine-1.log", "gateway.log"]


def test_an_engine_that_is_not_kept_running_shows_in_the_exit_code_of_a_stop(start, tmp_path):
    local = start("", "--no-sample", spec=f"{TWO}\n  recovery: {{restartBudget: 0}}")
    local.wait_for("Serving.")
    children = psutil.Process(local.pid).children()
    (engine,) = [child for child in children if child.cmdline()[-1].endswith("engine-1.json")]
    engine.kill()
    local.wait_for("engine-1 was killed by SIGKILL while serving. It is started again in 300 s.")
    local.signal(signal.SIGINT)

    assert local.exit_code() == 137
    assert "rayloom-operator: engine-1 was killed by SIGKILL while serving" in local.output
    wait_until_gone(*pids_of(tmp_path))
    assert not folder_of(local).exists()


def test_an_engine_is_started_again_while_the_sample_request_has_no_end(start, tmp_path):
    local = start("silent")
    local.wait_for("> The capital")
    (engine,) = [each for each in psutil.Process(local.pid).children() if each.cmdline()[-1].endswith("engine-1.json")]
    engine.kill()
    local.wait_for("engine-1 was killed by SIGKILL while serving. It is started again")
    local.wait_for("engine-1 serves again.")
    assert "Serving. Press" not in local.output, "the sample has not ended"
    local.signal(signal.SIGINT)

    assert local.exit_code() == 0
    wait_until_gone(*pids_of(tmp_path))


def test_processes_whose_operator_is_killed_end_too(start, tmp_path):
    local = start("", "--no-sample")
    local.wait_for("Serving.")
    local.kill()

    own = [int(line.split()[0]) for line in (tmp_path / "pids").read_text().splitlines()]
    assert len(own) == 3
    wait_until_gone(*own)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("  replicas: 0", "spec.replicas: 0 suspends the service; use 1 or more to serve it on this machine"),
        (
            f"    args: {{device: cuda}}\n{TWO}",
            "spec.replicas: 2 engines need an accelerator each, and this machine has 0; use a machine with more of "
            "them, or set spec.engine.args.device to cpu",
        ),
    ],
)
def test_a_refused_manifest_starts_no_process(start, tmp_path, spec, sentence):
    local = start(spec=spec)

    assert local.exit_code() == 2
    assert sentence in local.output
    assert pids_of(tmp_path) == []


def test_a_port_given_twice_is_refused(start):
    local = start("", "--port", "18181", "--admin-port", "18181")

    assert local.exit_code() == 1
    assert "port 18181 is given twice; choose another one with --admin-port PORT" in local.output

"""Ranks that a job has started (executor external): tokens equal to those of one rank, and faults that end the job.

torchrun starts the job. If a test needs the exit code of each rank, the ranks are started one by one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rt_job import running_job
from rt_server import wait_until
from rt_streams import NUM_TOKENS, Said, completion_body, join_streams, start_streams, undisturbed

ARGUMENTS = ("--dtype", "float32", "--device", "cpu", "--served-model-name", "m", "--num-kv-blocks", "64")
STAGES = ("--executor", "external", "--pipeline-parallel-size", "2")


@pytest.fixture(scope="module")
def expected(said_by_one_rank: Callable[[int], list[Said]]) -> list[Said]:
    return said_by_one_rank(NUM_TOKENS)


def test_torchruns_ranks_give_the_tokens_of_one_rank_and_a_killed_one_ends_the_job(
    three_layers: str, expected: list[Said], tmp_path: Path
) -> None:
    shape = ("--tensor-parallel-size", "2")
    with running_job(tmp_path, "--model", three_layers, *ARGUMENTS, *shape, with_torchrun=True) as job:
        status = job.server.status()
        assert status["executor"] == "external"
        assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
        assert undisturbed(job.server) == expected
        streams, _ = start_streams(job.server, [completion_body(0, 400)])
        wait_until(lambda: bool(streams[0].tokens), 60.0, job.server.log_text)
        os.kill(status["ranks"][1]["pid"], signal.SIGKILL)
        assert job.processes[0].wait(60.0) == 1, "torchrun's own code for a rank that failed"
        text = job.server.log_text()
    assert "executor external (this is rank 0 of a job of 2)" in text
    assert re.search(r"rank 1: its (control )?connection ended.*; start the job again", text)


def test_a_killed_front_costs_its_connections_and_sigterm_lets_a_stream_finish(
    three_layers: str, expected: list[Said], tmp_path: Path
) -> None:
    with running_job(tmp_path, "--model", three_layers, *ARGUMENTS, *STAGES) as job:
        before = [rank["pid"] for rank in job.server.status()["ranks"]]
        front = job.server.children()["front"]
        front.kill()
        killed_at = time.monotonic()
        wait_until(lambda: job.server.children().get("front", front).pid != front.pid, 60.0, job.server.log_text)
        wait_until(lambda: job.server.client.get(f"{job.server.api_url}/ready").status_code == 200, 60.0, str)
        print(f"serving {time.monotonic() - killed_at:.2f} s after the front was killed")
        assert [rank["pid"] for rank in job.server.status()["ranks"]] == before

        streams, threads = start_streams(job.server, [completion_body(0, 200)])
        wait_until(lambda: bool(streams[0].tokens), 60.0, job.server.log_text)
        for process in job.processes:
            process.send_signal(signal.SIGTERM)
        join_streams(threads)
        assert (streams[0].failure, len(streams[0].tokens)) == (None, 200)
        assert streams[0].tokens[:NUM_TOKENS] == expected[0].tokens
        assert [process.wait(60.0) for process in job.processes] == [0, 0]


# When rank 0 is killed, the supervisor of rank 0 ends the core. So rank 1 loses the core, as in the case "core killed".
@pytest.mark.parametrize(
    "victim",
    ["rank 0 killed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("core killed", "rank 1 stopped"))],
)
def test_what_cannot_be_replaced_ends_every_process_with_75(
    three_layers: str, victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = ("--hang-seconds", "4", "--heartbeat-seconds", "0.2")
    last_words = tmp_path / "last-words"
    monkeypatch.setenv("RAYLOOM_TERMINATION_LOG", str(last_words))
    with running_job(tmp_path, "--model", three_layers, *ARGUMENTS, *STAGES, *hang) as job:
        ranks = [rank["pid"] for rank in job.server.status()["ranks"]]
        assert ranks[1] == job.processes[1].pid
        pids = {"core killed": job.server.children()["core"].pid, "rank 0 killed": ranks[0], "rank 1 stopped": ranks[1]}
        is_stopped = victim.endswith("stopped")
        os.kill(pids[victim], signal.SIGSTOP if is_stopped else signal.SIGKILL)
        try:
            assert job.processes[0].wait(60.0) == 75
        finally:
            os.kill(ranks[1], signal.SIGCONT)
        assert job.processes[1].wait(60.0) == 75
        text = job.server.log_text()
    causes = {
        "core killed": "core ended (signal SIGKILL), and the job with it; start the job again",
        "rank 0 killed": "rank 0 ended (signal SIGKILL), and the job with it; start the job again",
        "rank 1 stopped": "rank 1: no sign of life for",
    }
    assert causes[victim] in text
    assert "Traceback" not in text
    assert "start the job again" in last_words.read_text()


@pytest.mark.slow
def test_a_rank_that_waits_for_a_stopped_peer_ends_with_its_job(three_layers: str, tmp_path: Path) -> None:
    shape = ("--executor", "external", "--pipeline-parallel-size", "3", "--hang-seconds", "2")
    with running_job(tmp_path, "--model", three_layers, *ARGUMENTS, *shape, world_size=3) as job:
        streams, _ = start_streams(job.server, [completion_body(0, 400)])
        wait_until(lambda: bool(streams[0].tokens), 60.0, job.server.log_text)
        stopped = job.processes[1]
        stopped.send_signal(signal.SIGSTOP)
        try:
            # The main thread of rank 2 waits for hidden states. Only the loss of its core can end this wait.
            assert [job.processes[rank].wait(60.0) for rank in (0, 2)] == [75, 75]
        finally:
            stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(60.0) == 75


def test_a_model_that_a_rank_cannot_load_ends_it_and_the_first_process_with_78(
    three_layers: str, tmp_path: Path
) -> None:
    broken = shutil.copytree(three_layers, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.2.input_layernorm.weight"]  # a weight of the second stage
    save_file(weights, broken / "model.safetensors")
    arguments = ("--model", str(broken), *ARGUMENTS, *STAGES)
    # Each rank finds the fault. If rank 0 found it before rank 1 has reached the core, rank 1 would wait for a core.
    with running_job(
        tmp_path, *arguments, until=lambda job: job.processes[0].poll() is not None, is_rank_0_last=True
    ) as job:
        assert [process.wait(60.0) for process in job.processes] == [78, 78]

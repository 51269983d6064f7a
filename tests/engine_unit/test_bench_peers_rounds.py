"""The rounds of `bench peers` with small servers as engines, and its command with our own engine."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from rayloom_bench.peers.command import add_flags, parse_settings
from rayloom_bench.peers.engines.contestants import Contestant
from rayloom_bench.peers.result import PeersResult
from rayloom_bench.peers.rounds import measure_rounds, rotated
from rayloom_bench.peers.settings import PeersSettings
from rayloom_bench.peers.workloads import COMPARED, DECODE_SWEEP, PREFILL_SWEEP
from rayloom_bench.server import ServerProcess, stop_tree
from rayloom_engine.cli.commands import run
from rayloom_engine.errors import ConfigError
from rt_fake_openai import FakeOpenAI, running
from rt_peers_result import make_result


def settings_of(*flags: str) -> PeersSettings:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parse_settings(parser.parse_args(flags), ["bench", "peers", *flags])


def fake_contestant(name: str, fake: FakeOpenAI, *workload_names: str, **fields: object) -> Contestant:
    """An engine whose server is `fake` and whose memory is that of a sleeping process."""

    @contextmanager
    def start() -> Iterator[ServerProcess]:
        started_s = time.perf_counter()
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        try:
            log = Path(__file__)
            yield ServerProcess(process=process, started_s=started_s, url=fake.url, ready_path="/v1/models", log=log)
        finally:
            stop_tree(process)

    return Contestant(
        name=name, title=name, workload_names=workload_names, shown_command=f"{name} serve", start=start, **fields
    )


def measured(contestants: list[Contestant], *flags: str) -> PeersResult:
    settings = settings_of("--neighbour-seconds", "0", *flags)
    result = make_result(workloads=())
    measure_rounds(settings, contestants, 1000, result, log=lambda line: None)
    return result


def test_each_round_begins_with_another_engine() -> None:
    assert [rotated("abc", number) for number in range(4)] == [tuple("abc"), tuple("bca"), tuple("cab"), tuple("abc")]
    assert rotated([], 3) == ()


def test_every_engine_gets_its_workloads_in_every_round_with_new_prompts() -> None:
    with running(FakeOpenAI()) as one, running(FakeOpenAI()) as other:
        contestants = [fake_contestant("rayloom", one, "W1", "W3"), fake_contestant("vllm", other, "W3")]
        flags = ("--workloads", "W1,W3", "--scale", "0.1", "--rounds", "2", "--no-sweep")
        result = measured(contestants, *flags)
    assert result.failures == []
    order = [(turn.engine, turn.round_number, sorted(turn.figures)) for turn in result.turns]
    assert order == [
        ("rayloom", 1, ["W1", "W3"]),
        ("vllm", 1, ["W3"]),
        ("vllm", 2, ["W3"]),
        ("rayloom", 2, ["W1", "W3"]),
    ]
    assert all(sum(turn.pss_bytes.values()) > 1_000_000 for turn in result.turns)
    prompts = [tuple(body["prompt"]) for body in other.bodies]
    assert len(prompts) == len(set(prompts)) == 4, "a warm-up and a request in each round"
    assert {tuple(body["prompt"]) for body in one.bodies} > set(prompts), "engines get the same prompts"


def test_sampling_and_fields_of_an_engine_are_in_its_requests() -> None:
    with running(FakeOpenAI()) as fake:
        contestant = fake_contestant(
            "llama.cpp-bf16", fake, "W1s", fields_of=lambda workload: {"top_k": workload.concurrency}
        )
        measured([contestant], "--workloads", "W1s", "--scale", "0.1", "--rounds", "1", "--no-sweep")
    assert {(body["temperature"], body["top_p"], body["top_k"]) for body in fake.bodies} == {(0.8, 0.95, 16)}


def test_memory_is_read_after_every_workload_and_a_stream_is_measured_beside_a_busy_process() -> None:
    with running(FakeOpenAI()) as fake:
        contestant = fake_contestant("rayloom", fake, "W1", "W3")
        flags = ("--workloads", "W1,W3", "--scale", "0.1", "--rounds", "1", "--no-sweep", "--neighbour-seconds")
        for seconds in ("0.2", "2", "20"):  # on a busy machine, a short time may be over before the first token
            result = measured([contestant], *flags, seconds)
            assert result.failures == []
            (turn,) = result.turns
            if turn.neighbour is not None and turn.neighbour.alone_tok_s and turn.neighbour.beside_tok_s:
                break
    assert list(turn.pss_after) == ["W1", "W3"]
    assert turn.pss_bytes == turn.pss_after["W3"]
    assert turn.neighbour is not None
    assert turn.neighbour.alone_tok_s > 0 and turn.neighbour.beside_tok_s > 0


def test_sweeps_come_once_after_the_rounds() -> None:
    with running(FakeOpenAI()) as fake:
        contestant = fake_contestant("rayloom", fake, "W3", "D1", "P128")
        result = measured([contestant], "--workloads", "W3", "--scale", "0.1", "--rounds", "2")
    assert [sorted(turn.figures) for turn in result.turns] == [["W3"], ["W3"]]
    assert [(turn.round_number, sorted(turn.figures)) for turn in result.sweep_turns] == [(0, ["D1", "P128"])]


def test_an_engine_that_does_not_start_fails_and_the_others_go_on() -> None:
    with running(FakeOpenAI()) as fake:
        working = fake_contestant("rayloom", fake, "W3")

        def start() -> AbstractContextManager[ServerProcess]:
            from rayloom_bench.server import running_process

            command = [sys.executable, "-c", "raise SystemExit('no such model')"]
            return running_process("vLLM", command, {}, port=1, ready_path="/health")

        broken = Contestant(name="vllm", title="vLLM 0", workload_names=("W3",), shown_command="", start=start)
        flags = ("--workloads", "W3", "--scale", "0.1", "--rounds", "1", "--no-sweep")
        result = measured([broken, working], *flags)
    assert [turn.engine for turn in result.turns] == ["rayloom"]
    (failure,) = result.failures
    assert failure.name == "vLLM 0, round 1"
    assert "vLLM ended with exit code 1:\nno such model" in failure.reason


def test_a_workload_with_a_wrong_answer_has_no_figures() -> None:
    # The server gets three requests. The chat at the start has no number in `faults`. Request 0 is the warm-up, and
    # request 1 is measured.
    with running(FakeOpenAI(faults={1: "short"})) as fake:
        contestant = fake_contestant("vllm", fake, "W3")
        result = measured([contestant], "--workloads", "W3", "--scale", "0.1", "--rounds", "1", "--no-sweep")
    assert result.turns[0].figures == {}
    (failure,) = result.failures
    assert failure.name == "W3 vllm, round 1 request 0"
    assert "127 output tokens, 128 asked for" in failure.reason


def test_all_workloads_and_engines_are_measured_by_default() -> None:
    settings = settings_of()
    assert [workload.name for workload in settings.workloads] == ["W1", "W1s", "W1j", "W2", "W3", "W4"]
    assert settings.workloads == COMPARED
    assert settings.sweeps == (*DECODE_SWEEP, *PREFILL_SWEEP)
    assert settings.engines == ("rayloom", "vllm", "llama.cpp-bf16", "llama.cpp-f16", "rayloom-fp32")
    assert settings.command == "rayloom-engine bench peers"
    assert settings.compares_answers and settings.page_folder is None and not settings.is_install_only


def test_a_short_run_keeps_the_lengths() -> None:
    settings = settings_of("--workloads", "W1s,W4", "--scale", "0.25", "--no-sweep")
    assert [workload.description for workload in settings.workloads] == [
        "16 requests, 16 at a time, 128 in / 64 out, temperature 0.8, top_p 0.95",
        "4 requests, 4 at a time, 2048 in / 32 out",
    ]
    assert settings.sweeps == ()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--rounds", "0"), "--rounds: 0 given"),
        (("--neighbour-seconds", "-1"), "--neighbour-seconds: -1 given; use 0 to 600"),
        (("--neighbour-seconds", "nan"), "--neighbour-seconds: nan given"),
        (("--engines", "ollama"), "--engines: 'ollama' given"),
        (("--workloads", "W9"), "W1, W1s, W1j, W2, W3, W4"),
        (("--page", "/no/such/place/at/all"), "--page: the folder /no/such/place/at does not exist"),
        (("--json", "/no/such/file"), "--json: the folder /no/such does not exist"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_installed(flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        settings_of(*flags)


def test_the_command_measures_our_engine_and_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "peers.json"
    flags = ["--engines", "rayloom", "--workloads", "W3", "--scale", "0.1", "--rounds", "1", "--no-sweep"]
    flags += ["--no-answers", "--neighbour-seconds", "0.2", "--page", str(tmp_path / "page"), "--json", str(file)]
    assert run(["bench", "peers", *flags]) == 0
    printed = capsys.readouterr().out
    page = (tmp_path / "page" / "peers.md").read_text()
    assert printed == page + "\n"
    assert "rayloom-engine serve --model builtin://smollm2-135m --dtype bfloat16" in page
    assert str(tmp_path) not in page
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == ["peers-throughput.svg", "peers.md"]
    (turn,) = json.loads(file.read_text())["turns"]
    assert turn["pss_bytes_after"] == {"W3": turn["pss_bytes"]}
    assert {name.split()[0] for name in turn["pss_bytes"]} >= {"rayloom_engine", "rayloom_engine.front"}
    assert turn["neighbour"].keys() == {"alone_tok_s", "beside_tok_s"}
    assert (turn["engine"], turn["figures"]["W3"]["output_tokens"]) == ("rayloom", 128)

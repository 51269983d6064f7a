"""`bench quantised`: its files, the ratios on its page, and its rounds with small servers.

llama.cpp is not built here, because a build takes minutes. `make bench-peers` builds it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import pytest

from rayloom_bench.client import Failure
from rayloom_bench.peers.answers.agreement import Agreement
from rayloom_bench.quantised import rounds
from rayloom_bench.quantised.files import (
    BUILTIN,
    CHOICES,
    WIDE,
    FileChoice,
    QuantisedFile,
    WideShape,
    tensor_bytes,
    wide_matrices,
    write_wide,
)
from rayloom_bench.quantised.page import memory_limit_tok_s, page
from rayloom_bench.quantised.result import LLAMA, OURS, FileResult, QuantisedResult, ServerSample
from rayloom_bench.quantised.rounds import FileServer, RoundsPlan, measure, servers
from rayloom_bench.server import ServerFailed, ServerProcess
from rayloom_bench.workload import parse_workloads
from rayloom_engine.cli.commands import run
from rayloom_engine.models.checkpoint.gguf_convert import convert_gguf
from rt_gguf import write_gguf
from rt_tiny import tiny_variant

SMALL = WideShape(width=256, intermediate=512, num_layers=1, num_heads=4, num_kv_heads=2)
FILE = QuantisedFile(choice=FileChoice(BUILTIN, "Q8_0"), path=Path("/f/builtin-Q8_0.gguf"), weight_bytes=200_000_000)


def test_the_wide_model_has_dimensions_that_are_multiples_of_256() -> None:
    sizes = wide_matrices(WideShape(), vocab_size=49152)
    assert all(number % 256 == 0 for size in sizes.values() for number in size)
    num_parameters = sum(outputs * inputs for outputs, inputs in sizes.values())
    assert 0.3e9 < num_parameters < 0.5e9


def test_every_model_has_an_8_bit_and_a_4_bit_file() -> None:
    assert {(each.model, each.kind[:2]) for each in CHOICES} == {
        (model, bits) for model in (BUILTIN, WIDE) for bits in ("Q8", "Q4")
    }
    assert len({each.file_name for each in CHOICES}) == len(CHOICES)


def test_the_wide_file_is_a_model_that_this_engine_reads(tmp_path: Path) -> None:
    builtin, path, folder = tmp_path / "builtin.gguf", tmp_path / "wide.gguf", tmp_path / "converted"
    checkpoint = tiny_variant(tmp_path / "original", "llama-tied")
    write_gguf(builtin, checkpoint)
    write_wide(builtin, path, SMALL)
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    matrices = wide_matrices(SMALL, vocab_size)
    tensors = {tensor.name: tuple(tensor.data.shape) for tensor in gguf.GGUFReader(path).tensors}
    assert {name.removesuffix(".weight"): size for name, size in tensors.items() if len(size) == 2} == matrices
    norms = 3 * SMALL.width * 4  # in float32: two norms of the layer and one of the model
    assert tensor_bytes(path) == norms + 2 * sum(outputs * inputs for outputs, inputs in matrices.values())
    folder.mkdir()
    convert_gguf(path, folder)
    config = json.loads((folder / "config.json").read_text())
    assert (config["hidden_size"], config["intermediate_size"], config["vocab_size"]) == (256, 512, vocab_size)


def sampled(ours: list[float], theirs: list[float]) -> FileResult:
    """A result of W3 with these tokens per second in rounds 1, 2 and so on.

    A token takes 1000 ms of CPU time, divided by the tokens per second.
    """
    found = FileResult(file=FILE)
    for server, values in ((OURS, ours), (LLAMA, theirs)):
        for number, value in enumerate(values, start=1):
            found.add(server, "W3", number, ServerSample(output_tok_s=value, cpu_ms_per_token=1000 / value))
    return found


@pytest.mark.parametrize(
    ("ours", "theirs", "row"),
    [
        ([60.0, 130.0], [50.0, 100.0], "1.25x (1.20 to 1.30) | met"),
        ([110.0], [100.0], "1.10x | missed"),
        ([110.0], [], "- | not measured"),
    ],
)
def test_the_page_compares_servers_in_the_same_round(ours: list[float], theirs: list[float], row: str) -> None:
    result = QuantisedResult(conditions="A chip.", workloads=parse_workloads("W3", 1.0), files=[sampled(ours, theirs)])
    assert f"| SmolLM2-135M, Q8_0, W3: at least 1.2x llama.cpp | {row} |" in page(result).splitlines()


def test_the_page_has_the_limit_of_the_memory_the_answers_and_the_failures() -> None:
    found = sampled([60.0], [50.0])
    found.agreement = Agreement(num_equal=1, num_prompts=2, lengths=(64, 32))
    result = QuantisedResult(
        conditions="A chip.",
        workloads=parse_workloads("W3", 1.0),
        files=[found],
        read_bytes_s=20e9,
        failures=[Failure(name="wide, llama.cpp, round 1", reason="it ended\nlog")],
    )
    assert memory_limit_tok_s(result, found) == 100.0, "20 GB/s / 200 MB"
    lines = page(result).splitlines()
    assert (
        "A step reads 200 MB of weights. This machine reads 20.0 GB/s, so its memory allows one stream at most 100 "
        "tokens per second. 1 of 2 greedy answers are those of llama.cpp; the first 48.0 tokens are equal on average."
    ) in lines
    assert "| W3 | rayloom | 60.0 | 1.20 | 16.7 | 1.20 |" in lines
    assert "| W3 | llama.cpp | 50.0 | - | 20.0 | - |" in lines
    assert "- wide, llama.cpp, round 1: it ended" in lines


def test_both_servers_get_the_same_file_and_threads_and_llama_cpp_its_best_settings() -> None:
    found = {each.name: each.shown_command for each in servers(FILE, Path("/peers/llama"), 2)}
    assert found == {
        "rayloom": "rayloom-engine serve --model builtin-Q8_0.gguf --threads 2",
        "llama.cpp": "llama-server -m builtin-Q8_0.gguf -t 2 -np 16 -c 36864 -fa on",
        "rayloom int8": "rayloom-engine serve --model builtin-Q8_0.gguf --threads 2 --quantization int8",
    }


def test_a_server_that_does_not_start_is_a_failure_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounds, "run_child", lambda *_, **__: {"read_bytes_s": 1e9})
    started = []

    @contextmanager
    def fails(name: str) -> Iterator[ServerProcess]:
        started.append(name)
        raise ServerFailed(f"{name} ended")
        yield

    of_file = [FileServer(name=name, shown_command=name, start=lambda name=name: fails(name)) for name in "ab"]
    result = QuantisedResult(conditions="", workloads=parse_workloads("W3", 1.0))
    plan = RoundsPlan(num_rounds=2, seed=0, num_threads=1, vocab_size=100)
    measure([(FILE, of_file)], plan, result, log=lambda line: None)
    assert started == ["a", "b", "b", "a"], "each round begins with another server"
    assert [each.name for each in result.failures[:2]] == [
        "SmolLM2-135M, Q8_0, a, round 1",
        "SmolLM2-135M, Q8_0, b, round 1",
    ]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--models", "huge"], "--models: 'huge' given; name one or more of builtin, wide"),
        (["--rounds", "0"], "--rounds: 0 given, it must be 1 or more"),
        (["--page", "/no/such/place"], "--page: /no/such/place cannot be used as a folder"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_installed(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "quantised", *flags]) == 78
    assert reason in capsys.readouterr().err

"""Requests for a simulated fleet: generators, readers of trace files, and prompts of segments."""

from __future__ import annotations

import gzip
import json
import math
import os
import statistics
from pathlib import Path

import pytest

from rayloom_bench.figures import percentile
from rayloom_bench.fleet.arrivals import Arrival, Segment
from rayloom_bench.fleet.trace_files import read_trace
from rayloom_bench.fleet.traffic import TRAFFIC, SharedPrefixes, generate, generate_shared
from rayloom_engine.errors import ConfigError
from rt_fleet import best_hit_tokens

# Folder with the traces. They are not part of the repository.
TRACES = Path(os.environ.get("RAYLOOM_TRACES", "traces"))


def test_prompts_share_a_prefix_as_far_as_their_segments_do() -> None:
    first = Arrival(at_s=0.0, prompt=(Segment(1, 40), Segment(2, 8)), num_output=1)
    second = Arrival(at_s=0.0, prompt=(Segment(1, 32), Segment(3, 16)), num_output=1)
    ids, others = first.prompt_ids(), second.prompt_ids()

    assert len(ids) == len(others) == 48
    assert ids[:32] == others[:32]
    assert not set(ids[32:]) & set(others[32:])
    # The first prompt is new. The second finds 2 blocks of 16. A repetition of the second finds all of its blocks but
    # the last.
    assert best_hit_tokens([first, second], 16) == 32
    assert best_hit_tokens([first, second, second], 16) == 64


def test_the_same_seed_gives_the_same_requests() -> None:
    def some(seed: int) -> list[Arrival]:
        return list(generate(TRAFFIC["chat"], rate=2.0, seconds=60.0, divisor=1.0, seed=seed))

    assert some(1) == some(1) != some(2)


@pytest.mark.parametrize("name", ["chat", "long-chat"])
def test_a_generator_has_the_rate_and_the_medians_of_its_trace(name: str) -> None:
    traffic = TRAFFIC[name]
    arrivals = list(generate(traffic, rate=5.0, seconds=2000.0, divisor=1.0, seed=1))

    # 10,000 requests; the standard deviation of the number is sqrt(10,000 / gamma_shape).
    assert len(arrivals) == pytest.approx(10_000, abs=4 * math.sqrt(10_000 / traffic.gamma_shape))
    assert statistics.median(each.num_output for each in arrivals) == pytest.approx(
        math.exp(traffic.outputs.mu), rel=0.1
    )
    assert statistics.median(each.num_prompt for each in arrivals) == pytest.approx(
        math.exp(traffic.inputs.mu), rel=0.1
    )
    assert max(each.num_prompt for each in arrivals) <= traffic.inputs.most


def test_a_long_chat_reuses_as_much_as_its_trace() -> None:
    arrivals = list(generate(TRAFFIC["long-chat"], rate=3.4, seconds=1500.0, divisor=12.0, seed=1))

    share = best_hit_tokens(arrivals, 16) / sum(each.num_prompt for each in arrivals)

    assert 0.30 < share < 0.43  # 36.6 % of the trace's blocks of 512 tokens


def test_shared_prefixes_are_drawn_by_zipf() -> None:
    arrivals = list(generate_shared(SharedPrefixes(), num_requests=4000, seed=1))
    counts = [sum(each.prompt[0].text == number for each in arrivals) for number in range(24)]

    # The sum of 1/k for k = 1 .. 24 is 3.776.
    assert counts[0] == pytest.approx(4000 / 3.776, rel=0.1)
    assert counts[3] == pytest.approx(4000 / 3.776 / 4, rel=0.2)
    assert {each.num_prompt for each in arrivals} == {1056}


def test_both_kinds_of_trace_files_are_read(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.6805900,396,109\n"
    )
    mooncake = tmp_path / "mooncake.jsonl.gz"
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [0, 3]},
    ]
    mooncake.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))

    first, second = read_trace(azure, speed=2.0, divisor=2.0)
    assert (first.at_s, first.num_prompt, first.num_output) == (0.0, 187, 22)
    assert (second.at_s, second.num_prompt, second.num_output) == (2.0, 198, 54)
    first, second = read_trace(mooncake)
    assert (second.at_s, second.num_prompt, second.num_output) == (2.0, 600, 7)
    assert first.prompt_ids()[:512] == second.prompt_ids()[:512]
    assert first.prompt_ids()[512] != second.prompt_ids()[512]


@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl"])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(ConfigError, match="--trace"):
        read_trace(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="ContextTokens"):
        read_trace(path)


def distance(some: list[int], others: list[int]) -> float:
    """The Kolmogorov-Smirnov distance: the largest difference between the two cumulative distributions."""
    values = sorted({*some, *others})
    first, second = sorted(some), sorted(others)
    largest = 0.0
    i = j = 0
    for value in values:
        while i < len(first) and first[i] <= value:
            i += 1
        while j < len(second) and second[j] <= value:
            j += 1
        largest = max(largest, abs(i / len(first) - j / len(second)))
    return largest


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("chat", "azure_conv_2023.csv.gz"),
        ("code", "azure_code_2023.csv.gz"),
        ("long-chat", "mooncake_conversation.jsonl.gz"),
    ],
)
def test_generated_lengths_are_distributed_as_in_the_trace(name: str, file: str) -> None:
    path = TRACES / file
    if not path.exists():
        pytest.skip(f"the trace {file} is not in the folder RAYLOOM_TRACES")
    trace = read_trace(path)
    made = list(generate(TRAFFIC[name], rate=5.0, seconds=1000.0, divisor=1.0, seed=1))

    assert distance([each.num_prompt for each in made], [each.num_prompt for each in trace]) < 0.2
    # The limit is higher for outputs. In long chats half of the outputs are near 350 tokens, and no lognormal
    # distribution has such a peak.
    assert distance([each.num_output for each in made], [each.num_output for each in trace]) < 0.22
    if name != "code":  # bursts of "code" make the hourly number of requests vary too much
        assert len(trace) / trace[-1].at_s == pytest.approx(TRAFFIC[name].rate, rel=0.05)
    assert percentile([each.num_output for each in made], 0.9) < 2000

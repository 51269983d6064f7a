"""Answers with grammars and drafts from ranks that divide a model: the same tokens, also if a rank is killed.

The drafts are n-grams, or those of a draft model on the rank that samples.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from rt_faults import aim, breakable_server, slow_steps
from rt_server import RunningServer, Stream, wait_until

ARGUMENTS = ("--dtype", "float32", "--served-model-name", "m", "--num-kv-blocks", "256")
LAYOUT = ("--executor", "mp", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")
RECORDS = {"type": "array", "items": {"enum": [{"id": 1, "name": "Ada"}, {"id": 2, "name": "Max"}]}, "minItems": 20}
BODIES: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"json": RECORDS}, "temperature": 0.0},
    {"structured_outputs": {"regex": "((left|right|straight) then ){40,90}"}, "temperature": 0.8, "min_tokens": 90},
    {"structured_outputs": {"json": RECORDS}, "temperature": 0.8, "frequency_penalty": 0.3},
    {"grammar": 'root ::= ("tick " | "tock "){60,90} "end"', "temperature": 0.4},
)
NUM_TOKENS = 240


def _streams(server: RunningServer, **fields: Any) -> tuple[list[Stream], list[threading.Thread]]:
    streams = [Stream() for _ in BODIES]
    threads = []
    for number, (stream, body) in enumerate(zip(streams, BODIES, strict=True)):
        whole = {"model": "m", "prompt": "Where?", "max_tokens": NUM_TOKENS, "seed": number, **body, **fields}
        threads.append(threading.Thread(target=stream.run, args=(server.api_url, whole)))
        threads[-1].start()
    return streams, threads


def _answers(streams: list[Stream], threads: list[threading.Thread]) -> list[tuple[list[str], str | None]]:
    for thread in threads:
        thread.join(180.0)
    assert [stream.failure for stream in streams] == [None] * len(streams)
    return [(stream.tokens, stream.finish_reason) for stream in streams]


def test_shards_and_stages_verify_drafts_of_answers_with_grammars_across_a_kill(
    tmp_path: Path, three_layers: str
) -> None:
    with breakable_server(tmp_path, "--model", three_layers, *ARGUMENTS, *LAYOUT, "--speculation", "ngram") as server:
        expected = _answers(*_streams(server, speculation=False))
        assert server.status()["speculation"] == {"draft_tokens": 0, "accepted_tokens": 0}
        assert _answers(*_streams(server)) == expected
        num_tokens = sum(len(tokens) for tokens, _ in expected)

        def speculation() -> dict[str, int]:
            return server.status()["speculation"]

        # The status is older than the last tokens.
        wait_until(lambda: speculation()["accepted_tokens"] > num_tokens / 8, 60.0, lambda: str(speculation()))
        kill = aim(server, "rank 3", "killed")
        with slow_steps(tmp_path):
            streams, threads = _streams(server)
            wait_until(
                lambda: all(len(stream.tokens) >= 24 for stream in streams), 60.0, lambda: f"{streams}", every_s=0.005
            )
            kill()
            received = [len(stream.tokens) for stream in streams]
        assert max(received) < NUM_TOKENS * 3 / 4, f"the fault came too late: {received}"
        assert _answers(streams, threads) == expected
        assert len(server.status()["recoveries"]) == 1


def test_a_rank_with_a_draft_model_is_killed(tmp_path: Path, three_layers: str) -> None:
    shards = ("--executor", "mp", "--tensor-parallel-size", "2")
    draft = ("--speculation", "draft", "--draft-model", three_layers)
    with breakable_server(tmp_path, "--model", three_layers, *ARGUMENTS, *shards, *draft) as server:
        expected = _answers(*_streams(server, speculation=False, max_tokens=100))
        kill = aim(server, "rank 0", "killed")
        with slow_steps(tmp_path):
            streams, threads = _streams(server, max_tokens=100)
            wait_until(
                lambda: all(len(stream.tokens) >= 12 for stream in streams), 60.0, lambda: f"{streams}", every_s=0.005
            )
            kill()
        assert _answers(streams, threads) == expected
        assert len(server.status()["recoveries"]) == 1
        drafted = server.status()["speculation"]
        assert drafted["accepted_tokens"] > 0, f"{drafted}"

"""Greedy answers of the engines: the requests for token ids, and the comparison of these ids."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_bench.endpoint import Endpoint, EndpointError
from rayloom_bench.peers.answers import agreement
from rayloom_bench.peers.answers.agreement import (
    Agreement,
    answers_of,
    compare,
    end_ids,
    equal_length,
    reference_answers,
    until_end,
)
from rt_tiny import tiny_checkpoint

END = frozenset((0, 2))
IDS = st.lists(st.integers(0, 5)).map(tuple)


@contextmanager
def server_of(document: object) -> Iterator[tuple[Endpoint, list[tuple[str, dict]]]]:
    """A server that answers every POST with `document`, and the requests that it received."""
    requests: list[tuple[str, dict]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.path, json.loads(body)))
            answer = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            """Logs nothing: the test reads `requests`."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Endpoint(base_url=f"http://127.0.0.1:{server.server_port}", model_name="m"), requests
        finally:
            server.shutdown()
            thread.join()


def test_answers_are_compared_up_to_their_end() -> None:
    found = compare([(5, 6, 2), (5, 6), (5, 7)], [(5, 6), (5, 6, 0, 9), (5, 6)], END)
    assert found == Agreement(num_equal=2, num_prompts=3, lengths=(2, 2, 1))
    assert found.mean_length == pytest.approx(5 / 3)


def test_an_answer_that_ends_early_is_not_equal() -> None:
    assert compare([(5, 2)], [(5, 6)], END).num_equal == 0


@given(IDS, IDS)
def test_equal_lengths_end_at_the_first_difference(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    length = equal_length(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


@given(IDS)
def test_no_end_is_left_in_an_answer(ids: tuple[int, ...]) -> None:
    kept = until_end(ids, END)
    assert not END & set(kept)
    assert ids[: len(kept)] == kept and (len(kept) == len(ids) or ids[len(kept)] in END)


@given(IDS)
def test_an_answer_agrees_with_itself(ids: tuple[int, ...]) -> None:
    assert compare([ids], [ids], END).num_equal == 1


def test_vllm_and_ours_return_ids_with_a_completion() -> None:
    with server_of({"choices": [{"token_ids": [5, 6]}]}) as (endpoint, requests):
        assert answers_of(endpoint, [(1, 2), (3,)], "vllm") == ((5, 6), (5, 6))
    assert [path for path, _ in requests] == ["/v1/completions"] * 2
    assert requests[0][1] == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 64,
        "temperature": 0,
        "return_token_ids": True,
    }


def test_llama_cpp_returns_ids_at_an_address_of_its_own() -> None:
    with server_of({"tokens": [7]}) as (endpoint, requests):
        assert answers_of(endpoint, [(1, 2)], "llama.cpp") == ((7,),)
    assert requests == [("/completion", {"prompt": [1, 2], "n_predict": 64, "temperature": 0, "return_tokens": True})]


@pytest.mark.parametrize("document", [{}, {"choices": []}, {"choices": [{"token_ids": None}]}, {"choices": [{}]}])
def test_an_answer_without_ids_is_refused(document: dict) -> None:
    with server_of(document) as (endpoint, _), pytest.raises(EndpointError, match="without a list of token ids"):
        answers_of(endpoint, [(1,)], "vllm")


def test_the_reference_is_computed_once_for_the_same_prompts_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "tiny")
    prompts = [(5, 6, 7), (8,)]
    first = reference_answers(checkpoint, prompts, threads=1, cache=tmp_path / "cache")
    assert len(first) == 2 and 0 < len(first[0]) <= 64
    (file,) = (tmp_path / "cache").iterdir()
    file.write_text("[[1], [2]]")
    assert reference_answers(checkpoint, prompts, threads=1, cache=tmp_path / "cache") == ((1,), (2,))
    # For other prompts or another model, transformers computes answers again. Its import takes 4 s of CPU time.
    monkeypatch.setattr(agreement, "run_child", lambda module, job, threads: {"answers": [[len(job["prompts"])]]})
    assert reference_answers(checkpoint, prompts[:1], threads=1, cache=tmp_path / "cache") == ((1,),)
    assert reference_answers(tmp_path / "other", prompts, threads=1, cache=tmp_path / "cache") == ((2,),)


def test_the_ends_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    tokens = [{"id": 0, "content": "<|endoftext|>"}, {"id": 1, "content": "<|im_start|>"}]
    tokens.append({"id": 2, "content": "<|im_end|>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    assert end_ids(tmp_path) == END

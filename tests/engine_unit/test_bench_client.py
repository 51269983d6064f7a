"""The bench against a small server with right and wrong answers: the failure for a wrong answer names the request.

Other files test measurements of our own engine and of transformers. No test checks the machine's rates, because their
values are unknown.
"""

import argparse
import json
from pathlib import Path

import pytest

from rayloom_bench import add_flags
from rayloom_bench.child import ChildFailed, run_child
from rayloom_bench.client import RequestOptions, first_chat_token, run_workload
from rayloom_bench.endpoint import Endpoint, EndpointError, base_url, call_json, first_model_name
from rayloom_bench.events import EventSplitter, parse_event
from rayloom_bench.text_prompts import token_counter
from rayloom_bench.workload import Workload, token_prompts
from rayloom_engine.errors import ConfigError
from rt_fake_openai import FakeOpenAI, running

WORKLOAD = Workload(name="S", num_requests=6, concurrency=3, num_own=4, num_output=5)
PROMPTS = token_prompts(WORKLOAD, seed=0, vocab_size=1000)


def endpoint_of(fake: FakeOpenAI) -> Endpoint:
    return Endpoint(base_url=fake.url, model_name="fake-model")


def bench(*flags: str) -> int:
    """The exit code of `rayloom-engine bench FLAGS`."""
    parser = argparse.ArgumentParser()
    add_flags(parser, [])
    args = parser.parse_args(flags)
    return args.run(args)


def test_right_answers_are_recorded_in_order() -> None:
    finished = []
    with running(FakeOpenAI()) as fake:
        outcome = run_workload(endpoint_of(fake), WORKLOAD, PROMPTS, on_finished=lambda: finished.append(1))
    assert outcome.failures == ()
    assert [(r.index, r.num_prompt, r.num_output) for r in outcome.records] == [(i, 4, 5) for i in range(6)]
    assert all(r.start_s <= r.arrivals_s[0] <= r.last_s <= r.end_s for r in outcome.records)
    assert len(finished) == 6


def test_the_concurrency_is_that_of_the_workload() -> None:
    with running(FakeOpenAI(num_at_once=3)) as fake:
        assert run_workload(endpoint_of(fake), WORKLOAD, PROMPTS).failures == ()
    assert fake.most_active == 3


def test_requests_ask_for_an_exact_greedy_stream_with_usage() -> None:
    with running(FakeOpenAI()) as fake:
        run_workload(endpoint_of(fake), WORKLOAD, PROMPTS)
    assert sorted(fake.bodies, key=lambda body: PROMPTS.index(tuple(body["prompt"])))[0] == {
        "model": "fake-model",
        "prompt": list(PROMPTS[0]),
        "max_tokens": 5,
        "min_tokens": 5,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_servers_that_refuse_ignore_eos_are_not_sent_it() -> None:
    with running(FakeOpenAI()) as fake:
        run_workload(endpoint_of(fake), WORKLOAD, PROMPTS, options=RequestOptions(ignores_eos=False))
    assert not {"ignore_eos", "min_tokens"} & fake.bodies[0].keys()


@pytest.mark.parametrize(("reuses", "num_connections"), [(True, 1), (False, 3)])
def test_connections_are_reused_unless_the_options_say_otherwise(reuses: bool, num_connections: int) -> None:
    one_at_a_time = Workload(name="S", num_requests=3, concurrency=1, num_own=4, num_output=5)
    options = RequestOptions(reuses_connections=reuses)
    with running(FakeOpenAI()) as fake:
        assert run_workload(endpoint_of(fake), one_at_a_time, PROMPTS[:3], options=options).failures == ()
    assert len(fake.connections) == num_connections


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("short", "4 output tokens, 5 asked for"),
        ("miscounted prompt", "3 prompt tokens counted, 4 sent"),
        ("no done", "without [DONE]"),
        ("no usage", "no usage"),
        ("error event", "the core is gone"),
        ("not json", "not a chunk"),
        ("status", "HTTP 429"),
        ("cut", ""),
    ],
)
def test_wrong_answer_fails_its_request_by_name_and_no_other(fault: str, reason: str) -> None:
    one_at_a_time = Workload(name="S", num_requests=3, concurrency=1, num_own=4, num_output=5)
    with running(FakeOpenAI(faults={1: fault})) as fake:
        outcome = run_workload(endpoint_of(fake), one_at_a_time, PROMPTS[:3], label="warm-up")
    assert [record.index for record in outcome.records] == [0, 2]
    (failure,) = outcome.failures
    assert failure.name == "S warm-up request 1"
    assert reason in failure.reason and failure.reason
    assert len(fake.bodies) == 3  # nothing was sent again


def test_unreachable_server_fails_every_request() -> None:
    with running(FakeOpenAI()) as fake:
        pass
    outcome = run_workload(endpoint_of(fake), WORKLOAD, PROMPTS)
    assert [failure.name for failure in outcome.failures] == [f"S request {index}" for index in range(6)]


def test_chat_stream_starts_with_its_first_text() -> None:
    assert not parse_event(b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}').has_new_token
    assert parse_event(b'{"choices": [{"delta": {"content": "P"}}]}').has_new_token
    with running(FakeOpenAI()) as fake:
        assert first_chat_token(endpoint_of(fake)) > 0


def test_completion_chunk_without_text_is_a_token_unless_it_only_ends_the_stream() -> None:
    assert parse_event(b'{"choices": [{"text": "", "finish_reason": null}]}').has_new_token
    assert not parse_event(b'{"choices": [{"text": "", "finish_reason": "length"}]}').has_new_token
    assert not parse_event(b'{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}').has_new_token


def test_events_are_split_at_lines_for_any_pieces_of_bytes() -> None:
    data = b': ping\n\ndata: {"a": 1}\r\n\r\ndata:[DONE]\n\n'
    for cut in range(len(data) + 1):
        splitter = EventSplitter()
        assert splitter.feed(data[:cut]) + splitter.feed(data[cut:]) == [b'{"a": 1}', b"[DONE]"]


def test_tokens_are_counted_by_a_server_with_tokenize() -> None:
    with running(FakeOpenAI()) as fake:
        count_tokens = token_counter(endpoint_of(fake))
        assert count_tokens is not None and count_tokens(" company name") == 3
    with running(FakeOpenAI(has_tokenize=False)) as fake:
        assert token_counter(endpoint_of(fake)) is None


def test_model_name_and_address_are_found() -> None:
    assert base_url("http://host:1/v1/") == "http://host:1"
    with pytest.raises(ConfigError, match="http://"):
        base_url("host:1")
    with running(FakeOpenAI()) as fake:
        assert first_model_name(fake.url, {}) == "fake-model"
        with pytest.raises(EndpointError, match="404"):
            call_json(f"{fake.url}/nowhere")


def test_command_measures_a_url_and_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    with running(FakeOpenAI()) as fake:
        flags = ("--url", fake.url, "--name", "fake", "--workloads", "W1,W3", "--scale", "0.25", "--no-limit")
        assert bench(*flags, "--seed", "9", "--json", str(file)) == 0
    written = json.loads(file.read_text())
    assert written["seed"] == 9
    assert [(each["name"], each["engines"][0]["num_requests"]) for each in written["workloads"]] == [
        ("W1", 16),
        ("W3", 2),
    ]
    shown = capsys.readouterr()
    assert "seed 9" in shown.out and "W3: 2 requests, one at a time, 128 in / 128 out" in shown.out
    assert len(fake.bodies) == 16 + 16 + 1 + 2  # each set after its warm-up


def test_command_fails_and_names_the_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    with running(FakeOpenAI(faults={1: "short"})) as fake:  # request 0 is the warm-up
        flags = ("--url", fake.url, "--workloads", "W3", "--scale", "0.25", "--no-limit", "--json", str(file))
        assert bench(*flags) == 1
    assert "FAILED W3 request 0: 127 output tokens, 128 asked for" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["failures"] == [{"name": "W3 request 0", "reason": "127 output tokens, 128 asked for"}]
    assert written["workloads"][0]["engines"] == []


def test_command_sends_text_instead_of_ids() -> None:
    with running(FakeOpenAI(has_tokenize=False)) as fake:
        flags = ("--url", fake.url, "--workloads", "W3", "--scale", "0.1", "--no-limit")
        assert bench(*flags, "--text-prompts", "--omit-ignore-eos") == 0
    assert [len(body["prompt"].split()) for body in fake.bodies] == [128, 128]


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("--url", "http://h", "--", "--max-num-seqs", "4"), "--max-num-seqs"),
        (("--url", "http://h", "--compare", "transformers"), "add --model"),
        (("--compare", "transformers", "--text-prompts"), "remove --text-prompts"),
        (("--compare-dtype", "int8"), "bfloat16, float16, float32"),
        (("--threads", "0"), "1 or more"),
        (("--json", "/no/such/folder/x.json"), "does not exist"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(flags: tuple[str, ...], hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        bench(*flags)


def test_unreachable_server_ends_the_command_with_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeOpenAI()) as fake:
        pass
    assert bench("--url", fake.url, "--no-limit") == 1
    assert fake.url in capsys.readouterr().err


def test_child_without_a_result_is_an_error() -> None:
    with pytest.raises(ChildFailed, match="exit code 1 and no result"):
        run_child("rayloom_bench.no_such_module", {}, threads=1)

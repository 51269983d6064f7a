"""Beam search over HTTP against a fake core with bytes as tokens. The tests set the most likely tokens."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from rayloom_engine.front.generation import beam_search
from rayloom_engine.front.generation.beam_search import BeamSearch
from rayloom_engine.front.generation.generation import LANES_AT_ONCE
from rayloom_engine.front.http.errors import ClientGone
from rayloom_engine.front.http.tenant import Caller
from rayloom_engine.sampling_params import SamplingParams
from rt_byte_model import END
from rt_fake_core import FINGERPRINT
from rt_front import FrontUnderTest, events, running_front

PROMPT = "Q:"
# "B" is less likely than "A", but the continuation of "B" is almost certain.
NEXT: dict[str, dict[str, float]] = {
    "": {"A": 0.6, "B": 0.3, "C": 0.07, "D": 0.03},
    "A": {"a": 0.4, "b": 0.35, "c": 0.15, "d": 0.1},
    "B": {"!": 0.97, "?": 0.01, "x": 0.01, "w": 0.01},
    "B!": {"end": 0.97, "y": 0.01, "z": 0.01, "v": 0.01},
}


def alternatives(ids: Sequence[int]) -> list[tuple[int, float]]:
    text = bytes(token_id for token_id in ids if token_id < 256).decode()
    chances = NEXT.get(text.rpartition(PROMPT)[2], {"-": 0.5, ".": 0.3, "+": 0.15, "=": 0.05})
    return [(END if key == "end" else ord(key), math.log(chance)) for key, chance in chances.items()]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front")) as front:
        yield front


@pytest.fixture
def front(running: FrontUnderTest) -> FrontUnderTest:
    def prepare() -> None:
        running.core.reset()
        running.core.alternatives = alternatives
        running.core.script = lambda _submit: [65]

    running.do(prepare)
    return running


def search(front: FrontUnderTest, **fields: Any) -> Any:
    return front.complete(**{"prompt": PROMPT, "use_beam_search": True, "n": 2, "max_tokens": 3, **fields}).json()


def test_the_choices_are_the_best_answers_in_order(front: FrontUnderTest) -> None:
    answer = search(front)
    best, second = answer["choices"]
    assert (best["index"], best["text"], best["finish_reason"]) == (0, "B!", "stop")  # 0.3 x 0.97 x 0.97 = 0.282
    assert (second["index"], second["text"], second["finish_reason"]) == (1, "Aa-", "length")  # 0.6 x 0.4 x 0.5 = 0.12
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 6, "the end token counts"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3, "of the first step"


def test_each_step_is_one_token_of_every_beam(front: FrontUnderTest) -> None:
    search(front)
    submits = front.do(lambda: list(front.core.submits))
    texts = [bytes(submit.prompt_ids).decode().removeprefix(PROMPT) for submit in submits]
    assert texts == ["", "A", "B", "B!", "Aa"]
    params = {(submit.params.max_tokens, submit.params.logprobs, submit.params.ignore_eos) for submit in submits}
    assert params == {(1, 4, True)}
    assert len({submit.sequence_id for submit in submits}) == 5


def test_one_beam_follows_the_most_likely_tokens(front: FrontUnderTest) -> None:
    (choice,) = search(front, n=1)["choices"]
    assert choice["text"] == "Aa-"


def test_every_prompt_has_a_search_of_its_own(front: FrontUnderTest) -> None:
    choices = search(front, prompt=[PROMPT, PROMPT + "A"], max_tokens=2)["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "B!"), (1, "Aa"), (2, "a-"), (3, "b-")]


def test_log_probabilities_are_those_of_the_beams_tokens(front: FrontUnderTest) -> None:
    logprobs = search(front, logprobs=1)["choices"][0]["logprobs"]
    assert logprobs["tokens"][:2] == ["B", "!"]
    assert logprobs["token_logprobs"] == pytest.approx([math.log(0.3), math.log(0.97), math.log(0.97)])
    assert set(logprobs["top_logprobs"][0]) == {"A", "B"}


def test_an_answer_shows_more_alternatives_than_the_search_needs(front: FrontUnderTest) -> None:
    (choice,) = search(front, n=1, logprobs=4)["choices"]
    assert choice["text"] == "Aa-"
    assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [4, 4, 4]


def test_end_tokens_and_least_lengths_are_obeyed(front: FrontUnderTest) -> None:
    one: dict[str, Any] = {"n": 1, "prompt": PROMPT + "B"}
    assert search(front, **one)["choices"][0]["text"] == "!"
    assert search(front, **one, min_tokens=3)["choices"][0]["text"] == "!y-"
    assert search(front, **one, ignore_eos=True)["choices"][0]["finish_reason"] == "length"
    stopped = search(front, **one, stop_token_ids=[ord("!")])["choices"][0]
    assert (stopped["text"], stopped["stop_reason"], stopped["finish_reason"]) == ("", ord("!"), "stop")
    kept = search(front, **one, stop_token_ids=[ord("!")], include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == "!"


def test_a_chat_and_a_stream_have_the_same_answers(front: FrontUnderTest) -> None:
    fields: dict[str, Any] = {"use_beam_search": True, "n": 2, "max_tokens": 2}
    whole = [choice["message"]["content"] for choice in front.chat(PROMPT, **fields).json()["choices"]]
    texts = {0: "", 1: ""}
    with front.chat_stream(PROMPT, **fields) as chunks:
        for chunk in chunks:
            for choice in chunk["choices"] if isinstance(chunk, dict) else ():
                texts[choice["index"]] += choice["delta"].get("content", "")
    assert list(texts.values()) == whole
    assert len(set(whole)) == 2


def test_the_death_of_the_core_repeats_the_step(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "hold_after", 0))
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(search(front)))
    thread.start()
    front.wait_until(lambda: len(front.core.submits) == 1, "the first step is submitted")

    def restart() -> None:
        front.core.die()
        front.core.release()

    front.do(restart)
    thread.join(60.0)
    assert [choice["text"] for choice in answers[0]["choices"]] == ["B!", "Aa-"]


def test_a_client_that_leaves_ends_the_search(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "is_silent", True))
    body = {"model": "tiny", "prompt": PROMPT, "use_beam_search": True, "max_tokens": 3, "stream": True}
    with front.http.stream("POST", "/v1/completions", json=body) as response:
        assert next(events(response)) == ": ping"
        submitted = front.do(lambda: [submit.sequence_id for submit in front.core.submits])
    front.wait_until(lambda: front.core.aborts == submitted, "the beam is aborted")
    front.wait_until(lambda: front.service.lifecycle.num_in_flight == 0, "the request is over")
    assert len(submitted) == 1


async def begun(front: FrontUnderTest, num_beams: int, caller: Caller | None = None) -> BeamSearch:
    text = front.service.text
    assert text is not None
    return await BeamSearch.search(
        front.service,
        text,
        request_id="search",
        prompts=[tuple(PROMPT.encode())],
        params=SamplingParams(n=num_beams, max_tokens=3),
        caller=caller or Caller(),
        length_penalty=1.0,
    )


def test_a_search_whose_client_left_between_two_comments_ends(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "is_silent", True))

    async def leave() -> None:
        search = await begun(front, 2)
        deltas = search.deltas(wait_s=0.0)
        assert await anext(deltas) == []
        search.client_gone()
        with pytest.raises(ClientGone):
            await anext(deltas)
        search.close()

    front.run(leave())
    assert front.do(lambda: front.service.lifecycle.num_in_flight) == 0


def test_the_wait_of_the_first_step_counts_also_in_later_steps(front: FrontUnderTest) -> None:
    async def wait() -> None:
        search = await begun(front, 2, Caller(waits_since_s=time.monotonic() - 5.0))
        deltas = search.deltas(wait_s=0.0)
        while search._num_steps < 2:
            assert await anext(deltas) == []
        assert 5.0 <= search.held_s() < 60.0
        search.close()

    front.run(wait())


def test_beams_sent_in_parts_are_accepted_at_once_and_none_follows_a_client_that_left(front: FrontUnderTest) -> None:
    front.core.alternatives = lambda _ids: [(token_id, -1.0 - token_id) for token_id in range(250)]

    async def leave() -> None:
        search = await begun(front, LANES_AT_ONCE + 1)
        unfinished = front.service.client.unfinished
        step = asyncio.ensure_future(anext(search.deltas(wait_s=60.0)))
        while len(list(unfinished())) != LANES_AT_ONCE:  # until the first part of the second step runs
            await asyncio.sleep(0)
        assert all(sequence.is_accepted for sequence in unfinished()), "a full queue would end the search"
        search.client_gone()
        with pytest.raises(ClientGone):
            await step
        assert list(unfinished()) == []
        search.close()

    front.run(leave())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"65": 1}}, "logit_bias"),
        ({"stop": "x"}, "stop"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"allowed_token_ids": [65]}, "allowed_token_ids"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"logprobs": 1, "echo": True}, "prompt_logprobs"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 600}, None),
        ({"length_penalty": 11}, "length_penalty"),
        ({"length_penalty": 2, "use_beam_search": False}, "length_penalty"),
        ({"use_beam_search": 1}, "use_beam_search"),
    ],
)
def test_what_a_beam_search_cannot_obey_is_refused(
    front: FrontUnderTest, fields: dict[str, Any], param: str | None
) -> None:
    answer = search(front, **fields)
    assert answer["error"]["param"] == param
    assert front.do(lambda: (front.core.submits, front.service.lifecycle.num_in_flight)) == ([], 0)


def test_a_search_does_not_ignore_a_thinking_budget(front: FrontUnderTest) -> None:
    fields: dict[str, Any] = {"use_beam_search": True, "n": 2, "max_tokens": 2}
    refused = front.chat(PROMPT, thinking_token_budget=5, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking_token_budget")
    assert front.chat(PROMPT, thinking_token_budget=-1, **fields).status_code == 200


def test_beams_of_too_many_tokens_together_are_refused(front: FrontUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam_search, "MAX_BEAM_TOKENS", 40)
    assert len(search(front, n=4, max_tokens=8)["choices"]) == 4  # 4 x (2 + 8) = 40
    error = search(front, n=4, max_tokens=9)["error"]
    assert error["param"] == "n"
    assert error["message"].startswith("the beams could have 44 tokens together (n 4 x 2 tokens of prompts and 9 of")


def test_values_that_ask_for_no_search_are_accepted(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "alternatives", None))
    assert front.complete("a", use_beam_search=False, length_penalty=1.0).status_code == 200


def test_beams_of_engines_that_differ_by_rounding_give_a_warning(front: FrontUnderTest) -> None:
    core, model = front.core, front.core.model
    assert model is not None

    def become(engine_version: str) -> None:
        """Makes the core one of another release. Its status arrives before the beams that it computes next."""
        fingerprint = msgspec.structs.replace(FINGERPRINT, engine_version=engine_version)
        core.model = msgspec.structs.replace(model, fingerprint=fingerprint)
        core.send_status()

    def of_a_later_release(ids: Sequence[int]) -> list[tuple[int, float]]:
        become("9.0")
        return alternatives(ids)

    def restore() -> None:
        core.model = model
        core.send_status()

    (link,) = front.service.client.pool.links.values()
    try:
        front.do(lambda: become("1.0"))
        front.wait_until(lambda: link.fingerprint == FINGERPRINT, "the status has come")
        assert "warnings" not in search(front)
        front.do(lambda: setattr(core, "alternatives", of_a_later_release))
        answer = front.complete(PROMPT, use_beam_search=True, n=2, max_tokens=3)
    finally:
        front.do(restore)
        front.wait_until(lambda: link.fingerprint is None, "the status has come")
    assert answer.headers["x-rayloom-continuation"] == "rounding"
    (warning,) = answer.json()["warnings"]
    assert "may differ by rounding" in warning

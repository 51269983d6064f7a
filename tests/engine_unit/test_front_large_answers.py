"""Answers with many log-probabilities: limited, computed once per prompt, and encoded while they are sent."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.errors import RequestError
from rayloom_engine.front.generation.admission import check_num_prompt_logprobs
from rayloom_engine.front.http.json_pieces import ITEMS_AT_ONCE, LazyList, lazy, parts, pieces
from rayloom_engine.front.openai.answers.logprobs import LogprobWriter
from rayloom_engine.front.openai.answers.whole import PART_BYTES, WholeAnswer
from rayloom_engine.protocol.messages import Outputs, SequenceOutput
from rayloom_engine.sampling_params import SamplingParams
from rayloom_engine.text.tokenizer import Tokenizer
from rt_byte_model import byte_model
from rt_fake_core import _write
from rt_front import FrontUnderTest, running_front

TOP = tuple((token_id, -float(token_id)) for token_id in range(20))


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> LogprobWriter:
    return LogprobWriter(Tokenizer.load(byte_model(tmp_path_factory.mktemp("model") / "model")), as_ids=False)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front")) as front:
        yield front


@pytest.fixture(autouse=True)
def fresh_core(front: FrontUnderTest) -> None:
    front.do(front.core.reset)


def entries(num: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(100, -1.5, 21, TOP) for _ in range(num))


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_pieces_are_the_text_of_the_document(step: int) -> None:
    def document(of: Any) -> Any:
        inner = {"a": of([1, "x", None]), "b": [], "c": of([])}
        return {'"quoted"': of([inner, {}, inner]), "plain": [1, 2], "mixed": [of([{"d": of([1.5])}]), 7]}

    def eager(items: list[Any]) -> list[Any]:
        return items

    def lazily(items: list[Any]) -> LazyList:
        return LazyList(items, step)

    # A LazyList can be written only once, so each place has an `inner` of its own.
    made = document(lazily)
    first = made['"quoted"']
    assert isinstance(first, LazyList)
    made['"quoted"'] = LazyList([{"a": lazily([1, "x", None]), "b": [], "c": lazily([])} for _ in range(2)], step)
    expected = document(eager)
    del expected['"quoted"'][1]
    assert msgspec.json.decode(b"".join(pieces(made))) == expected
    assert b"".join(pieces(expected)) == msgspec.json.encode(expected)


def test_few_items_are_a_plain_list() -> None:
    assert lazy(range(3), 3) == [0, 1, 2]
    assert lazy(range(ITEMS_AT_ONCE), ITEMS_AT_ONCE) == list(range(ITEMS_AT_ONCE))
    assert isinstance(lazy(range(ITEMS_AT_ONCE + 1), ITEMS_AT_ONCE + 1), LazyList)
    assert isinstance(lazy(range(ITEMS_AT_ONCE), ITEMS_AT_ONCE, 2), LazyList)


def test_a_large_answer_never_exists_whole(writer: LogprobWriter) -> None:
    given = entries(5000)
    tracemalloc.start()
    try:
        sizes = [len(piece) for piece in pieces({"prompt_logprobs": writer.prompt(given)})]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(sizes) > 5_000_000
    assert max(sizes) < 200_000, "2048 log-probabilities of less than 100 bytes"
    assert peak < 3_000_000


def test_completion_logprobs_are_lazy_too(writer: LogprobWriter) -> None:
    num = 3000
    document = writer.completion([100] * num, [None, *entries(num - 1)], -2)
    assert all(isinstance(value, LazyList) for value in document.values())
    written = msgspec.json.decode(b"".join(pieces(document)))
    assert [len(value) for value in written.values()] == [num] * 4
    assert written["text_offset"][:5] == [0, 0, 0, 1, 2]
    assert (written["token_logprobs"][:2], written["top_logprobs"][0]) == ([None, -1.5], None)


def test_the_garbage_collector_skips_the_logprobs_of_an_answer() -> None:
    entry = msgspec.msgpack.decode(msgspec.msgpack.encode(entries(1)[0]), type=TokenLogprobs)
    assert not gc.is_tracked(entry)
    gc.collect()
    gc.collect()  # the first call untracks the pairs, the second call their tuple
    assert not gc.is_tracked(entry.top)


class _Generation:
    """The parts of a generation that a WholeAnswer needs."""

    def __init__(self) -> None:
        self.is_client_gone = False
        self.is_rounded = False
        self.ends: list[str] = []

    def answered(self) -> None:
        self.ends.append("answered")

    def close(self) -> None:
        self.ends.append("closed")

    def held_s(self) -> float:
        return 0.0


def sent(document: dict[str, Any], gone_after: int | None = None) -> tuple[list[dict[str, Any]], list[int], list[str]]:
    """The messages of a WholeAnswer, another task's number of turns before each message, and the generation's end."""
    messages: list[dict[str, Any]] = []
    turns: list[int] = []
    generation = _Generation()

    async def scenario() -> None:
        num_turns = 0

        async def others() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        async def send(message: Any) -> None:
            messages.append(message)
            turns.append(num_turns)
            generation.is_client_gone = gone_after is not None and len(messages) >= gone_after

        task = asyncio.create_task(others())
        watcher = asyncio.create_task(asyncio.sleep(3600))
        await WholeAnswer(generation, document, watcher)({}, None, send)  # type: ignore[arg-type]
        task.cancel()

    asyncio.run(scenario())
    return messages, turns, generation.ends


def test_other_requests_run_between_the_parts_of_a_large_answer(writer: LogprobWriter) -> None:
    messages, turns, ends = sent({"prompt_logprobs": writer.prompt(entries(2000))})
    bodies = [message["body"] for message in messages[1:]]
    num_parts = sum(map(len, bodies)) // PART_BYTES
    assert num_parts > 30 and max(map(len, bodies)) <= PART_BYTES
    assert turns[-1] >= num_parts
    late = turns[1 + 2**20 // PART_BYTES + 1 : -2]  # without the parts that were held back to find the length
    assert all(after > before for before, after in itertools.pairwise(late))
    assert b"content-length" not in dict(messages[0]["headers"]), "its length is not known when it begins"
    assert len(msgspec.json.decode(b"".join(bodies))["prompt_logprobs"]) == 2001
    assert ends == ["answered", "closed"]


def test_a_small_answer_has_its_length() -> None:
    messages, _turns, _ends = sent({"a": 1})
    assert dict(messages[0]["headers"])[b"content-length"] == b"7"
    assert [message["body"] for message in messages[1:]] == [b'{"a":1}', b""]


def test_nothing_more_is_made_for_a_client_that_is_gone(writer: LogprobWriter) -> None:
    messages, _turns, ends = sent({"prompt_logprobs": writer.prompt(entries(4000))}, gone_after=2)
    assert len(messages) < 20, "the part that was held, of more than 60"
    assert ends == ["closed"]


def test_prompt_logprobs_are_bounded_over_all_choices() -> None:
    long = tuple(range(262_144))
    check_num_prompt_logprobs([long], SamplingParams(prompt_logprobs=20))
    check_num_prompt_logprobs([long] * 9, SamplingParams(n=9))
    with pytest.raises(RequestError, match=r" 11010048 .*\(n 2 x 262144 tokens in all prompts x 21 .* 6000000"):
        check_num_prompt_logprobs([long], SamplingParams(n=2, prompt_logprobs=20))
    with pytest.raises(RequestError):
        check_num_prompt_logprobs([long, long], SamplingParams(prompt_logprobs=20))


def test_a_request_beyond_the_bound_is_refused(front: FrontUnderTest) -> None:
    refused = front.complete([[97] * 490] * 8, n=128, prompt_logprobs=20)  # 8 x 128 x 490 x 21 = 10,536,960
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    assert front.do(lambda: front.core.submits) == []


def test_prompt_logprobs_are_computed_once_for_all_choices_of_a_prompt(front: FrontUnderTest) -> None:
    choices = front.complete(["ab", "abc"], n=3, prompt_logprobs=1).json()["choices"]
    submits = front.do(lambda: list(front.core.submits))
    assert [submit.params.prompt_logprobs for submit in submits] == [1, None, None] * 2
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [2, 2, 2, 3, 3, 3]
    assert choices[0]["prompt_logprobs"] == choices[2]["prompt_logprobs"]


def test_every_choice_of_a_stream_echoes_the_prompts_logprobs(front: FrontUnderTest) -> None:
    body = {"model": "tiny", "prompt": "ab", "n": 2, "echo": True, "logprobs": 1, "stream": True}
    with front.http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    firsts: dict[int, Any] = {}
    for line in lines:
        for choice in msgspec.json.decode(line)["choices"]:
            firsts.setdefault(choice["index"], choice["logprobs"])
    assert [firsts[index]["token_logprobs"][:2] for index in (0, 1)] == [[None, -0.5]] * 2


def test_a_choice_that_begins_before_the_first_one_waits_for_the_prompts_logprobs(front: FrontUnderTest) -> None:
    front.do(lambda: setattr(front.core, "is_silent", True))
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(front.complete("ab", n=2, prompt_logprobs=0).json()))
    thread.start()
    front.wait_until(lambda: len(front.core.submits) == 2, "the core has both choices")

    def finish(lane: int) -> None:
        submit = front.core.submits[lane]
        logprobs = (TokenLogprobs(98, -0.5, 2),) if lane == 0 else ()
        output = SequenceOutput(
            sequence_id=submit.sequence_id, token_ids=(65 + lane,), prompt_logprobs=logprobs, finish_reason="length"
        )
        for core_writer in front.core._writers:
            _write(core_writer, Outputs((output,)))

    front.do(lambda: finish(1))
    front.do(lambda: finish(0))
    thread.join(60.0)
    choices = answers[0]["choices"]
    assert [choice["text"] for choice in choices] == ["A", "B"]
    assert [list(choice["prompt_logprobs"][1]) for choice in choices] == [["98"], ["98"]]


def test_an_answer_of_megabytes_arrives_whole(front: FrontUnderTest) -> None:
    answer = front.complete("a" * 490, n=30, prompt_logprobs=1)
    assert "content-length" not in answer.headers
    choices = answer.json()["choices"]
    assert [(choice["index"], len(choice["prompt_logprobs"])) for choice in choices] == [(i, 490) for i in range(30)]
    assert front.chat().headers["content-length"]


def test_parts_have_the_requested_size() -> None:
    assert list(parts(["abc", "d"], 4)) == [b'["ab', b'c","', b'd"]']

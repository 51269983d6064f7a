"""A gateway in front of two real engines: streams survive the loss of an engine, and wait while there is no engine.

An engine is killed as a whole process group. Every answer must equal the answer of an undisturbed run, in float32.
Values of log-probabilities may differ by rounding, because a replay adds numbers in another order.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rt_embeds import EmbeddingRows, field_of
from rt_faults import breakable, slow_steps
from rt_gateway import Engines, Gateway, counted, running_gateway
from rt_ports import free_port
from rt_server import START_EVERY_S, wait_until
from rt_streams import ENDLESS_JSON, PROMPTS

NUM_TOKENS = 64  # steps are slow until an engine is killed, so it is killed before streams of this length end
WORDS = " ".join(f"{number} and" for number in range(40))  # text that makes prompts long enough for several KV blocks
NUM_PREFIXES = 12
EARLY_EVENTS = 6  # events of every stream before the fault
ARGUMENTS = (
    "--dtype",
    "float32",
    "--device",
    "cpu",
    "--served-model-name",
    "m",
    "--num-kv-blocks",
    "1024",
    "--enable-prompt-embeds",
)


@dataclass
class Choice:
    text: str = ""
    tool: str = ""
    tokens: list[str] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Request:
    """A streamed request and its answer. `failure` is set for every fault that a user would notice."""

    path: str
    body: dict[str, Any]
    key: str | None = None  # Idempotency-Key of the request
    choices: dict[int, Choice] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    num_events: int = 0
    num_pings: int = 0
    warnings: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    cold_start: str | None = None  # the header
    cold_start_comment: str | None = None
    is_done: bool = False
    failure: str | None = None

    def run(self, url: str) -> None:
        """Sends the request and reads the stream to its end. No retries."""
        body = {**self.body, "model": "m", "stream": True}
        try:
            headers = {} if self.key is None else {"Idempotency-Key": self.key}
            with httpx.stream("POST", f"{url}{self.path}", json=body, headers=headers, timeout=180.0) as response:
                self.cold_start = response.headers.get("x-rayloom-cold-start")
                if response.status_code != 200:
                    self.failure = f"HTTP {response.status_code}: {response.read().decode()}"
                for line in response.iter_lines():
                    self._take(line)
        except httpx.HTTPError as error:
            self.failure = f"{type(error).__name__}: {error}"
        if self.failure is None and not self.is_done:
            self.failure = "the stream ended without [DONE]"

    def _take(self, line: str) -> None:
        if line.startswith(": cold start "):
            self.cold_start_comment = line.removeprefix(": cold start ")
        elif line.startswith(":"):
            self.num_pings += 1
        if line == "data: [DONE]":
            self.is_done = True
        elif line.startswith("data: "):
            self._take_event(json.loads(line.removeprefix("data: ")))

    def _take_event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.failure = f"error event: {event['error']}"
            return
        self.num_events += 1
        self.ids.add(event["id"])
        self.warnings += event.get("warnings", [])
        for part in event["choices"]:
            choice = self.choices.setdefault(part["index"], Choice())
            delta = part.get("delta", {})
            choice.text += part.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                choice.tool += (call["function"].get("name") or "") + call["function"]["arguments"]
            logprobs = part.get("logprobs") or {}
            choice.tokens += logprobs.get("tokens") or []
            self.logprobs += logprobs.get("token_logprobs") or []
            choice.finish_reason = part["finish_reason"] or choice.finish_reason


@dataclass(frozen=True)
class Given:
    """Parts of requests that depend on the model."""

    stop: str  # a text near the end of the answer to the second prompt
    embeds: str  # the first prompt as embeddings


def requests(given: Given) -> list[Request]:
    """A request of each kind."""
    greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
    seeded = {**greedy, "temperature": 0.9, "top_p": 0.95, "seed": 7}
    tool = {
        "name": "list_people",
        "parameters": {"type": "object", "properties": {"people": ENDLESS_JSON}, "required": ["people"]},
    }
    completions = [
        {"prompt": PROMPTS[0], **greedy, "logprobs": 0},
        {"prompt": PROMPTS[1], **seeded},
        {"prompt": PROMPTS[0], **seeded, "n": 3, "max_tokens": NUM_TOKENS // 2},
        {"prompt": PROMPTS[1], **greedy, "stop": [given.stop]},
        {"prompt": PROMPTS[0], **seeded, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"prompt": PROMPTS[1], **seeded, "logprobs": 3},
        {"prompt": PROMPTS[0], **greedy, "structured_outputs": {"json": ENDLESS_JSON}},
        {"prompt_embeds": given.embeds, **greedy, "logprobs": 0},
    ]
    chat = {"messages": [{"role": "user", "content": PROMPTS[1]}], "tool_choice": "required"}
    call = {**chat, **greedy, "tools": [{"type": "function", "function": tool}]}
    return [*(Request("/v1/completions", body) for body in completions), Request("/v1/chat/completions", call)]


def begin(url: str, made: list[Request]) -> list[threading.Thread]:
    threads = [threading.Thread(target=request.run, args=(url,), daemon=True) for request in made]
    for thread in threads:
        thread.start()
    return threads


def end(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(240.0)
        assert not thread.is_alive(), "a stream did not end"


def wait_for_events(made: list[Request], num_events: int = EARLY_EVENTS) -> None:
    wait_until(
        lambda: all(request.num_events >= num_events or request.failure for request in made),
        120.0,
        lambda: str([(request.num_events, request.failure) for request in made]),
    )


def check_equal(seen: list[Request], expected: list[Request]) -> None:
    assert [request.failure for request in seen] == [None] * len(seen)
    for request, other in zip(seen, expected, strict=True):
        assert request.choices == other.choices
        assert request.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert request.warnings == []


@pytest.fixture(scope="module")
def engines(three_layers: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("engines"), "--model", three_layers, *ARGUMENTS)
    with breakable(made.folder):
        try:
            for name in made.ports:
                made.start(name)
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="module")
def gateway(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with running_gateway(tmp_path_factory.mktemp("gateway"), engines.ports, "--enable-prompt-embeds") as running:
        wait_for_engines(running, {"first", "second"})
        yield running


def wait_for_engines(gateway: Gateway, names: set[str]) -> None:
    def story() -> str:
        return f"{gateway.engines()}\n{gateway.log_text()[-3000:]}"

    wait_until(lambda: gateway.serving() == names, 120.0, story, START_EVERY_S)


@pytest.fixture(scope="module")
def undisturbed(gateway: Gateway, engines: Engines, three_layers: str) -> tuple[Given, list[Request]]:
    """Parts of the requests, and the answers of undisturbed engines."""
    greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
    plain = Request("/v1/completions", {"prompt": PROMPTS[1], **greedy})
    plain.run(gateway.api_url)
    assert plain.failure is None
    ids = httpx.post(f"{gateway.api_url}/tokenize", json={"prompt": PROMPTS[0]}, timeout=20.0).json()["tokens"]
    given = Given(stop=plain.choices[0].text[-24:-12], embeds=field_of(EmbeddingRows(three_layers).of(ids)))
    made = requests(given)
    with slow_steps(engines.folder):  # with fast steps, a gateway that waits for a CPU sends several tokens in an event
        end(begin(gateway.api_url, made))
    assert [request.failure for request in made] == [None] * len(made)
    assert made[3].choices[0].finish_reason == "stop"
    assert made[7].choices == made[0].choices, "the embeddings are those of the first prompt"
    assert all(request.num_events > 2 * EARLY_EVENTS for request in made)
    return given, made


def test_each_prefix_is_computed_by_one_engine_and_both_engines_have_some(
    gateway: Gateway, measured: Callable[[str], None]
) -> None:
    # A prefix that no engine has goes to either engine with equal probability. So with this many prefixes both engines
    # get some.
    prefixes = [f"{number}: {PROMPTS[number % 6]} {WORDS}" for number in range(NUM_PREFIXES)]

    def cached_tokens(number: int, question: str) -> tuple[int, int]:
        body = {"model": "m", "prompt": f"{prefixes[number]} {question}", "max_tokens": 1, "temperature": 0.0}
        usage = httpx.post(f"{gateway.api_url}/v1/completions", json=body, timeout=120.0).json()["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def cached_blocks() -> list[int]:
        return [engine["cached_blocks"] for engine in gateway.engines()["engines"].values()]

    def is_idle() -> bool:
        return all(each["prefill_tokens"] == each["decodes"] == 0 for each in gateway.engines()["engines"].values())

    # An engine's last report may still count earlier requests. Until its next report, the other engine would get every
    # prefix. The tiny model computes all prefixes in less time than passes between two reports.
    wait_until(is_idle, 30.0, lambda: str(gateway.engines()))
    first = [cached_tokens(number, "Why?") for number in range(NUM_PREFIXES)]
    assert [cached for _, cached in first] == [0] * NUM_PREFIXES
    num_blocks = sum(total // 16 for total, _ in first)
    wait_until(lambda: sum(cached_blocks()) >= num_blocks, 30.0, lambda: str(gateway.engines()))
    assert min(cached_blocks()) > 0, "the prefixes are spread"
    for question in ("How?", "When?", "By whom?"):
        for number, (num_tokens, _) in enumerate(first):
            assert cached_tokens(number, question)[1] >= num_tokens - 32, "at most the question and a block are new"
    assert sum(cached_blocks()) < 2 * num_blocks
    measured(f"cached blocks of the engines: {cached_blocks()}; the {NUM_PREFIXES} prompts have {num_blocks}")


def test_engines_count_the_requests_that_come_through_the_gateway(
    gateway: Gateway, engines: Engines, undisturbed: tuple[Given, list[Request]]
) -> None:
    assert counted(gateway.admin_url)[0] > len(undisturbed[1])
    # Engines and gateway have equal counts, also for answers with several choices and answers that end at a stop
    # string. The core reports once a second.
    wait_until(
        lambda: engines.counted() == counted(gateway.admin_url),
        60.0,
        lambda: f"{engines.counted()}, not {counted(gateway.admin_url)}",
    )


def test_streams_of_every_kind_continue_on_the_other_engine(
    gateway: Gateway, engines: Engines, undisturbed: tuple[Given, list[Request]], measured: Callable[[str], None]
) -> None:
    made = requests(undisturbed[0])
    with slow_steps(engines.folder):
        threads = begin(gateway.api_url, made)
        wait_for_events(made)
        before = gateway.engines()["engines"]
        assert before["first"]["sequences"] > 0, "the load is spread"
        assert before["second"]["sequences"] > 0, "the load is spread"
        engines.programs["first"].kill()
    end(threads)

    check_equal(made, undisturbed[1])
    measured(f"{before['first']['sequences']} sequences moved; 0 of {len(made)} requests failed, all answers equal")


def test_streams_wait_while_no_engine_serves_and_continue_on_the_next_one(
    gateway: Gateway, engines: Engines, undisturbed: tuple[Given, list[Request]]
) -> None:
    wait_for_engines(gateway, {"second"})
    made = requests(undisturbed[0])
    with slow_steps(engines.folder):
        threads = begin(gateway.api_url, made)
        wait_for_events(made)
        engines.programs["second"].kill()
    wait_until(lambda: gateway.engines()["waiting"] > 0, 30.0, lambda: str(gateway.engines()))
    late = Request("/v1/completions", undisturbed[1][0].body)
    threads += begin(gateway.api_url, [late])  # arrives while there is no engine
    assert httpx.get(f"{gateway.api_url}/ready").status_code == 200
    engines.start("first")
    end(threads)

    check_equal([*made, late], [*undisturbed[1], undisturbed[1][0]])
    assert made[0].cold_start is None
    assert made[0].cold_start_comment is None, "it had begun"
    assert late.cold_start is not None
    # The comment exists only if the gateway sent the header before the engine served.
    assert 0 < float(late.cold_start) < float(late.cold_start_comment or "inf")


def test_a_gateway_starts_without_an_engine_and_its_death_ends_only_its_own_sequences(
    gateway: Gateway, engines: Engines, undisturbed: tuple[Given, list[Request]], tmp_path: Path
) -> None:
    wait_for_engines(gateway, {"first"})
    body = undisturbed[1][0].body
    unseeded = {**body, "max_tokens": 200, "temperature": 0.9}
    kept, lost = Request("/v1/completions", body), Request("/v1/completions", unseeded, key="order-66")
    with running_gateway(tmp_path, {"first": engines.ports["first"]}, name="second-gateway") as other:
        wait_for_engines(other, {"first"})
        with slow_steps(engines.folder):
            (lost_thread,) = begin(other.api_url, [lost])
            wait_for_events([lost], 2)
            (kept_thread,) = begin(gateway.api_url, [kept])
            wait_for_events([kept], 2)
            other.kill()
        end([lost_thread, kept_thread])
    assert lost.failure is not None
    check_equal([kept], [undisturbed[1][0]])

    repeat = Request("/v1/completions", unseeded, key="order-66")
    end(begin(gateway.api_url, [repeat]))
    assert repeat.failure is None
    assert len(lost.choices[0].text) > 0
    assert repeat.choices[0].text.startswith(lost.choices[0].text), "the seed follows from the key"
    assert repeat.choices[0].finish_reason == "length"
    assert repeat.ids == lost.ids
    other = Request("/v1/completions", unseeded, key="order-67")
    end(begin(gateway.api_url, [other]))
    assert other.choices[0].text != repeat.choices[0].text

    with running_gateway(tmp_path, {"gone": free_port()}, "--hold-seconds", "0", name="third-gateway") as alone:
        models = httpx.get(f"{alone.api_url}/v1/models", timeout=60.0).json()
        assert models["data"][0]["max_model_len"] == 1024
        assert httpx.get(f"{alone.api_url}/ui/status", timeout=60.0).json()["state"] == "recovering"
        answer = httpx.post(f"{alone.api_url}/tokenize", json={"model": "m", "prompt": "Once upon"}, timeout=60.0)
        assert answer.json()["count"] == len("Once upon"), "the tokenizer is that of the cache"
        held = httpx.post(f"{alone.api_url}/v1/completions", json={**body, "model": "m"}, timeout=60.0)
        assert (held.status_code, held.json()["error"]["code"]) == (503, "engine_unavailable")


def test_an_engine_that_drains_hands_its_streams_over(
    gateway: Gateway, engines: Engines, undisturbed: tuple[Given, list[Request]]
) -> None:
    engines.start("second")
    wait_for_engines(gateway, {"first", "second"})
    made = requests(undisturbed[0])
    with slow_steps(engines.folder):
        threads = begin(gateway.api_url, made)
        wait_for_events(made)
        engines.programs["first"].process.terminate()
        assert engines.programs["first"].process.wait(60.0) == 0
        assert any(thread.is_alive() for thread in threads), "it did not wait for the end of its streams"
    end(threads)
    check_equal(made, undisturbed[1])
    assert "Traceback" not in gateway.log_text()
    gateway_process = psutil.Process(gateway.process.pid)
    assert gateway_process.memory_info().rss < 150 * 1024 * 1024
    assert not [each.path for each in gateway_process.memory_maps() if "torch" in each.path]


def test_the_last_engine_finishes_its_streams_before_it_ends(
    gateway: Gateway, engines: Engines, undisturbed: tuple[Given, list[Request]]
) -> None:
    wait_for_engines(gateway, {"second"})
    made = requests(undisturbed[0])
    with slow_steps(engines.folder):
        threads = begin(gateway.api_url, made)
        wait_for_events(made)
        engines.programs["second"].process.terminate()
    assert engines.programs["second"].process.wait(120.0) == 0
    wait_until(lambda: all(request.is_done for request in made), 60.0, lambda: str(gateway.engines()))
    end(threads)
    check_equal(made, undisturbed[1])

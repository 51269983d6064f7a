"""Requests of all kinds that a gateway must be able to continue exactly, and the comparison of their answers.

Every request asks for log-probabilities, because they show the tokens of an answer. The values of log-probabilities may
differ by rounding, because a replay adds numbers in another order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from clients.load import PROMPTS, LoadAgent
from clients.service import Service

NUM_TOKENS = 192
LATE_TOKENS = 24
NUM_KINDS = 8
NUM_REQUESTS = 2 * NUM_KINDS
NUM_PAIRS = NUM_KINDS // 2
_ROUNDING = 1e-3
# This slice of the plain answer's text is the stop string. A fault happens before the tokens of this slice exist.
_STOP = slice(-24, -12)
# The schema of a list that is longer than any answer, so a disturbance always happens before the list is complete.
_PEOPLE = {
    "type": "array",
    "minItems": 1_000_000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
    },
}
_ARGUMENTS = {"type": "object", "properties": {"people": _PEOPLE}, "required": ["people"]}
_TOOL = {"type": "function", "function": {"name": "add", "parameters": _ARGUMENTS}}
_GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "stream": True}
_SEEDED = {**_GREEDY, "temperature": 0.9, "top_p": 0.95}

Request = dict[str, Any]  # path and body
Answers = list[list[dict[str, Any]]]  # index of the request -> its choices


class Load(Protocol):
    """NUM_REQUESTS requests with their undisturbed answers."""

    @property
    def answers(self) -> Answers:
        """The undisturbed answers."""

    def requests(self, num_tokens: int = NUM_TOKENS) -> list[Request]:
        """The requests, each for this number of tokens."""

    def problem_of(self, stream: dict[str, Any]) -> str:
        """Returns the failure of a stream; empty if its answer equals the undisturbed answer or a prefix of it."""


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """16 requests, two of each kind, and their answers without a disturbance."""

    model: str
    stop: str
    answers: Answers

    def requests(self, num_tokens: int = NUM_TOKENS) -> list[Request]:
        return mixed_requests(self.model, self.stop, num_tokens)

    def problem_of(self, stream: dict[str, Any]) -> str:
        """Returns the failure of a stream; empty if its answer equals the undisturbed answer or a prefix of it."""
        if stream["failure"]:
            return str(stream["failure"])
        if stream["warnings"]:
            return f"warnings: {stream['warnings']}"
        is_whole = stream["num_tokens"] == NUM_TOKENS
        meant = self.answers[stream["index"]]
        if len(stream["choices"]) != len(meant):
            return f"{len(stream['choices'])} choices instead of {len(meant)}"
        if others := [each for each in stream["broken"] if not _begins(stream["choices"], each["tokens"])]:
            return f"the repeated answer does not begin with the tokens already received: {others[0]['tokens']}"
        for got, wanted in zip(stream["choices"], meant, strict=True):
            if problem := _difference(got, wanted, stream["num_tokens"], is_whole=is_whole):
                return f"request {stream['index']} changed: {problem}"
        return ""


def mixed_requests(model: str, stop: str, num_tokens: int) -> list[Request]:
    """Two requests of each kind: plain, seeded, n = 3, stop string, penalties, log-probabilities, JSON, tool call."""
    made: list[Request] = []
    for index in range(NUM_REQUESTS // NUM_KINDS):
        prompt, seed = {"prompt": PROMPTS[index]}, {"seed": 7 + index}
        penalties = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
        kinds: list[dict[str, Any]] = [
            {**prompt, **_GREEDY},
            {**prompt, **_SEEDED, **seed},
            {**prompt, **_SEEDED, **seed, "n": 3},
            {"prompt": PROMPTS[0], **_GREEDY, "stop": [stop]},
            {**prompt, **_SEEDED, **seed, **penalties},
            {**prompt, **_SEEDED, **seed, "logprobs": 3},
            {**prompt, **_GREEDY, "structured_outputs": {"json": _PEOPLE}},
        ]
        common = {"model": model, "max_tokens": num_tokens}
        made += [{"path": "/v1/completions", "body": {"logprobs": 0, **common, **kind}} for kind in kinds]
        chat = {"messages": [{"role": "user", "content": PROMPTS[index]}], "logprobs": True}
        call = {"tools": [_TOOL], "tool_choice": "required"}
        made.append({"path": "/v1/chat/completions", "body": {**common, **_GREEDY, **chat, **call}})
    return made


def sampled_request(model: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a request whose answer is different each time, except for repeats with its Idempotency-Key."""
    body = {"model": model, "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 1.0, "ignore_eos": True}
    return "/v1/completions", {**body, "logprobs": 0}


def undisturbed_mix(service: Service, model: str = "") -> MixedLoad:
    """The load with the answers of an undisturbed run. Asserts that each answer fits the kind of its request.

    `model`: the model name in requests. Empty: the service's name.
    """
    model = model or service.name
    (plain,) = run_mix(service, mixed_requests(model, "", NUM_TOKENS)[:1])
    stop = plain["choices"][0]["text"][_STOP]
    streams = run_mix(service, mixed_requests(model, stop, NUM_TOKENS))
    answers: Answers = [stream["choices"] for stream in streams]
    assert [len(choices) for choices in answers] == [1, 1, 3, 1, 1, 1, 1, 1] * 2
    reasons = [choices[0]["finish_reason"] for choices in answers]
    assert reasons == ["length", "length", "length", "stop", *["length"] * 4] * 2
    assert [bool(choices[0]["tool"]) for choices in answers] == [False] * 7 + [True] + [False] * 7 + [True]
    assert all(len(choice["tokens"]) > NUM_TOKENS // 2 for choices in answers for choice in choices)
    return MixedLoad(model, stop, answers)


def run_mix(service: Service, requests: list[Request]) -> list[dict[str, Any]]:
    """The records of these requests. Fails unless all of them are answered."""
    agent = LoadAgent(service, requests=requests, urls=[service.url] * len(requests))
    try:
        streams: list[dict[str, Any]] = agent.receive()["streams"]
    finally:
        agent.process.kill()
    assert [stream["failure"] for stream in streams] == [""] * len(requests), streams
    return streams


def _begins(choices: list[dict[str, Any]], tokens: list[list[str]]) -> bool:
    """True if the tokens of each choice begin with the list of the same index in `tokens`."""
    return all(choice["tokens"][: len(had)] == had for choice, had in zip(choices, tokens, strict=False))


def _difference(got: dict[str, Any], wanted: dict[str, Any], num_tokens: int, *, is_whole: bool) -> str:
    """The difference of two choices in words. For answers of different lengths, compares the beginnings."""
    meant = wanted["tokens"][:num_tokens]
    tokens = got["tokens"][: len(meant)] if num_tokens > NUM_TOKENS else got["tokens"]
    if tokens != meant:
        return f"{tokens} instead of {meant}"
    pairs = zip(got["logprobs"], wanted["logprobs"], strict=False)
    far = [(one, other) for one, other in pairs if not math.isclose(one, other, abs_tol=_ROUNDING, rel_tol=_ROUNDING)]
    if far:
        return f"log-probabilities {far[0][0]} instead of {far[0][1]}, and {len(far) - 1} others"
    if num_tokens > NUM_TOKENS and len(got["tokens"]) != num_tokens:
        return f"{len(got['tokens'])} tokens instead of {num_tokens}"
    different = [name for name in ("text", "tool", "finish_reason") if is_whole and got[name] != wanted[name]]
    return "; ".join(f"{name} {got[name]!r} instead of {wanted[name]!r}" for name in different)

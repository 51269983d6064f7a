"""Streams and a prober in a client's pod: their requests, and the checks of their answers.

A request has failed in each of these cases: an HTTP error, an error event, no [DONE], a missing token, a different
token. Clients do not retry, with one exception: if a test sets `repeat_url`, they repeat a request whose connection
broke. The repeated request has the same Idempotency-Key.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from clients.service import Service

NUM_STREAMS = 8
NUM_TOKENS = 96
LATE_TOKENS = 16
# Number of tokens that each stream has when a fault is caused. On a busy machine, `kubectl exec` takes the time of 25
# further tokens, and when the fault happens, no stream may have more than half of its tokens.
STRIKE_AT = 8
PROMPTS = [
    "Once upon a time in a small village",
    "The three laws of thermodynamics are",
    "def fibonacci(n):",
    "Dear Sir or Madam,",
    "1, 2, 3, 5, 8, 13,",
    "Le petit prince habitait",
    "In the year 2350, humanity",
    "The recipe needs the following ingredients:",
]
_AGENT = Path(__file__).with_name("load_agent.py")

StreamTokens = list[list[str]]  # index of the prompt -> tokens


class LoadAgent:
    """The program load_agent.py, running in the client's pod."""

    def __init__(self, service: Service, **settings: Any) -> None:
        self._service = service
        command = ("exec", "--stdin", "--namespace", service.namespace, service.client.name, "--", "python3", "-c")
        self.process: subprocess.Popen[str] = service.kubectl.start(*command, _AGENT.read_text())
        num_tokens, late_tokens = settings.pop("num_tokens", NUM_TOKENS), settings.pop("late_tokens", LATE_TOKENS)
        asked = {
            "model": service.name,  # the model that the prober requests
            "urls": [service.url] * NUM_STREAMS,
            "requests": [_request(service.name, index, num_tokens) for index in range(NUM_STREAMS)],
            "strike_at": 0,
            "late_url": service.url,
            "late_requests": [_request(service.name, index, late_tokens) for index in range(NUM_STREAMS)],
            "late_every_s": 1.0,
            "late_for_s": 0.0,
            "steady": 0,  # number of parallel streams until "stop"; 0: a new stream at each interval
            "repeat_url": "",  # URL to which clients repeat requests whose connection broke; "": no repeats
            "probe_url": "",
            "probe_timeout_s": 300.0,
            "probe_rest_s": 120.0,  # seconds in which the last probes may be answered after "stop"
        }
        self._write(asked | settings)

    def _write(self, what: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def send(self, what: str) -> None:
        self._write({"do": what})

    def receive(self) -> dict[str, Any]:
        """The next message of the program."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the client's pod is gone, or its program failed"
        said: dict[str, Any] = json.loads(line)
        return said


def _request(model: str, index: int, max_tokens: int) -> dict[str, Any]:
    """A request with reproducible tokens: greedy for even indices, seeded for odd ones."""
    seeded = {"temperature": 0.9, "top_p": 0.95, "seed": 100 + index}
    sampling = seeded if index % 2 else {"temperature": 0.0}
    body = {
        "model": model,
        "prompt": PROMPTS[index],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 0,
        **sampling,
    }
    return {"path": "/v1/completions", "body": body}


def undisturbed(service: Service, num_tokens: int = NUM_TOKENS) -> StreamTokens:
    """The streams' tokens without a fault."""
    agent = LoadAgent(service, num_tokens=num_tokens)
    try:
        streams = agent.receive()["streams"]
    finally:
        agent.process.kill()
    assert [stream["failure"] for stream in streams] == [""] * NUM_STREAMS, streams
    return [stream["tokens"] for stream in streams]


def problem_of(stream: dict[str, Any], expected: StreamTokens) -> str:
    """The failure of a stream, in words; empty if the stream delivered all expected tokens."""
    meant = expected[stream["index"]][: stream["num_tokens"]]
    if not stream["failure"] and stream["tokens"] != meant:
        return f"changed: {stream['tokens']} instead of {meant}"
    return str(stream["failure"])

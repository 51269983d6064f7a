"""Many streams at once, for tests that break something while they run."""

from __future__ import annotations

import threading

from rt_server import RunningServer, Stream

NUM_TOKENS = 64
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


def completion_body(index: int, max_tokens: int = NUM_TOKENS) -> dict[str, object]:
    """A request whose tokens can be compared: greedy for even indices, seeded for odd ones."""
    seeded = {"temperature": 0.9, "top_p": 0.95, "seed": 100 + index}
    sampling = seeded if index % 2 else {"temperature": 0.0}
    return {"model": "m", "prompt": PROMPTS[index % 8], "max_tokens": max_tokens, "ignore_eos": True, **sampling}


def start_streams(
    server: RunningServer, bodies: list[dict[str, object]]
) -> tuple[list[Stream], list[threading.Thread]]:
    streams = [Stream() for _ in bodies]
    threads = [
        threading.Thread(target=stream.run, args=(server.api_url, body), daemon=True)
        for stream, body in zip(streams, bodies, strict=True)
    ]
    for thread in threads:
        thread.start()
    return streams, threads


def join_streams(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(180.0)
        assert not thread.is_alive(), "a stream did not end"

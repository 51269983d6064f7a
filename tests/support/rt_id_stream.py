"""The token ids of a greedy stream of a server, as they arrive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rt_server import RunningServer


def stream_ids(server: RunningServer, prompt: list[int], num_tokens: int) -> Iterator[int]:
    """Yields `num_tokens` ids that follow `prompt`. The server's model has the name "m"."""
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0.0}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": True}
    with server.client.stream("POST", f"{server.api_url}/v1/completions", json=body, timeout=120.0) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield from (event["choices"][0].get("token_ids") or ()) if event["choices"] else ()

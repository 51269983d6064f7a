"""Requests that fill the queue of an engine: long prompts with different beginnings, and answers of a few tokens."""

from __future__ import annotations

import random
from typing import Any

NUM_PROMPTS = 96
NUM_AT_ONCE = 16
# A prompt of 60 numbers has about 400 tokens, because the tokenizer of SmolLM2 splits numbers into digits.
_NUM_NUMBERS, _MOST = 60, 999_999
_NUM_OUTPUT = 8


def pressure(model: str) -> dict[str, Any]:
    """Settings of LoadAgent that keep NUM_AT_ONCE streams running until `stop`."""
    rng = random.Random(1)  # nosec: not for secrets
    prompts = [" ".join(str(rng.randint(0, _MOST)) for _ in range(_NUM_NUMBERS)) for _ in range(NUM_PROMPTS)]
    common = {"model": model, "max_tokens": _NUM_OUTPUT, "temperature": 0.0, "ignore_eos": True, "stream": True}
    requests = [{"path": "/v1/completions", "body": {**common, "prompt": each, "logprobs": 0}} for each in prompts]
    arrivals = {"steady": NUM_AT_ONCE, "late_every_s": 0.05, "late_requests": requests[1:]}
    return {"requests": requests[:1], "strike_at": 1, **arrivals}

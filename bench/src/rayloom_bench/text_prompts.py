"""Prompts of text with about the right number of tokens, for servers that refuse token ids."""

from __future__ import annotations

import random
from collections.abc import Callable

from rayloom_bench.endpoint import Endpoint, EndpointError, call_json
from rayloom_bench.workload import Purpose, Workload, prompt_rng

# a word is about one token, so this number of proportional corrections makes the length exact or nearly exact
MAX_CORRECTIONS = 6

# Common English words. After a blank, each word is one token in the vocabularies of current models.
_COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team minute idea body back face others level office door health "
    "person art war history party result change morning reason research girl guy moment air teacher force"
)
WORDS = tuple(_COMMON.split())

CountTokens = Callable[[str], int]


def text_prompts(
    workload: Workload, *, seed: int, count_tokens: CountTokens | None, purpose: Purpose = "measured"
) -> tuple[str, ...]:
    """One text of about `workload.num_prompt` tokens for each request; without `count_tokens`, of that many words."""
    rng = prompt_rng(workload, seed=seed, purpose=purpose)
    shared = text_of(workload.num_shared, rng, count_tokens)
    own = (text_of(workload.num_own, rng, count_tokens) for _ in range(workload.num_requests))
    return tuple(shared + text for text in own)


def text_of(num_tokens: int, rng: random.Random, count_tokens: CountTokens | None) -> str:
    """Random words of about `num_tokens` tokens, each after a blank."""
    words = rng.choices(WORDS, k=num_tokens)
    for _ in range(MAX_CORRECTIONS if count_tokens and words else 0):
        assert count_tokens is not None  # for mypy: without `count_tokens`, the loop does not run
        surplus = count_tokens("".join(f" {word}" for word in words)) - num_tokens
        if surplus == 0:
            break
        if surplus > 0:
            del words[max(1, len(words) - surplus) :]
        else:
            words += rng.choices(WORDS, k=-surplus)
    return "".join(f" {word}" for word in words)


def token_counter(endpoint: Endpoint) -> CountTokens | None:
    """A counter that calls `/tokenize`, a path of vLLM and llama.cpp; None if the server does not have this path."""

    def count(text: str) -> int:
        # `prompt` is vLLM's field and `content` llama.cpp's; each server ignores the other's field.
        body = {"model": endpoint.model_name, "prompt": text, "content": text, "add_special_tokens": False}
        tokens = call_json(f"{endpoint.base_url}/tokenize", body, headers=endpoint.headers).get("tokens")
        if not isinstance(tokens, list):
            raise EndpointError(f"{endpoint.base_url}/tokenize answers without a list of tokens")
        return len(tokens)

    try:
        count("one")
    except EndpointError:
        return None
    return count

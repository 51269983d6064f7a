"""SamplingParams: the allowed values, and the parameters of each choice of a request.

Refusals over HTTP are in test_front_errors.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from rayloom_engine.common.seeds import choice_seed
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.errors import RequestError
from rayloom_engine.sampling_params import ContextTooLong, SamplingParams, check_token_ids


def decoding(params: SamplingParams, index: int = 0, **changes: Any) -> DecodingParams:
    given = {"prompt_len": 10, "max_model_len": 100, "vocab_size": 50, "fresh_seed": 7, **changes}
    return params.decoding(index, **given)


def test_defaults_are_vllms() -> None:
    assert decoding(SamplingParams()) == DecodingParams(max_tokens=16, seed=7)


def test_everything_is_carried_over() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={9: 1, 3: -2},
        seed=3,
        stop_token_ids=[4, 4, 5],
        min_tokens=2,
        max_tokens=8,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=2,
        speculation=False,
    )
    assert decoding(params) == DecodingParams(
        max_tokens=8,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias=((3, -2.0), (9, 1.0)),
        seed=3,
        stop_token_ids=(4, 5),
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=2,
        speculation=False,
    )


def test_the_first_choice_keeps_the_seed_and_the_others_differ() -> None:
    seeds = [decoding(SamplingParams(n=3, seed=5), index).seed for index in range(3)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    assert all(0 <= choice_seed(seed, index) < 2**63 for seed in (-(2**63), -1, 2**63 - 1) for index in range(3))


def test_a_seed_of_minus_one_is_no_seed() -> None:
    assert decoding(SamplingParams(seed=-1)).seed == 7


def test_a_tiny_temperature_is_greedy() -> None:
    assert decoding(SamplingParams(temperature=1e-6)).is_greedy
    assert not decoding(SamplingParams(temperature=1e-3)).is_greedy


def test_without_max_tokens_the_context_or_the_server_is_the_limit() -> None:
    assert decoding(SamplingParams(max_tokens=None)).max_tokens == 90
    assert decoding(SamplingParams(max_tokens=None), max_output_tokens=20).max_tokens == 20
    assert decoding(SamplingParams(max_tokens=None), max_output_tokens=200).max_tokens == 90


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(100, None), (85, 16), (101, 1)])
def test_a_request_that_does_not_fit_names_the_numbers(prompt_len: int, max_tokens: int | None) -> None:
    with pytest.raises(ContextTooLong, match=rf"100 tokens.*prompt has {prompt_len} and {max_tokens or 1} more"):
        decoding(SamplingParams(max_tokens=max_tokens), prompt_len=prompt_len)


def test_a_full_context_is_still_allowed() -> None:
    assert decoding(SamplingParams(max_tokens=1), prompt_len=99).max_tokens == 1


def test_stop_strings_are_kept_once_and_in_order() -> None:
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(stop=["b", "a", "b"]).stop_strings == ("b", "a")
    assert SamplingParams(stop=None).stop_strings == ()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": 1.0}, "n"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"logprobs": -2}, "logprobs"),
        ({"stop": [b"x"]}, "stop"),
        ({"stop_token_ids": "ab"}, "stop_token_ids"),
        ({"logit_bias": {True: 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"n": 10**30}, "n"),
        ({"top_k": 10**30}, "top_k"),
        ({"seed": 10**30}, "seed"),
        ({"min_tokens": 10**30, "max_tokens": None}, "min_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"logprobs": 10**30}, "logprobs"),
        ({"prompt_logprobs": 10**30}, "prompt_logprobs"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logit_bias": {10**30: 1}}, "logit_bias"),
        ({"logit_bias": {1: 10**30}}, "logit_bias"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refusals_name_the_field(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**settings)
    assert caught.value.field == field


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(RequestError, match="the model's 50 ids go from 0 to 49; use smaller ids"):
        decoding(SamplingParams(stop_token_ids=[50]))
    with pytest.raises(RequestError, match="logit_bias has token id 50"):
        decoding(SamplingParams(logit_bias={50: 1}))


def test_top_k_is_never_more_than_the_vocabulary() -> None:
    assert decoding(SamplingParams(top_k=2**31 - 1)).top_k == 50
    assert decoding(SamplingParams(top_k=49)).top_k == 49


@pytest.mark.parametrize("token_id", [50, -1, 10**30])
def test_prompt_ids_without_an_embedding_are_named(token_id: int) -> None:
    check_token_ids([0, 49], 50)
    check_token_ids([], 50)
    with pytest.raises(
        RequestError,
        match=rf"prompt has token id {token_id}, which is out of vocabulary: the model's 50 ids go from 0 to 49",
    ):
        check_token_ids([0, token_id, 49], 50)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="no tokens"):
        decoding(SamplingParams(), prompt_len=0)


def test_stop_strings_are_bounded_together() -> None:
    assert len(SamplingParams(stop=[f"{number}{'a' * 1023}" for number in range(4)]).stop_strings) == 4
    with pytest.raises(RequestError, match="the stop strings have 65536 characters together, at most 4096 are allowed"):
        SamplingParams(stop=[f"{number:02}{'a' * 1022}" for number in range(64)])

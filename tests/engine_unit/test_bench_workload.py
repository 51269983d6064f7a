"""The four workloads, their prompts, and the checks of the bench's settings."""

import pytest

from rayloom_bench.text_prompts import text_of, text_prompts
from rayloom_bench.workload import WORKLOADS, Workload, parse_workloads, prompt_rng, token_prompts
from rayloom_engine.errors import ConfigError

W1, W2, W3, W4 = WORKLOADS
SMALL = Workload(name="S", num_requests=3, concurrency=2, num_shared=4, num_own=2, num_output=5)


def test_workloads_are_those_of_the_design() -> None:
    assert [workload.description for workload in WORKLOADS] == [
        "32 requests, 16 at a time, 128 in / 64 out",
        "32 requests, 16 at a time, 512 shared + 32 own in / 32 out",
        "8 requests, one at a time, 128 in / 128 out",
        "8 requests, 4 at a time, 2048 in / 32 out",
    ]


def test_scale_rounds_up_to_a_whole_batch_and_keeps_lengths() -> None:
    assert [workload.scaled(0.25).num_requests for workload in WORKLOADS] == [16, 16, 2, 4]
    assert [workload.scaled(0.01).num_requests for workload in WORKLOADS] == [16, 16, 1, 4]
    assert [workload.scaled(1).num_requests for workload in WORKLOADS] == [32, 32, 8, 8]
    assert W1.scaled(0.25).num_own == 128


def test_warm_up_is_one_batch_with_short_outputs() -> None:
    warm_up = W1.warm_up()
    assert (warm_up.num_requests, warm_up.num_own, warm_up.num_output) == (16, 128, 16)
    assert SMALL.warm_up().num_output == 5


def test_workloads_are_chosen_by_name_in_the_order_given() -> None:
    assert parse_workloads("w3, W1", 1) == (W3, W1)


@pytest.mark.parametrize("names", ["", "W5", "W1,W1", ","])
def test_unknown_repeated_or_no_workloads_are_refused(names: str) -> None:
    with pytest.raises(ConfigError, match="W1, W2, W3, W4"):
        parse_workloads(names, 1)


@pytest.mark.parametrize("scale", [0, -1, 1.5])
def test_scale_out_of_range_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="at most 1"):
        parse_workloads("W1", scale)


def test_prompts_share_their_front_and_nothing_else() -> None:
    prompts = token_prompts(SMALL, seed=7, vocab_size=40000)
    assert [len(prompt) for prompt in prompts] == [6, 6, 6]
    assert len({prompt[:4] for prompt in prompts}) == 1
    assert len({prompt[4:] for prompt in prompts}) == 3


def test_ids_stay_in_the_middle_half_of_the_vocabulary() -> None:
    ids = [token for prompt in token_prompts(W1, seed=0, vocab_size=256) for token in prompt]
    assert (min(ids), max(ids)) == (64, 191)  # 32 x 128 draws from 128 ids meet both ends
    assert token_prompts(SMALL, seed=0, vocab_size=1)[0] == (0,) * 6


def test_same_seed_gives_same_prompts_and_warm_up_has_others() -> None:
    measured = token_prompts(W2, seed=1, vocab_size=49152)
    assert measured == token_prompts(W2, seed=1, vocab_size=49152)
    assert measured != token_prompts(W2, seed=2, vocab_size=49152)
    assert measured[0][:16] != token_prompts(W2, seed=1, vocab_size=49152, purpose="warm-up")[0][:16]


def two_for_long_words(text: str) -> int:
    return sum(2 if len(word) >= 7 else 1 for word in text.split())


def test_text_is_corrected_until_it_has_the_length() -> None:
    text = text_of(200, prompt_rng(W1, seed=3, purpose="measured"), two_for_long_words)
    assert len(text.split()) < 200  # fewer, because long words have two tokens
    assert abs(two_for_long_words(text) - 200) <= 1  # the last word may have two tokens


def test_text_without_a_counter_has_a_word_for_each_token() -> None:
    texts = text_prompts(SMALL, seed=0, count_tokens=None)
    assert [len(text.split()) for text in texts] == [6, 6, 6]
    assert len({tuple(text.split()[:4]) for text in texts}) == 1

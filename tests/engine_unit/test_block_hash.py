"""Hashes of KV blocks: equal for equal content, and different when tokens, predecessors or extras differ."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.core.block_hash import block_hash, encode_extra, prompt_hashes
from rayloom_engine.core.embeds import EmbeddedPrompt, Embeds
from rt_scheduler import make_sequence

extras = st.lists(st.tuples(st.sampled_from(["salt", "adapter", "image"]), st.binary(max_size=4)), max_size=3)


def test_a_hash_depends_on_tokens_and_on_the_tokens_before_them() -> None:
    assert block_hash(b"", [1, 2], b"") == block_hash(b"", [1, 2], b"")
    hashes = {
        block_hash(b"", [1, 2], b""),
        block_hash(b"", [2, 1], b""),
        block_hash(b"x", [1, 2], b""),
        block_hash(b"", [1], b""),
        block_hash(b"", [1, 2], b"x"),
    }
    assert len(hashes) == 5
    assert {len(each) for each in hashes} == {16}


def test_bytes_of_an_extra_are_never_taken_for_tokens_or_a_predecessor() -> None:
    token = array("q", [7]).tobytes()
    hashes = {
        block_hash(b"", [7, 8], b""),
        block_hash(b"", [8], token),
        block_hash(token, [8], b""),
        block_hash(token, [], array("q", [8]).tobytes()),
    }
    assert len(hashes) == 4


@given(extras, extras)
def test_different_extras_have_different_bytes(first: list[tuple[str, bytes]], second: list[tuple[str, bytes]]) -> None:
    given_first, given_second = ([pair for pair in pairs if pair[1]] for pairs in (first, second))
    assert (encode_extra(first) == encode_extra(second)) == (given_first == given_second)


@pytest.mark.parametrize("size", [0, 1, 64, 65, 5000])
def test_an_extra_may_have_any_length(size: int) -> None:
    assert len(block_hash(b"", [1], bytes(size))) == 16


def test_the_salt_of_the_first_block_separates_the_whole_chain() -> None:
    plain, salted, same = (make_sequence("a", range(12), cache_key=key) for key in (b"", b"salt", b"salt"))
    hashes = [sequence.hashes(3, 4) for sequence in (plain, salted, same)]
    assert hashes[1] == hashes[2]
    assert not set(hashes[0]) & set(hashes[1])
    assert hashes[0][0] == block_hash(b"", range(4), b"")


@given(st.integers(0, 3), st.binary(min_size=24, max_size=24), st.sampled_from([b"", b"salt"]))
def test_a_gateway_computes_the_hashes_of_embeddings_that_the_scheduler_registers(
    num_bytes: int, data: bytes, key: bytes
) -> None:
    prompt = EmbeddedPrompt(Embeds("float16", 1, data[: 24 - 2 * num_bytes]))
    sequence = make_sequence("a", prompt, cache_key=key)
    num_blocks = len(prompt) // 4
    assert prompt_hashes(prompt, 4, key, b"", prompt.embeds) == sequence.hashes(num_blocks, 4)
    assert not set(prompt_hashes(tuple(prompt), 4, key)) & set(sequence.hashes(num_blocks, 4))

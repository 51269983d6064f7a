"""The prefix cache grows into new memory only if earlier prompts come again. Each block holds one token."""

from __future__ import annotations

from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.core.block_pool import BlockPool


def serve(pool: BlockPool, prompt: list[bytes]) -> int:
    """Serves a prompt with a block for each hash, and releases the prompt's blocks. Returns the number of hits."""
    known = pool.known(prompt)
    hits = next((index for index, block_id in enumerate(known) if block_id is None), len(known))
    table = [block_id for block_id in known[:hits] if block_id is not None]
    pool.hold(table)
    new = pool.allocate(len(prompt) - hits)
    for block_id, content in zip(new, prompt[hits:], strict=True):
        pool.register(block_id, content)
    table += new
    pool.check_integrity([table])
    pool.release(table)
    return hits


def chat(name: str, length: int) -> list[bytes]:
    return [f"{name}{index}".encode() for index in range(length)]


def touched(pool: BlockPool) -> int:
    return pool.num_blocks - pool.num_untouched


def test_prompts_that_never_come_again_touch_what_is_kept_and_what_is_held() -> None:
    pool = BlockPool(1000, num_kept=20)
    for number in range(200):
        assert serve(pool, chat(f"{number} ", 10)) == 0
    assert touched(pool) == 29  # 20 blocks are cached; a prompt evicts one of them and touches 9 new blocks


def test_without_a_limit_all_memory_is_touched_before_a_prefix_is_evicted() -> None:
    pool = BlockPool(1000)
    for number in range(100):
        serve(pool, chat(f"{number} ", 10))
    assert touched(pool) == 1000
    assert serve(pool, chat("0 ", 10)) == 10


def test_a_prompt_that_misses_an_evicted_block_doubles_the_cache() -> None:
    pool = BlockPool(1000, num_kept=20)
    for name in "abc":
        serve(pool, chat(name, 10))
    assert touched(pool) == 29  # c has evicted the last block of a
    assert serve(pool, chat("a", 10)) == 9  # 40 blocks are kept from here on
    serve(pool, chat("d", 10))
    assert [serve(pool, chat(name, 10)) for name in "abcd"] == [10, 10, 10, 10]
    assert touched(pool) == 40


def test_a_pool_after_a_loss_of_ranks_keeps_the_limit() -> None:
    pool = BlockPool(1000, num_kept=10)
    for name in "aba":
        serve(pool, chat(name, 10))
    pool = pool.successor()
    for number in range(50):
        serve(pool, chat(f"{number} ", 10))
    assert touched(pool) == 29  # the limit is 20: the second "a" doubled it, because "b" had evicted a block of "a"


@given(
    kept=st.integers(1, 60),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    order=st.lists(st.integers(0, 11), max_size=80),
)
def test_the_cache_grows_until_it_holds_all_prompts_that_come_again(
    kept: int, lengths: list[int], order: list[int]
) -> None:
    num_blocks = 400  # more than all prompts together
    limited = BlockPool(num_blocks, num_kept=kept)
    unlimited = BlockPool(num_blocks)
    num_worse = 0
    for index in order:
        prompt = chat(f"{index % len(lengths)} ", lengths[index % len(lengths)])
        num_worse += serve(limited, prompt) < serve(unlimited, prompt)
    # Each miss of an evicted block doubles the limit, and no block is evicted once all prompts fit. A prompt whose
    # blocks were evicted earlier misses once.
    total = sum(lengths)
    assert num_worse <= (ceil(log2(total / kept)) + len(lengths) if total > kept else 0)

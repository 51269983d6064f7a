"""PromptBlocks: the blocks by which a gateway finds the engine that has cached the beginning of a prompt.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_engine.core.block_hash import prompt_hashes
from rayloom_engine.core.embeds import embeds_of
from rayloom_engine.routing.prefix_index import cut_hashes
from rayloom_engine.routing.rendezvous import TIE_BLOCKS, tie_key

# The engines' default number of tokens in a block. Used for the tie key before an engine has reported its block size.
_ASSUMED_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    block_size: int  # tokens in a block; 0: no engine has reported its block size
    tie_key: bytes  # equal for prompts with the same first blocks; decides between engines that are equally good
    hashes: tuple[int, ...] = ()  # hashes of the blocks, cut as in a PrefixIndex

    def of_size(self, block_size: int) -> tuple[int, ...]:
        """Returns the hashes for an engine with this block size; no hashes if they are for another block size."""
        return self.hashes if block_size == self.block_size else ()


def prompt_blocks(
    prompt_ids: tuple[int, ...],
    block_size: int,
    *,
    keys: tuple[bytes, bytes],
    otherwise: bytes,
    is_shared: bool = True,
) -> PromptBlocks:
    """Returns the blocks of a prompt. `otherwise`: the tie key of a prompt without a full block.

    `keys`: the cache key and the digest of the LoRA adapter; either may be empty. `is_shared`: False if engines compute
    this prompt without the prefix cache. The result then has a tie key, but no hashes.
    """
    is_whole = is_shared and block_size > 0
    size = block_size or _ASSUMED_BLOCK_SIZE
    hashed_ids = prompt_ids if is_whole else prompt_ids[: TIE_BLOCKS * size]
    hashes = prompt_hashes(hashed_ids, size, *keys, embeds_of(prompt_ids))
    key = tie_key(hashes, otherwise)
    return PromptBlocks(block_size, key, cut_hashes(hashes) if is_whole else ())

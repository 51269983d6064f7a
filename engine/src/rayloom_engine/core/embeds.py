"""Prompts of embeddings: rows that the ranks feed to the first layer in place of looked-up rows of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from rayloom_engine.errors import RequestError

EmbedsType = Literal["float32", "bfloat16", "float16"]
ELEMENT_BYTES: Mapping[EmbedsType, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
# The most bytes of embeddings in one message: half of protocol.framing.MAX_FRAME_BYTES. The embeddings of a prompt are
# one message from front to core, and those of a step are part of one message from core to rank.
MAX_EMBEDS_BYTES = 128 * 1024 * 1024
# The most bytes of embeddings in plans that wait for their rank. A rank reads no message while it computes a step, so
# these plans must fit the ring in shared memory (1 MiB) or the buffers of a connection. Otherwise the core would block
# in `send`, and after the hang limit take the rank for dead.
MAX_WAITING_EMBEDS_BYTES = 512 * 1024
# Stands for the unknown token id of a position with an embedding. Penalties skip it. Drafts may contain it like any
# other id: a wrong draft costs time, and never changes a token.
PLACEHOLDER_ID = 0
FIELD = "prompt_embeds"  # the request's field
NOT_ENABLED = (
    f"{FIELD} is not enabled on this server; leave it out, or start the server with --enable-prompt-embeds "
    "(in an LLMService: spec.engine.args.enablePromptEmbeds: true)"
)


class Embeds(msgspec.Struct, frozen=True):
    """Embeddings of neighbouring positions of a prompt."""

    dtype: EmbedsType
    width: int  # elements of a row
    data: bytes  # the rows in order of position, little-endian

    @property
    def row_bytes(self) -> int:
        return self.width * ELEMENT_BYTES[self.dtype]

    @property
    def num_rows(self) -> int:
        return len(self.data) // self.row_bytes

    def rows(self, start: int, stop: int) -> Embeds:
        """Returns the rows [start, stop), as far as they exist."""
        return Embeds(self.dtype, self.width, self.data[start * self.row_bytes : stop * self.row_bytes])

    def digest(self) -> bytes:
        """Returns a hash of type and content, 16 bytes. The width is not part of it: an engine has only one width."""
        return hashlib.blake2b(self.data, digest_size=16, person=self.dtype.encode()).digest()


class EmbeddedPrompt(tuple[int, ...]):
    """The placeholder ids of a prompt of embeddings, one for each row, and the rows.

    Two of them are equal only if their embeddings are equal. A slice is a plain tuple without embeddings.
    """

    embeds: Embeds

    def __new__(cls, embeds: Embeds) -> EmbeddedPrompt:
        prompt = super().__new__(cls, (PLACEHOLDER_ID,) * embeds.num_rows)
        prompt.embeds = embeds
        return prompt

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EmbeddedPrompt) and (self.embeds is other.embeds or self.embeds == other.embeds)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.embeds)


def embeds_of(prompt_ids: object) -> Embeds | None:
    """Returns the embeddings of a prompt; None for a prompt of token ids."""
    return prompt_ids.embeds if isinstance(prompt_ids, EmbeddedPrompt) else None


def most_step_rows(width: int) -> int:
    """Returns the most rows of this width, in float32, that a step may have."""
    return max(1, MAX_EMBEDS_BYTES // (4 * width))


def most_plan_bytes(depth: int, num_in_flight: int) -> int | None:
    """Returns the most bytes of embeddings in the next of up to `depth` plans in flight; None: the budget bounds them.

    The first plan waits for no other plan, so its rank reads it at once.
    """
    return None if num_in_flight == 0 else MAX_WAITING_EMBEDS_BYTES // (depth - 1)


def check_embeds(embeds: Embeds | None, hidden_size: int) -> None:
    """Raises RequestError for embeddings that an engine cannot compute as a prompt.

    `hidden_size`: width of the model's embeddings; 0: the engine takes no embeddings.
    """
    if embeds is None:
        return
    if not hidden_size:
        raise RequestError(NOT_ENABLED, FIELD)
    if embeds.width != hidden_size:
        raise RequestError(
            f"{FIELD} has rows of {embeds.width} elements, and the hidden size of this model is {hidden_size}; "
            "send embeddings of this model",
            FIELD,
        )
    if not embeds.data:
        raise RequestError(f"{FIELD} has no rows; send one position or more", FIELD)
    if len(embeds.data) % embeds.row_bytes:
        raise RequestError(f"{FIELD} has {len(embeds.data)} bytes, and a row has {embeds.row_bytes}", FIELD)
    if len(embeds.data) > MAX_EMBEDS_BYTES:
        raise RequestError(
            f"{FIELD} has {len(embeds.data)} bytes of embeddings in one prompt, at most {MAX_EMBEDS_BYTES} are "
            "allowed; send fewer positions or a narrower dtype",
            FIELD,
        )

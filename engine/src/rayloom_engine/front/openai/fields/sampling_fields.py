"""vLLM's own request fields: allowed tokens, tokens with log-probabilities, forbidden words, cuts of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from rayloom_engine.errors import RequestError
from rayloom_engine.front.openai.fields.field_types import Whole, whole_items
from rayloom_engine.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_COUNT,
    MAX_LOGPROB_TOKEN_IDS,
    SamplingParams,
)

# fail_fast: see field_types.py.
AllowedTokenIds = Annotated[
    list[int], Field(max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True), BeforeValidator(whole_items)
]
LogprobTokenIds = Annotated[
    list[int], Field(max_length=MAX_LOGPROB_TOKEN_IDS, fail_fast=True), BeforeValidator(whole_items)
]
BadWords = Annotated[list[str], Field(max_length=MAX_BAD_WORDS, fail_fast=True)]


class SamplingFields(BaseModel):
    bad_words: BadWords | None = Field(
        None,
        description=f"Words that the answer never contains, alone or after a blank; at most {MAX_BAD_WORDS} with "
        f"{MAX_BAD_WORD_CHARS} characters together. Other tokens that spell the same word are not prevented.",
    )
    allowed_token_ids: AllowedTokenIds | None = Field(
        None, description="Only these tokens are chosen; at most 524288 ids for all choices together (prompts x n)."
    )
    logprob_token_ids: LogprobTokenIds | None = Field(
        None,
        description=f"At most {MAX_LOGPROB_TOKEN_IDS} ids. In `logprobs`, the alternatives of each token are these "
        "tokens and the chosen token, instead of the most likely tokens. Needs logprobs.",
    )
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1, le=MAX_COUNT)] | None = Field(
        None, description="Cuts the prompt to this many tokens; -1: to as many as fit in the context beside max_tokens."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None,
        description="left cuts the prompt's beginning, right its end; needs truncate_prompt_tokens. Default: left.",
    )

    def cut_prompt(self, ids: Sequence[int], params: SamplingParams, max_model_len: int) -> Sequence[int]:
        """Returns the tokens of a prompt that remain; `ids` itself if nothing is cut off. Raises RequestError."""
        most = self.truncate_prompt_tokens
        if most is None:
            if self.truncation_side is not None:
                raise RequestError(
                    "truncation_side needs truncate_prompt_tokens; add it, or leave both out", "truncation_side"
                )
            return ids
        if most == 0:
            raise RequestError(
                "truncate_prompt_tokens must be -1 or at least 1, given 0: a prompt needs a token",
                "truncate_prompt_tokens",
            )
        if most == -1:
            most = max(1, max_model_len - max(params.max_tokens or 0, params.min_tokens, 1))
        if len(ids) <= most:
            return ids
        return ids[:most] if self.truncation_side == "right" else ids[-most:]

"""DecodingParams: the settings by which EngineCore and ranks choose one sequence's tokens.

Not to be confused with `rayloom_engine.SamplingParams`, the user's settings (n, stop strings, optional seed): a user's
request becomes n sequences, each with one DecodingParams. The API server process applies stop strings, for only it has
text.
"""

from __future__ import annotations

import msgspec


class DecodingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Determines, with (logits, seed, position) alone, every token of a sequence. Values are validated before."""

    max_tokens: int  # generated tokens at most, >= 1
    min_tokens: int = 0  # before that many are generated, EOS and stop ids cannot be chosen
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # [0, 1]; the most likely token is always kept
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # [0, 1]
    repetition_penalty: float = 1.0  # > 0; over prompt and generated tokens
    presence_penalty: float = 0.0  # [-2, 2]; over generated tokens
    frequency_penalty: float = 0.0  # [-2, 2]; over generated tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias)
    seed: int = 0  # 0 <= seed < 2**63; the front draws one where the user gave none, so that a replay is exact
    stop_token_ids: tuple[int, ...] = ()  # end the sequence, besides EOS
    ignore_eos: bool = False
    logprobs: int | None = (
        None  # top alternatives per generated token; None = no logprobs at all, 0 = chosen token only
    )
    prompt_logprobs: int | None = None  # the same for prompt tokens (echo)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

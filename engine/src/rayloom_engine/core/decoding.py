"""DecodingParams: the settings with which EngineCore and ranks choose the tokens of one sequence.

Not to be confused with `rayloom_engine.SamplingParams`, the user's settings (n, stop strings, optional seed). A user's
request becomes n sequences, and each sequence has its own DecodingParams. Stop strings are applied by the API server
process, because only that process has text.
"""

from __future__ import annotations

import msgspec

from rayloom_engine.core.adapter import Adapter


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A limit of the reasoning's tokens, and how the model writes the reasoning's beginning and end."""

    num_tokens: int  # after this many tokens of reasoning, the sequence continues with `end_ids`
    # text at the beginning of the answer, before the reasoning; empty: the answer begins with the reasoning
    start: str
    ends: tuple[str, ...]  # texts that end the reasoning
    # Name of a tool format: its openers in `ends` end the reasoning only where a call follows. Empty: each of `ends`
    # always does. Fronts of versions without this field leave it out.
    calls: str = ""
    end_ids: tuple[int, ...]  # tokens of one of these texts


class DecodingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that control how a sequence is sampled and when it ends. All values are validated.

    With the logits and the position, these settings determine every token of the sequence.
    """

    max_tokens: int  # generated tokens at most, >= 1
    min_tokens: int = 0  # EOS and stop ids cannot be chosen until this many tokens are generated
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # [0, 1]; the most likely token is always kept
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # [0, 1]
    repetition_penalty: float = 1.0  # > 0; over prompt and generated tokens
    presence_penalty: float = 0.0  # [-2, 2]; over generated tokens
    frequency_penalty: float = 0.0  # [-2, 2]; over generated tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias)
    seed: int = 0  # 0 <= seed < 2**63; if the user gives no seed, the front draws one, so that a replay is exact
    stop_token_ids: tuple[int, ...] = ()  # ids that end the sequence, besides EOS
    ignore_eos: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the generated tokens never contain
    allowed_token_ids: tuple[int, ...] | None = None  # only these tokens can be chosen; None = all; never empty
    # Top alternatives per generated token; None = no logprobs at all, 0 = chosen token only.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # top alternatives per prompt token (echo)
    grammar: str = ""  # grammar of the answer, in llguidance's Lark syntax; empty: any answer
    grammar_after: str = ""  # the grammar begins after this text; empty: with the answer
    thinking: ThinkingBudget | None = None  # None: reasoning is not limited
    speculation: bool = True  # False: never verify drafts of this sequence, even if the engine makes drafts
    # With logprobs: the alternatives are these tokens and the chosen token, instead of the most likely tokens.
    logprob_token_ids: tuple[int, ...] = ()

    adapter: Adapter | None = None  # LoRA adapter that changes the model for this sequence

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def adapter_digest(self) -> bytes:
        """Digest of the adapter; empty without an adapter."""
        return b"" if self.adapter is None else self.adapter.digest

    @property
    def has_mask(self) -> bool:
        """True if masks limit the tokens. The sampling rank postpones the sequence while a mask is not ready."""
        return bool(self.grammar) or self.thinking is not None

"""SequenceOutput: new tokens of one sequence, from the scheduler to the API server process that streams them."""

from __future__ import annotations

import msgspec

from rayloom_engine.core.step import TokenLogprobs


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Also part of the wire protocol from EngineCore to API server processes (`protocol.messages.Outputs`)."""

    # Inside the EngineCore: the Sequence's request_id. On the wire: the id that the API server process gave.
    sequence_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token id, if the client asked for logprobs
    # Sent with the first token; the first prompt token has none. Long tuples come earlier, in parts: logprob_parts.py
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs_start: int = 0  # number of entries in the parts before this one
    finish_reason: str | None = None  # "stop" | "length" in the last output; in the EngineCore also another
    message: str = ""  # of a broken form
    stop_token_id: int | None = None  # the id that ended the sequence (EOS or a stop id); also the last of token_ids
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; only in the first output
    attempt: int = 0  # on the wire: of the Submit

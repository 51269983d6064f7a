"""SequenceOutput: new tokens of one sequence, from the scheduler to the API server process that streams them."""

from __future__ import annotations

import msgspec

from rayloom_engine.core.sequence import Sequence
from rayloom_engine.core.step import SampledToken, TokenLogprobs


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one sequence.

    Messages from EngineCore to API server processes (`protocol.messages`) also contain this struct.
    """

    # Inside the EngineCore: the Sequence's request_id. On the wire: the id that the API server process gave.
    sequence_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token id, if the client asked for logprobs
    # Sent with the first generated token. The first prompt token has no entry. Many entries are split over several
    # outputs, and the last of these outputs has the first generated token (logprob_parts.py).
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs_start: int = 0  # number of entries in earlier outputs
    # only in the last output; inside the core also CORRUPT, BROKEN_FORM or BROKEN_ADAPTER (core/sequence.py)
    finish_reason: str | None = None
    message: str = ""  # why the grammar or the adapter has failed: for BROKEN_FORM and BROKEN_ADAPTER
    stop_token_id: int | None = None  # the id that ended the sequence (EOS or a stop id); also the last of token_ids
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache; only in the first output
    queue_s: float = 0.0  # seconds from the sequence's acceptance to its first step; only in the first output
    num_preemptions: int = 0  # preemptions of the sequence so far
    attempt: int = 0  # on the wire: the attempt number of the Submit


def output_of(sequence: Sequence, sampled: SampledToken, reason: str | None) -> SequenceOutput:
    """Returns the output with a sequence's newest token. `reason`: finish reason; None if the sequence continues."""
    is_first = sequence.num_generated == 1
    if reason is None and sampled.logprobs is None and not is_first and not sequence.num_preemptions:
        return SequenceOutput(sequence_id=sequence.request_id, token_ids=(sampled.token_id,))
    return SequenceOutput(
        sequence_id=sequence.request_id,
        token_ids=(sampled.token_id,),
        logprobs=(sampled.logprobs,) if sampled.logprobs is not None else (),
        prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first else (),
        finish_reason=reason,
        stop_token_id=sampled.token_id if reason == "stop" else None,
        num_cached_tokens=(sequence.num_cached_tokens or 0) if is_first else 0,
        queue_s=(sequence.queue_s or 0.0) if is_first else 0.0,
        num_preemptions=sequence.num_preemptions,
    )

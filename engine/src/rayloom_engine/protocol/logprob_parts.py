"""Splits long prompt_logprobs into parts between EngineCore and API server process, so that no frame is large.

A position with 20 alternatives takes about 345 bytes, and a prompt may have hundreds of thousands of positions. A part
is a SequenceOutput with prompt_logprobs and no token; the SequenceOutput with the first token has the last part. Each
part has its start position: after a restart of the EngineCore its parts replace those of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.protocol.messages import Outputs, SequenceOutput

_PART_VALUES = 65_536  # log-probabilities in a frame, each of 17 bytes: about 1 MB


def split_outputs(message: Outputs) -> Iterator[Outputs]:
    """The messages to send in place of `message`, in order; `message` itself unless prompt_logprobs are long."""
    if not any(output.prompt_logprobs for output in message.outputs):
        yield message  # as in almost every step
        return
    outputs = []
    for output in message.outputs:
        *parts, last = _parts(output)
        yield from (Outputs((part,)) for part in parts)
        outputs.append(last)
    yield Outputs(tuple(outputs))


def _parts(output: SequenceOutput) -> Iterator[SequenceOutput]:
    entries = output.prompt_logprobs
    size = max(1, _PART_VALUES // max((1 + len(entry.top) for entry in entries), default=1))
    last = max(0, len(entries) - 1) // size * size  # start of the last part
    for start in range(0, last, size):
        yield SequenceOutput(
            sequence_id=output.sequence_id,
            prompt_logprobs=entries[start : start + size],
            prompt_logprobs_start=start,
        )
    if last:
        output = msgspec.structs.replace(output, prompt_logprobs=entries[last:], prompt_logprobs_start=last)
    yield output


class LogprobParts:
    """The parts received of the prompt_logprobs of one sequence."""

    def __init__(self) -> None:
        self._entries: list[TokenLogprobs] = []

    def take(self, output: SequenceOutput) -> SequenceOutput | None:
        """The output with all of the prompt_logprobs; None for a part that is not the last."""
        start = output.prompt_logprobs_start
        is_part = not output.token_ids and output.finish_reason is None
        if is_part or start:
            self._entries[start:] = output.prompt_logprobs
        if is_part:
            return None
        whole = tuple(self._entries)
        self._entries = []
        return msgspec.structs.replace(output, prompt_logprobs=whole, prompt_logprobs_start=0) if start else output

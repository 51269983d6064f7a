"""Splits the log-probabilities that a core sends to a front into several messages, so that no frame is large.

A position with 20 alternatives takes about 345 bytes, and a prompt may have hundreds of thousands of positions. A part
is a SequenceOutput with prompt_logprobs and no token; the last part is in the SequenceOutput with the first token.
Each part has its start position, because a restarted core sends all parts again. Parts that arrive again replace those
of the earlier core.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.protocol.messages import Outputs, SequenceOutput

_PART_VALUES = 65_536  # log-probabilities in one part, at 17 bytes each: about 1 MB


def split_outputs(message: Outputs) -> Iterator[Outputs]:
    """Splits `message` if it has many log-probabilities. Yields the parts in the order of sending, or `message`."""
    if not any(output.prompt_logprobs or output.logprobs for output in message.outputs):
        yield message  # the usual case
        return
    outputs = []
    for output in message.outputs:
        *parts, last = _parts(output)
        yield from (Outputs((part,)) for part in parts)
        outputs.append(last)
    yield from _groups(outputs)


def _groups(outputs: list[SequenceOutput]) -> Iterator[Outputs]:
    """Yields the outputs of a step in one message, or in several if their tokens have many alternatives.

    If every token of the vocabulary is an alternative, the outputs of a hundred sequences exceed the limit of a frame.
    """
    group: list[SequenceOutput] = []
    num_values = 0
    for output in outputs:
        num = sum(1 + len(entry.top) for entry in output.logprobs)
        if group and num_values + num > _PART_VALUES:
            yield Outputs(tuple(group))
            group = []
            num_values = 0
        group.append(output)
        num_values += num
    yield Outputs(tuple(group))


def _parts(output: SequenceOutput) -> Iterator[SequenceOutput]:
    entries = output.prompt_logprobs
    size = max(1, _PART_VALUES // max((1 + len(entry.top) for entry in entries), default=1))
    last = max(0, len(entries) - 1) // size * size  # start of the last part
    for start in range(0, last, size):
        yield SequenceOutput(
            sequence_id=output.sequence_id,
            prompt_logprobs=entries[start : start + size],
            prompt_logprobs_start=start,
            attempt=output.attempt,
        )
    if last:
        output = msgspec.structs.replace(output, prompt_logprobs=entries[last:], prompt_logprobs_start=last)
    yield output


class LogprobParts:
    """Collects the parts of one sequence's prompt_logprobs."""

    def __init__(self) -> None:
        self._entries: list[TokenLogprobs] = []

    def take(self, output: SequenceOutput) -> SequenceOutput | None:
        """Returns the output with all prompt_logprobs, or None while further parts are missing."""
        start = output.prompt_logprobs_start
        is_part = not output.token_ids and output.finish_reason is None
        if is_part or start:
            self._entries[start:] = output.prompt_logprobs
        if is_part:
            return None
        whole = tuple(self._entries)
        self._entries = []
        return msgspec.structs.replace(output, prompt_logprobs=whole, prompt_logprobs_start=0) if start else output

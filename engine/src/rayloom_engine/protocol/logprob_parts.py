"""Long prompt_logprobs cross from the core to a front in parts, so that no frame is large.

A position with 20 alternatives is about 345 bytes, and a prompt may have hundreds of thousands of positions. A part is
an Output that has prompt_logprobs and no token; the Output with the first token follows with the last part. A part says
where it begins, so that a front which has some parts from a core that died puts those of the next one in their place.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.protocol.messages import Output, Outputs

_PART_VALUES = 65_536  # log-probabilities in a frame, each of 17 bytes: about 1 MB


def split_outputs(message: Outputs) -> Iterator[Outputs]:
    """The messages to send in place of this one, in order; the message itself unless prompt_logprobs are long."""
    if not any(output.prompt_logprobs for output in message.outputs):
        yield message  # as in almost every step
        return
    outputs = []
    for output in message.outputs:
        *parts, last = _parts(output)
        yield from (Outputs((part,)) for part in parts)
        outputs.append(last)
    yield Outputs(tuple(outputs))


def _parts(output: Output) -> Iterator[Output]:
    entries = output.prompt_logprobs
    size = max(1, _PART_VALUES // max((1 + len(entry.top) for entry in entries), default=1))
    last = max(0, len(entries) - 1) // size * size  # where the last part begins
    for start in range(0, last, size):
        yield Output(
            sequence_id=output.sequence_id,
            prompt_logprobs=entries[start : start + size],
            prompt_logprobs_start=start,
        )
    if last:
        output = msgspec.structs.replace(output, prompt_logprobs=entries[last:], prompt_logprobs_start=last)
    yield output


class LogprobParts:
    """What a front has of the prompt_logprobs of one sequence."""

    def __init__(self) -> None:
        self._entries: list[TokenLogprobs] = []

    def take(self, output: Output) -> Output | None:
        """The output with all of the prompt_logprobs; None for a part that others follow."""
        start = output.prompt_logprobs_start
        is_part = not output.token_ids and output.finish_reason is None
        if is_part or start:
            self._entries[start:] = output.prompt_logprobs
        if is_part:
            return None
        whole = tuple(self._entries)
        self._entries = []
        return msgspec.structs.replace(output, prompt_logprobs=whole, prompt_logprobs_start=0) if start else output

"""Long prompt_logprobs in parts: small frames, and the same entries at the receiver, even after the death of a core."""

from __future__ import annotations

import pytest

from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.protocol.framing import frame
from rayloom_engine.protocol.logprob_parts import LogprobParts, split_outputs
from rayloom_engine.protocol.messages import Outputs, SequenceOutput


def _entries(num: int, num_top: int) -> tuple[TokenLogprobs, ...]:
    top = tuple((100_000 + index, -1.25 * index) for index in range(num_top))
    return tuple(TokenLogprobs(number, -3.3, 17, top) for number in range(num))


def _output(num: int, num_top: int = 0) -> SequenceOutput:
    return SequenceOutput(sequence_id="s", token_ids=(7,), prompt_logprobs=_entries(num, num_top), num_cached_tokens=5)


@pytest.mark.parametrize(("num_top", "size"), [(0, 65_536), (1, 32_768), (20, 3_120)])
def test_a_frame_holds_a_bounded_number_of_logprobs_and_the_token_comes_last(num_top: int, size: int) -> None:
    for num, sizes in [(size, [size]), (size + 1, [size, 1]), (2 * size, [size, size])]:
        output = _output(num, num_top)
        parts = [part for message in split_outputs(Outputs((output,))) for part in message.outputs]
        assert [len(part.prompt_logprobs) for part in parts] == sizes
        assert [part.token_ids for part in parts] == [()] * (len(sizes) - 1) + [(7,)]
        assert all(len(frame(Outputs((part,)))) < 3 * 1024 * 1024 for part in parts)
        held = LogprobParts()
        assert [held.take(part) for part in parts] == [None] * (len(sizes) - 1) + [output]


def test_other_outputs_of_a_step_stay_together() -> None:
    plain = Outputs((SequenceOutput(sequence_id="a", token_ids=(1,)), SequenceOutput(sequence_id="b", token_ids=(2,))))
    assert list(split_outputs(plain)) == [plain]
    *parts, last = split_outputs(Outputs((plain.outputs[0], _output(70_000), plain.outputs[1])))
    assert len(parts) == 1
    assert [output.sequence_id for output in last.outputs] == ["a", "s", "b"]


def test_tokens_with_many_alternatives_are_sent_in_several_frames() -> None:
    outputs = [
        SequenceOutput(sequence_id=f"{number}", token_ids=(7,), logprobs=_entries(1, num_top))
        for number, num_top in enumerate([20_000, 20_000, 20, 30_000, 200_000, 1])
    ]
    messages = list(split_outputs(Outputs(tuple(outputs))))
    ids = [[output.sequence_id for output in message.outputs] for message in messages]
    assert ids == [["0", "1", "2"], ["3"], ["4"], ["5"]]
    assert [output for message in messages for output in message.outputs] == outputs


def test_a_short_output_is_unchanged() -> None:
    output = _output(3)
    assert list(split_outputs(Outputs((output,)))) == [Outputs((output,))]
    assert LogprobParts().take(output) is output


def test_parts_of_a_core_that_died_are_replaced_by_those_of_the_next() -> None:
    output = _output(150_000)
    messages = list(split_outputs(Outputs((output,))))
    assert len(messages) == 3
    for num_received in (1, 2):
        held = LogprobParts()
        for message in messages[:num_received]:
            assert held.take(message.outputs[0]) is None
        assert [held.take(message.outputs[0]) for message in messages] == [None, None, output]

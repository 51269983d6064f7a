"""The positions in a ring, compared with a model.

The model knows every byte of each message until the reader has read the message.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.protocol.ring import Ring

CAPACITY = 16


def test_a_message_too_long_for_the_end_begins_at_zero() -> None:
    writer, reader = Ring(CAPACITY), Ring(CAPACITY)
    assert [writer.place(6), writer.place(6), writer.place(6)] == [0, 6, None]
    writer.free(num_unread=0)  # message 2 may be half read, so only 4 bytes at the end and 6 at the beginning are free
    assert writer.place(6) == 0
    assert [reader.follow(6) for _ in range(3)] == [0, 6, 0]


def test_a_message_that_went_another_way_is_counted_in_order() -> None:
    writer = Ring(CAPACITY)
    assert [writer.place(10), writer.place(10)] == [0, None]
    writer.pass_by()
    writer.free(num_unread=1)  # the first message may be half read
    assert writer.place(10) is None
    writer.free(num_unread=0)  # the second message may be half read, but is not in the ring
    assert writer.place(6) == 10


@given(st.lists(st.tuples(st.integers(1, CAPACITY + 2), st.integers(0, 4)), max_size=60))
def test_no_message_is_written_over_before_it_was_read(steps: list[tuple[int, int]]) -> None:
    """Each step writes a message.

    Then the reader begins to read some messages, and may have read only half of the last one.
    """
    writer, reader = Ring(CAPACITY), Ring(CAPACITY)
    unread: list[int | None] = []  # sizes; None = not sent through the ring
    spans: list[tuple[int, int]] = []  # of messages that the reader has perhaps not yet read, oldest first
    half_read: tuple[int, int] | None = None
    for size, num_reads in steps:
        position = writer.place(size)
        if position is None:
            writer.free(len(unread))
            position = writer.place(size)
        if position is None:
            writer.pass_by()
        unread.append(None if position is None else size)
        if position is not None:
            span = (position, position + size)
            assert position >= 0 and span[1] <= CAPACITY
            held = spans if half_read is None else [half_read, *spans]
            assert all(span[1] <= begin or end <= span[0] for begin, end in held)
            spans.append(span)
        for _ in range(min(num_reads, len(unread))):
            half_read, taken = None, unread.pop(0)
            if taken is not None:
                half_read = spans.pop(0)
                assert reader.follow(taken) == half_read[0]

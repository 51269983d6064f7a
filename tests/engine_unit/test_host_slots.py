"""The index of copies of KV blocks in host memory, compared with a simple model."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rayloom_engine.core.host_slots import HostSlots

CONTENTS = st.sampled_from([bytes([number]) for number in range(6)])


class SlotsMachine(RuleBasedStateMachine):
    """The index of copies, beside a model that remembers what each slot has."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = HostSlots(3)
        self.storing: list = []
        self.loading: list = []
        self.in_slot: dict[int, tuple[bytes, bool]] = {}  # slot -> (content, whether it is stored), by the model
        self.held: list[bytes] = []
        self.known: set[bytes] = set()
        self.slots.on_shareable = self.known.add
        self.slots.on_unshareable = self.known.remove

    @rule(content=CONTENTS, prover=st.sampled_from((None, 1, 2)))
    def store(self, content: bytes, prover: int | None) -> None:
        if self.slots.find(content) is not None:
            return
        held = [each for each in set(self.held) if self.slots.find(each) is not None]
        copy = self.slots.try_add(content, prover)
        assert all(self.slots.find(each) is not None for each in held), "a copy in use was evicted"
        if copy is None:
            return
        busy = {each.slot for each in (*self.storing, *self.loading)}
        assert copy.slot not in busy, "a slot that a plan in flight uses was given away"
        self.in_slot[copy.slot] = content, False
        self.storing.append(copy)

    @precondition(lambda self: self.storing)
    @rule()
    def confirm(self) -> None:
        copy = self.storing.pop(0)
        self.in_slot[copy.slot] = copy.content, True
        self.slots.stored(copy)

    @rule(content=CONTENTS, number=st.sampled_from((1, 2, 3)))
    def load(self, content: bytes, number: int) -> None:
        if self.slots.may_load(content, number):
            copy = self.slots.find(content)
            assert self.in_slot[copy.slot] == (content, True), "a copy is loaded that is not stored"
            assert copy.prover in (None, number)
            self.slots.begin_load(copy)
            self.loading.append(copy)

    @precondition(lambda self: self.loading)
    @rule()
    def end_load(self) -> None:
        copy = self.loading.pop(0)
        assert self.in_slot[copy.slot][0] == copy.content, "a slot was overwritten while it was loaded"
        self.slots.end_load(copy)

    @rule(content=CONTENTS)
    def prove(self, content: bytes) -> None:
        copy = self.slots.find(content)
        if copy is not None and copy.prover is not None:
            self.slots.prove(copy)

    @rule(content=CONTENTS)
    def drop(self, content: bytes) -> None:
        self.slots.drop(content)
        assert self.slots.find(content) is None

    @rule(content=CONTENTS)
    def hold(self, content: bytes) -> None:
        self.slots.hold([content])
        self.held.append(content)

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.slots.release([self.held.pop(0)])

    @invariant()
    def holds_together(self) -> None:
        self.slots.check_integrity(self.storing, Counter(self.loading), Counter(self.held))
        assert self.slots.num_used <= 3
        assert self.known == set(self.slots.shareable_contents())


TestSlotsMachine = SlotsMachine.TestCase
TestSlotsMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_held_copy_is_not_evicted() -> None:
    slots = HostSlots(1)
    copy = slots.try_add(b"a", None)
    assert copy is not None
    slots.stored(copy)
    slots.hold([b"a"])
    assert slots.try_add(b"b", None) is None
    slots.release([b"a"])
    assert slots.try_add(b"b", None) is not None
    assert slots.find(b"a") is None


def test_a_dropped_copy_that_is_still_loaded_does_not_keep_a_newer_copy() -> None:
    slots = HostSlots(2)
    old = slots.try_add(b"a", None)
    assert old is not None
    slots.stored(old)
    for _ in range(2):
        slots.begin_load(old)
    slots.drop(b"a")
    new = slots.try_add(b"a", None)
    assert new is not None
    slots.stored(new)
    slots.end_load(old)
    slots.check_integrity([], Counter({old: 1}), Counter())
    assert slots.try_add(b"b", None) is not None, "the newer copy is idle, so it gives way"

"""Every sequence gets each of its ids exactly once, even if engines fail and messages are delayed.

There are no sockets: an engine is a queue of messages in each direction. hypothesis chooses the message that is handled
next.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.errors import PoisonousRequest
from rayloom_engine.front.core_link.core_client import CoreClient
from rayloom_engine.front.core_link.engine_choice import MOST_LOSSES, PoolRules
from rayloom_engine.front.core_link.engine_link import EngineLink
from rayloom_engine.front.core_link.handshake import CoreAddress
from rayloom_engine.front.core_link.request_mailbox import Mailbox
from rayloom_engine.front.core_link.sequences import ClientSequence
from rayloom_engine.protocol.framing import front_decoder
from rayloom_engine.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    CoreMessage,
    Outputs,
    Refused,
    SequenceOutput,
    Submit,
    WantCache,
    Welcome,
)
from rt_fake_core import FakeCore

NUM_IDS = 5
NAMES = ("a", "b", "c")
CORE = CoreAddress("unix:/none", "token")


def ids_of(sequence_id: str) -> list[int]:
    """The ids that every engine computes for a sequence."""
    return [1000 * int(sequence_id) + position for position in range(NUM_IDS)]


class ScriptedLink(EngineLink):
    """An engine whose messages wait in `to_engine` and `to_front` until the test handles them."""

    def begin(self, core: FakeCore) -> None:
        """Sets the first state. `core` only makes the statuses."""
        self.core_of_status = core
        self.to_engine: deque[Submit | Abort] = deque()
        self.to_front: deque[CoreMessage] = deque()
        self.live: dict[tuple[str, int], int] = {}  # (sequence id, attempt) -> position of the next id
        self.room = 100

    def send(self, data: bytes) -> None:
        while data:
            size = int.from_bytes(data[:4], "big")
            message = front_decoder.decode(data[4 : 4 + size])
            if not isinstance(message, WantCache):
                assert isinstance(message, Submit | Abort)
                self.to_engine.append(message)
            data = data[4 + size :]

    def connect(self) -> None:
        if not self.is_connected:
            self.is_connected = True
            self.version = PROTOCOL_VERSION
            self._listener.connected(self, Welcome(epoch=1, pid=1, version=PROTOCOL_VERSION))
            self.tell(is_draining=False)
            self.deliver()

    def lose(self) -> None:
        if self.is_connected:
            self.forget()
            self._disconnected("lost")

    def forget(self) -> None:
        """Drops all messages and sequences, because the connection has ended."""
        self.to_engine.clear()
        self.to_front.clear()
        self.live.clear()

    def tell(self, *, is_draining: bool) -> None:
        self.core_of_status.is_draining = is_draining
        self.to_front.append(self.core_of_status._status())

    def take(self) -> None:
        """The engine handles all waiting messages."""
        while self.to_engine:
            message = self.to_engine.popleft()
            key = (message.sequence_id, message.attempt)
            if isinstance(message, Abort):
                self.live.pop(key, None)
            elif len(self.live) >= self.room and not message.is_resume:
                refused = Refused(sequence_id=key[0], reason="queue_full", message="full", attempt=key[1])
                self.to_front.append(refused)
            else:
                assert list(message.generated_ids) == ids_of(key[0])[: len(message.generated_ids)]
                self.live[key] = len(message.generated_ids)

    def compute(self) -> None:
        """Computes one id of each sequence. Messages may still be queued."""
        outputs = []
        for (sequence_id, attempt), position in list(self.live.items()):
            is_last = position == NUM_IDS - 1
            outputs.append(
                SequenceOutput(
                    sequence_id=sequence_id,
                    token_ids=(ids_of(sequence_id)[position],),
                    finish_reason="length" if is_last else None,
                    attempt=attempt,
                )
            )
            self.live[sequence_id, attempt] += 1
            if is_last:
                del self.live[sequence_id, attempt]
        if outputs:
            self.to_front.append(Outputs(tuple(outputs)))

    def deliver(self) -> None:
        """The front receives the oldest message."""
        if self.to_front and self.is_connected:
            self._receive(self.to_front.popleft())


ACTIONS = st.one_of(
    st.tuples(
        st.sampled_from(
            ["connect", "lose", "drain", "take_back", "take", "compute", *["deliver"] * 3, "fill", "unlist", "list"]
        ),
        st.sampled_from(NAMES),
    ),
    st.tuples(st.sampled_from(["submit", "submit", "abort"]), st.integers(0, 5).map(str)),
)


class World:
    """A client and its engines."""

    def __init__(self) -> None:
        self.made: dict[str, ClientSequence] = {}
        self.aborted: set[str] = set()  # ids are never used again
        self.links: dict[str, ScriptedLink] = {}
        self.listed = frozenset(NAMES)
        self.client = CoreClient(
            {},
            on_status=lambda link, status: None,
            on_change=lambda: None,
            on_recovery=lambda recovery: None,
            rules=PoolRules(is_gateway=True),
        )
        for name in NAMES:
            link = ScriptedLink(name, CORE, self.client)
            link.begin(FakeCore(Path("/none")))
            self.links[name] = link
            self.client.pool.links[name] = link

    def set_engines(self) -> None:
        """Gives the client the list of engines. An engine that is listed again has a new connection."""
        before = set(self.client.pool.links)
        self.client.set_engines({name: CORE for name in NAMES if name in self.listed})
        for name in before - set(self.client.pool.links):
            self.links[name].forget()
        for name in set(self.client.pool.links) - before:
            self.client.pool.links[name] = self.links[name]
            self.links[name].is_leaving = False

    def submit(self, name: str) -> None:
        if name in self.made or name in self.aborted:
            return
        self.made[name] = ClientSequence(
            sequence_id=name,
            request_id=name,
            lane=0,
            mailbox=Mailbox(),
            prompt_ids=(1, int(name)),
            params=DecodingParams(max_tokens=NUM_IDS),
            priority=0,
            arrival=0.0,
        )
        self.client.submit([self.made[name]])
        assert self.made[name].place.engine in (None, *self.listed), "an engine that left the list gets nothing new"

    def act(self, action: str, of: str) -> None:
        match action:
            case "submit":
                self.submit(of)
            case "abort":
                self.client.abort(of)
                if self.made.pop(of, None) is not None:
                    self.aborted.add(of)
            case "drain" | "take_back":
                if self.links[of].is_connected:
                    self.links[of].tell(is_draining=action == "drain")
            case "unlist" | "list":
                self.listed = self.listed - {of} if action == "unlist" else self.listed | {of}
                self.set_engines()
            case "fill":
                self.links[of].room = 0
            case "connect" | "lose" if of not in self.client.pool.links:
                pass  # nothing connects to an engine that is not listed
            case _:
                getattr(self.links[of], action)()


def check_books(world: World) -> None:
    for name, link in world.links.items():
        own = [sequence for sequence in world.client.unfinished() if sequence.place.engine == name]
        assert link.estimate.num_sequences == len(own)
        assert link.is_connected or not own
        assert link.estimate.num_decodes == sum(sequence.place.is_decoding for sequence in own)
        tokens = sum(sequence.num_tokens for sequence in own if not sequence.place.is_decoding)
        assert link.estimate.outstanding_prefill_tokens == tokens


@settings(max_examples=400, deadline=None)
@given(st.lists(ACTIONS, max_size=60), st.integers(0, len(NAMES)))
def test_every_sequence_gets_each_id_once(actions: list[tuple[str, str]], num_connected: int) -> None:
    world = World()
    for name in NAMES[:num_connected]:
        world.links[name].connect()
    for action, of in actions:
        world.act(action, of)
        check_books(world)
        for sequence in world.made.values():
            assert sequence.generated_ids == ids_of(sequence.sequence_id)[: len(sequence.generated_ids)]
    world.listed = frozenset(NAMES)
    world.set_engines()
    for link in world.links.values():  # in the end all engines serve
        link.connect()
        link.room = 100
        link.tell(is_draining=False)
    for _ in range(10 * NUM_IDS):
        for link in world.links.values():
            link.take()
            link.compute()
            while link.to_front:
                link.deliver()
    assert not list(world.client.unfinished())
    for sequence in world.made.values():
        failure = sequence.mailbox.failure
        if failure is None:
            assert sequence.generated_ids == ids_of(sequence.sequence_id)
        elif isinstance(failure, PoisonousRequest):
            assert sequence.place.num_losses >= MOST_LOSSES
        else:
            assert len(sequence.place.refused_by) > 0, failure
            assert not sequence.generated_ids, "an answer that has begun is never refused"
    assert all(not link.live for link in world.links.values()), "no engine computes for nobody"
    check_books(world)


def test_an_output_that_an_engine_sends_before_it_reads_the_abort_is_dropped() -> None:
    world = World()
    for name in ("a", "b"):
        world.links[name].connect()
    world.submit("0")
    sequence = world.made["0"]
    first, other = (world.links[name] for name in ("ab" if sequence.place.engine == "a" else "ba"))
    first.take()
    first.compute()
    first.deliver()
    first.tell(is_draining=True)
    first.deliver()
    assert sequence.place.engine == other.name
    first.tell(is_draining=False)
    first.compute()  # the core has not read the Abort
    first.deliver()
    other.lose()
    assert (sequence.place.engine, sequence.place.attempt) == (first.name, 2)
    first.deliver()
    assert sequence.generated_ids == ids_of("0")[:1]
    for _ in range(NUM_IDS):
        first.take()
        first.compute()
        first.deliver()
    assert sequence.generated_ids == ids_of("0")
    assert not first.live


def test_statuses_that_wait_to_be_read_after_the_gateway_was_stopped_are_no_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    ends: list[float] = []
    transport = SimpleNamespace(abort=lambda: ends.append(now_s))
    link = World().links["a"]
    link._silence_s = 10.0
    link._writer = SimpleNamespace(transport=transport)  # type: ignore[assignment]
    link.connect()
    link.check_silence()
    now_s = 130.0  # the process was stopped for 30 s
    link.check_silence()
    link.tell(is_draining=False)
    link.deliver()
    for _ in range(11):
        assert not ends
        now_s += 1.0
        link.check_silence()
    assert ends == [141.0], "the core has sent nothing for more than 10 s"

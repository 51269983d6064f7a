"""CoreClient: the front's unfinished sequences, and the engines that compute them.

The client remembers prompt ids, received ids and parameters of every unfinished sequence. When an engine is lost, its
sequences are submitted again as resumed sequences. The front inside an engine submits them to the next core of this
engine; a gateway submits them to another engine. While there is no such core or engine, the sequences wait.

A sampled token depends only on logits, seed and position, so a resumed sequence can continue with the same tokens. The
logits of a replay differ by rounding, because the replay adds numbers in another order. In float32 the tokens stay the
same.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from rayloom_engine.common.process import node_name
from rayloom_engine.errors import EngineDead
from rayloom_engine.front.core_link.engine_answers import EngineAnswers
from rayloom_engine.front.core_link.engine_choice import (
    REBUILD_PATIENCE_S,
    PoolRules,
    is_usable,
)
from rayloom_engine.front.core_link.engine_link import EngineLink
from rayloom_engine.front.core_link.engine_pool import EnginePool
from rayloom_engine.front.core_link.handshake import CoreAddress, ProtocolError
from rayloom_engine.front.core_link.placement import Placement
from rayloom_engine.front.core_link.recoveries import RecoveryLog, RecoveryRecord
from rayloom_engine.front.core_link.sequences import (
    ClientSequence,
    by_prompt,
    check_held,
    encoded,
    num_requests,
)
from rayloom_engine.protocol.framing import frame
from rayloom_engine.protocol.messages import (
    CacheChanges,
    CoreMessage,
    CoreStatus,
    Draining,
    EngineAdapters,
    FilePart,
    LoadReport,
    NeedAdapters,
    Outputs,
    PhaseProgress,
    Refused,
    WantCache,
    Welcome,
)

_TICK_S = 1.0  # seconds between checks of sequences that wait, and of silent engines

logger = logging.getLogger(__name__)


class CoreClient:
    """Sends sequences to engines and puts their outputs into mailboxes. For one event loop.

    Callbacks run after the client's own state is up to date.
    """

    def __init__(
        self,
        cores: Mapping[str, CoreAddress],
        *,
        on_status: Callable[[EngineLink, CoreStatus], None],
        on_change: Callable[[], None],
        on_recovery: Callable[[RecoveryRecord], None],
        rules: PoolRules | None = None,
    ) -> None:
        """`cores`: addresses of engines by name. `on_change` is called whenever a connection is made or lost."""
        self.rules = rules or PoolRules()
        self.pool = EnginePool(cores, self.rules, self)
        self._on_status = on_status
        self._on_change = on_change
        self._on_recovery = on_recovery
        self._sequences: dict[str, ClientSequence] = {}  # sequence id -> unfinished sequence, in order of arrival
        self._was_serving = False
        # The messages that each new core gets, by type. Draining(False) is sent, too: the core may still have the
        # Draining(True) of an earlier front.
        self._told: dict[type, Draining | EngineAdapters | NeedAdapters] = {Draining: Draining(False)}
        self.on_file_part: Callable[[FilePart], None] = lambda part: None
        self.recoveries = RecoveryLog()
        self._placement = Placement(self.pool, self._sequences, self.recoveries)
        self._answers = EngineAnswers(self.pool, self._sequences, self._placement)

    @property
    def status(self) -> CoreStatus | None:
        """The latest status of the main engine. The core that sent it may have ended."""
        return None if self.pool.main is None else self.pool.main.status

    @property
    def status_age_s(self) -> float:
        return 0.0 if self.pool.main is None else self.pool.main.status_age_s

    @property
    def core_pid(self) -> int:
        """Process id of the main engine's core."""
        return 0 if self.pool.main is None else self.pool.main.pid

    @property
    def is_connected(self) -> bool:
        return any(link.is_connected for link in self.pool.links.values())

    @property
    def is_core_serving(self) -> bool:
        """True if an engine serves and accepts sequences, according to the latest status on its current connection."""
        return any(link.is_serving and is_usable(link, self.rules) for link in self.pool.links.values())

    def unfinished(self) -> Iterable[ClientSequence]:
        """All unfinished sequences, in order of arrival."""
        return self._sequences.values()

    def num_silent(self, tenant: str | None = None) -> int:
        """Returns the number of sequences of `tenant` (None: of all tenants) that have no output so far."""
        return sum(
            not sequence.generated_ids and tenant in (None, sequence.tenant) for sequence in self._sequences.values()
        )

    def num_held(self, tenant: str | None = None) -> int:
        """Returns the number of sequences of `tenant` (None: of all tenants) that no engine has."""
        return sum(
            sequence.place.engine is None and tenant in (None, sequence.tenant) for sequence in self._sequences.values()
        )

    async def run(self) -> None:
        """Keeps the connections to all engines open until `run` is cancelled."""
        async with asyncio.TaskGroup() as group:
            self.pool.run_in(group)
            while True:
                await asyncio.sleep(_TICK_S)
                self._tick()

    def set_engines(self, cores: Mapping[str, CoreAddress]) -> None:
        """Changes the set of engines.

        An engine that is missing in `cores` gets no new sequences, and its sequences move to other engines. Sequences
        that no other engine can compute stay until they end or the engine's connection ends.
        """
        for name, link in list(self.pool.links.items()):
            if name not in cores and not link.is_leaving:
                logger.info("engine %s is no longer in the list", name)
                link.is_leaving = True
            elif name in cores and link.core != cores[name]:
                self._remove(link)
        for name, core in cores.items():
            known = self.pool.links.get(name)
            if known is None:
                logger.info("engine %s at %s is new in the list", name, core.address)
                self.pool.add(name, core)
            elif known.is_leaving:
                logger.info("engine %s is in the list again", name)
                known.is_leaving = False
                self._note_usable(known, self._placement.waiting())
        self._let_leave()

    def submit(self, sequences: Sequence[ClientSequence], *, is_accepted: bool = False) -> None:
        """Submits sequences, now or as soon as an engine can take them. Each mailbox then gets outputs or a failure.

        Raises RequestError if a sequence cannot be encoded, and QueueFull if too many sequences or tokens wait. In both
        cases, none of the sequences is submitted. `is_accepted`: the answer of their request has begun, so neither this
        method nor a core may refuse the sequences for a full queue.
        """
        for sequence in sequences:
            # While no core serves, only the front checks the queue. A core that starts later must not refuse a sequence
            # that passed this check.
            sequence.is_accepted = is_accepted or not self.is_core_serving
        data: list[bytes] = []
        parts: list[tuple[EngineLink | None, list[ClientSequence]]] = []
        try:
            for choices in by_prompt(sequences):
                parts.append((self.pool.place_for(choices), choices))
                data.append(encoded(choices))
            new = [sequence for link, choices in parts if link is None for sequence in choices]
            if new and not is_accepted:
                held = [sequence for sequence in self._sequences.values() if sequence.place.engine is None]
                check_held(held, new, self.rules.max_held, self.rules.max_held_tokens)
        except BaseException:
            for link, choices in parts:
                if link is not None:
                    self.pool.take_back(link, choices)
            raise
        for sequence in sequences:
            self._sequences[sequence.sequence_id] = sequence
        for (link, choices), message in zip(parts, data, strict=True):
            if link is None:
                self._placement.hold(choices)
            else:
                self.pool.give(link, choices, message)

    def abort(self, sequence_id: str, *, is_complete: bool = False) -> None:
        """Removes a sequence and makes its engine abort it. Does nothing if the sequence is finished or unknown.

        `is_complete`: True if the answer ended at a stop string, False if nobody reads the answer any more.
        """
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is not None:
            self.pool.withdraw(sequence, is_complete=is_complete)

    def fail_all(self, error: Exception) -> None:
        """Ends every unfinished sequence with `error`."""
        sequences = list(self._sequences.values())
        self._sequences.clear()
        for sequence in sequences:
            sequence.mailbox.fail(error)
            self.pool.withdraw(sequence)

    def tell(self, message: Draining | EngineAdapters | NeedAdapters) -> None:
        """Sends a message to the cores, and to every later core. Only for the front inside an engine.

        The message replaces the last message of the same type.
        """
        self._told[type(message)] = message
        for link in self.pool.links.values():
            if link.is_connected:
                link.send(frame(message))

    # --- links ---

    def connected(self, link: EngineLink, welcome: Welcome) -> None:
        # Copy the list before the callback: sequences that the callback submits are already sent, and must not be sent
        # twice.
        waiting = self._placement.waiting()
        logger.info("connected to the core at %s, pid %d, epoch %d", link.name, welcome.pid, welcome.epoch)
        for message in [WantCache()] if self.rules.is_gateway else self._told.values():
            link.send(frame(message))
        self._on_change()
        self._note_usable(link, waiting)

    def disconnected(self, link: EngineLink, problem: str, *, is_loss: bool = True) -> None:
        orphans = self._placement.of(link)
        is_orderly = not is_loss or link.is_draining or link.is_leaving
        level = logging.INFO if is_orderly else logging.WARNING
        logger.log(level, "lost the core of %s (%s); it had %d sequences", link.name, problem, len(orphans))
        # The orderly end of an engine without sequences is no loss: the service may be scaled to zero engines.
        is_expected = self.rules.is_gateway and is_orderly and not orphans
        if self._was_serving and not self.is_core_serving and not is_expected:
            self.recoveries.begin("core_lost", "core", node_name(), at=time.time(), now_s=time.monotonic())
        now_s = time.monotonic()
        for sequence in orphans:
            sequence.place.leave()
            sequence.place.refused_by.clear()  # the queues of these engines may have room by now
            if not is_orderly:
                self._placement.count_loss(sequence, now_s)
        self._on_change()
        self._placement.place_again(orphans)

    def received(self, link: EngineLink, message: CoreMessage) -> None:
        match message:
            case Outputs():
                self._answers.outputs(link, message)
            case CoreStatus():
                self._receive_status(link, message)
            case Refused():
                self._answers.refused(link, message)
            case FilePart():
                self.on_file_part(message)
            case CacheChanges():
                if not link.estimate.changed(message):
                    link.send(frame(WantCache()))
            case LoadReport():
                link.estimate.reported(message.load)
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__}")

    def _receive_status(self, link: EngineLink, status: CoreStatus) -> None:
        waiting = self._placement.waiting()
        if status.state == "recovering" and self.recoveries.open is None and not self.is_core_serving:
            # The core itself is connected and keeps its sequences, so a rank was lost.
            lost = (status.message, status.lost, status.lost_node)
            self.recoveries.begin(*lost, at=time.time(), now_s=time.monotonic())
            self.recoveries.replayed(num_requests(self._sequences.values()))
        if link.is_serving:
            self._was_serving = True
            self.recoveries.replayed(num_requests(waiting))  # a gateway submits them below, now that an engine serves
            self._end_recovery(status.phases)
        self._on_status(link, status)
        if status.state == "failed" and not self.rules.is_gateway:
            self.fail_all(EngineDead(f"the engine failed: {status.message}"))
        self._note_usable(link, waiting)
        if self.rules.is_gateway and (link.is_draining or status.state == "failed"):
            self._placement.move_away(link)

    def _note_usable(self, link: EngineLink, waiting: list[ClientSequence]) -> None:
        """Gives `waiting` sequences to engines if `link` is usable."""
        if is_usable(link, self.rules):
            self._placement.place_again(waiting)

    def _let_leave(self) -> None:
        """Moves sequences away from engines that are no longer in the list. Removes such engines without sequences."""
        for link in [link for link in self.pool.links.values() if link.is_leaving]:
            for sequence in self._sequences.values():
                if link.name in (sequence.place.engine, sequence.place.last_engine):
                    # ends the time for which no other engine may get the sequence
                    sequence.place.last_loss_s = -math.inf
            self._placement.move_away(link)
            if not self._placement.of(link):
                self._remove(link)

    def _remove(self, link: EngineLink) -> None:
        self.pool.remove(link)
        if link.is_connected:
            link.is_connected = link.is_serving = False
            self.disconnected(link, "it is no longer in the list", is_loss=False)

    def _tick(self) -> None:
        now_s = time.monotonic()
        for link in self.pool.links.values():
            link.check_silence()
        if not self.rules.is_gateway:
            return
        for link in self.pool.links.values():
            if link.is_connected and not link.is_serving and now_s - link.served_at_s > REBUILD_PATIENCE_S:
                self._placement.move_away(link, is_loss=True)
        self._let_leave()
        # Tries again to place waiting sequences. Perhaps an engine can compute them now, or PINNED_S is over: the time
        # in which only their last engine may get them.
        self._placement.place_again(self._placement.waiting())
        for sequence in self._placement.waiting():
            since_s = sequence.place.waits_since_s
            if why := self.pool.why_none(sequence):
                self._placement.fail(sequence, why)
            elif since_s is not None and now_s - since_s > self.rules.hold_s:
                self._placement.fail(
                    sequence, EngineDead(f"no engine could take the request within {self.rules.hold_s:g} s; try again")
                )

    def _end_recovery(self, phases: tuple[PhaseProgress, ...]) -> None:
        recovery = self.recoveries.end(time.monotonic(), phases)
        if recovery is None:
            return
        logger.info("%s", recovery.sentence())
        self._on_recovery(recovery)

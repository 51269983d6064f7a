"""RankPool: the workers ("ranks") that are connected to the EngineCore's rank port.

A rank opens two connections: "control" for its heartbeats (beats), and "steps" for orders and replies. The rank is
attached once both connections exist. One thread accepts connections, one thread for each control connection reads
beats, and the EngineCore's main thread does the rest.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable

from rayloom_engine.core.adapter import AdapterReport, NeededAdapter
from rayloom_engine.core_server.ranks.adapter_reports import joined
from rayloom_engine.core_server.ranks.attached import AttachedRank, Control
from rayloom_engine.core_server.ranks.memory_kills import MemoryKills
from rayloom_engine.core_server.ranks.standstill import Standstill
from rayloom_engine.core_server.ranks.strangers import Strangers
from rayloom_engine.errors import RankLost
from rayloom_engine.protocol.channel import Channel, ChannelClosed, encode, welcome
from rayloom_engine.protocol.messages import RankReport
from rayloom_engine.protocol.ranks import (
    AbortOrders,
    Allocate,
    Beat,
    Computed,
    Done,
    Failed,
    Fence,
    Greeting,
    Join,
    LaunchProgress,
    Loaded,
    OpenStore,
    Run,
    StoreOpen,
    Welcomed,
)

logger = logging.getLogger(__name__)

Order = OpenStore | Join | Allocate | Run
Reply = Loaded | StoreOpen | Done | Computed | Failed
_REPLIES = (Loaded, StoreOpen, Done, Computed, Failed)
# A rank that loads counts as lost only after this many seconds of silence: an import may block its heartbeat thread.
_LOADING_SECONDS = 60.0


class RankPool:
    """The ranks of one EngineCore. Methods are for the main thread, unless their docstring says "For any thread"."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        world_size: int,
        hang_seconds: float,
        sizes: Welcomed | None = None,
    ) -> None:
        """`sizes`: None as long as no core has chosen sizes."""
        self.world_size = world_size
        self.attached: dict[int, AttachedRank] = {}
        self.launch_phase: LaunchProgress | None = None  # last report of the launcher; any thread may read it
        self.sizes = sizes or Welcomed()  # sent to every rank that attaches
        self.suspects: set[int] = set()  # live ranks that have reported a failure since the last step with a result
        self.memory_kills = MemoryKills()
        # adapters whose files every rank must have; any thread may read or replace the tuple
        self.needed_adapters: tuple[NeededAdapter, ...] = ()
        self._listener = listener
        self._token = token
        self._hang_seconds = hang_seconds
        self._lock = threading.Lock()
        self._controls: dict[tuple[int, int], Control] = {}  # (rank, incarnation) -> newest control connection
        self._arrived: deque[AttachedRank] = deque()
        self._unread: deque[tuple[AttachedRank, Reply]] = deque()  # replies that `poll` has not returned yet
        self._last_ticket = 0
        self._launcher: Channel | None = None
        self._fences: dict[int, Fence] = {}  # rank -> the last fence of the rank, kept until a newer start attaches
        self.checked_at = time.monotonic()  # time of the last check of all heartbeats; any thread may read it
        # Ranks that send beats count as hung after this many seconds without progress in the present step.
        self.patience_s = hang_seconds
        self._standstill = Standstill()
        self._strangers = Strangers()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        threading.Thread(target=self._accept, name="rank-accept", daemon=True).start()

    def statuses(self) -> tuple[RankReport, ...]:
        """The reports of all attached ranks, sorted by rank. For any thread."""
        now = time.monotonic()
        return tuple(rank.status(now) for _, rank in sorted(self.attached.copy().items()))

    def quiet_s(self) -> float | None:
        """Seconds since a computing rank last made progress or used CPU time. None while no rank computes.

        For any thread.
        """
        quiet_s = self._standstill.quiet_s
        return None if quiet_s is None else quiet_s + time.monotonic() - self.checked_at

    def beats(self) -> list[Beat]:
        """The newest beat of every attached rank. For any thread."""
        return [rank.control.beat for rank in self.attached.copy().values()]

    def adapter_reports(self) -> tuple[AdapterReport, ...]:
        """A report for each needed adapter whose files all ranks have, or that a rank cannot get. For any thread."""
        numbers = [needed.number for needed in self.needed_adapters]
        reports = {
            f"rank {number} on {rank.greeting.node}": rank.control.beat.adapters
            for number, rank in sorted(self.attached.copy().items())
        }
        return joined(numbers, reports, self.world_size)

    def ticket(self) -> int:
        """Returns a new ticket: a number that no earlier order has."""
        self._last_ticket += 1
        return self._last_ticket

    def order(self, order: Order, ranks: Iterable[AttachedRank] | None = None) -> None:
        """Sends an order to `ranks` (None: to all). Raises RankLost if a rank is gone or its socket stays full.

        All other ranks get the order before RankLost is raised: a rank without the order would keep its peers waiting.
        """
        data = encode(order)
        loss = None
        for rank in list(self.attached.values()) if ranks is None else ranks:
            try:
                rank.steps.send_encoded(data)
            except ChannelClosed as error:
                loss = loss or RankLost(rank.rank, f"its connection ended ({error})")
        if loss is not None:
            raise loss

    def abort_orders(self, ticket: int | None = None) -> None:
        """Orders all ranks to abort the orders up to this ticket, so that no rank waits for a lost rank. Never blocks.

        `ticket`: None for all orders so far. A lost rank that reads nothing does not block the send, because the buffer
        of its connection has room for many such messages.
        """
        data = encode(AbortOrders(self._last_ticket if ticket is None else ticket))
        for rank in self.attached.values():
            with contextlib.suppress(ChannelClosed):  # this rank is lost as well
                rank.control.send_encoded(data)

    def take_arrivals(self) -> list[int]:
        """Attaches the ranks that have connected since the last call. Returns their numbers.

        A newer start of a rank replaces an older one.
        """
        ranks = []
        while self._arrived:
            new = self._arrived.popleft()
            old = self.attached.get(new.rank)
            fence = self._fences.get(new.rank)
            least = max(old.greeting.incarnation if old else 0, (fence.incarnation or 0) + 1 if fence else 0)
            if new.greeting.incarnation < least:
                new.close()  # this start of the rank was fenced, or is older than the attached one
                continue
            if old is not None:
                old.close()
            self._fences.pop(new.rank, None)
            greeting = new.greeting
            self.memory_kills.note(greeting.host, greeting.num_oom_kills, time.monotonic())
            logger.info(
                "rank %d attached from %s (pid %d) over %s",
                new.rank,
                greeting.node,
                greeting.pid,
                new.steps.transport,
            )
            self.attached = {**self.attached, new.rank: new}
            ranks.append(new.rank)
        return ranks

    def drop(self, rank: int) -> None:
        """Detaches a lost rank and fences it: the launcher kills the rank's process, if any, and restarts the rank."""
        lost = self.attached.get(rank)
        if lost is None:
            return
        self.attached = {number: kept for number, kept in self.attached.items() if number != rank}
        lost.close()
        self.fence(rank, lost.greeting.incarnation)

    def drop_ended(self) -> list[int]:
        """Drops every rank whose connection has ended. Returns their numbers."""
        ended = [number for number, rank in self.attached.items() if rank.control.is_closed or rank.steps.has_ended]
        for number in ended:
            self.drop(number)
        return ended

    def fence(self, rank: int, incarnation: int | None) -> None:
        """Orders the launcher to kill the rank and to start it again.

        `incarnation`: number of the start whose process is killed (RankPlace); None: the process that runs now.
        """
        fence = Fence(rank, incarnation)
        if incarnation is not None:
            self._fences[rank] = fence
        if self._launcher is not None:
            with contextlib.suppress(ChannelClosed):  # the fence is sent again when a launcher connects
                self._launcher.send(fence)

    def poll(self, timeout_s: float, is_due: bool = False) -> list[tuple[int, Reply]]:
        """Waits for replies of attached ranks and returns them as (rank, reply).

        Returns an empty list if no reply arrives within `timeout_s`, or as soon as a new rank connects. Raises RankLost
        for a rank whose connection ended, or that has sent no beat for hang_seconds (at least _LOADING_SECONDS while
        the rank loads).

        `is_due`: an answer to a plan is expected. In this case, RankLost is also raised for the rank that hangs, once
        no rank has made progress for `patience_s`.
        """
        poller = select.poll()
        by_fd = {fd: number for number, rank in self.attached.items() for fd in rank.steps.filenos()}
        for fd in (*by_fd, self._wake_read.fileno()):
            poller.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poller.poll(0 if self._unread else 1000 * timeout_s)]
        if self._wake_read.fileno() in ready:
            self._drain_wake()
        for number in dict.fromkeys(by_fd[fd] for fd in ready if fd in by_fd):  # a rank may have two ready descriptors
            rank = self.attached[number]
            try:
                message = rank.steps.receive(self._hang_seconds)
            except (ChannelClosed, TimeoutError) as error:
                raise RankLost(number, f"its connection ended ({error})") from error
            if not isinstance(message, _REPLIES):
                raise RankLost(number, f"it sent a {type(message).__name__}")
            self._unread.append((rank, message))
        self._check_alive(is_due)
        replies = [(rank.rank, reply) for rank, reply in self._unread if self.attached.get(rank.rank) is rank]
        self._unread.clear()
        return replies

    def _check_alive(self, is_due: bool) -> None:
        now = time.monotonic()
        # If this process itself was stopped for a while, it has read no beats. No rank is to blame then.
        was_away = now - self.checked_at > self._hang_seconds / 2
        self.checked_at = now
        for number, rank in self.attached.items():
            if rank.control.is_closed and not self._has_last_words(rank):
                raise RankLost(number, "its control connection ended")
            patience = self._hang_seconds if rank.loaded else max(self._hang_seconds, _LOADING_SECONDS)
            if now - rank.control.beat_at > patience and not was_away:
                raise RankLost(number, f"no sign of life for {now - rank.control.beat_at:.0f} s", is_silent=True)
        if was_away or not is_due:
            self._standstill.reset()
            return
        beats = {number: rank.control.beat for number, rank in self.attached.items()}
        standing = self._standstill.observe(now, beats, self.patience_s)
        if standing is not None:
            raise RankLost(standing, f"alive, but it stands still; no rank has advanced for {self.patience_s:g} s")

    def _has_last_words(self, rank: AttachedRank) -> bool:
        """Returns True if `rank`, whose control connection has ended, has sent a reply that is still unread.

        A rank that ends on purpose first sends the cause over its "steps" connection.
        """
        if any(sender is rank for sender, _ in self._unread):
            return True
        poller = select.poll()
        for fd in rank.steps.filenos():
            poller.register(fd, select.POLLIN)
        if not poller.poll(0):
            return False
        try:
            message = rank.steps.receive(self._hang_seconds)
        except (ChannelClosed, TimeoutError):
            return False
        if not isinstance(message, _REPLIES):
            return False
        self._unread.append((rank, message))
        return True

    # --- in other threads ---

    def _accept(self) -> None:
        while True:
            connection: socket.socket | None = None
            try:
                connection, peer = self._listener.accept()
                self._strangers.admit(connection, peer[0])
                threading.Thread(target=self._greet, args=(connection, peer), name="rank-control", daemon=True).start()
            except (OSError, RuntimeError) as error:
                # The process has no free file descriptor or thread. The loop must continue: one may become free later,
                # and without the loop no rank can attach.
                logger.warning("cannot take a connection at the rank port: %s", error)
                if connection is not None:
                    self._strangers.release(connection)
                    connection.close()
                time.sleep(0.1)

    def _greet(self, connection: socket.socket, peer: object) -> None:
        try:
            channel, greeting = welcome(connection, self._token)
        except OSError as error:
            logger.warning("refused a connection from %s at the rank port: %s", peer, error)
            connection.close()
            return
        finally:
            self._strangers.release(connection)
        try:
            if greeting.role == "launch":
                channel.send(Welcomed())
                self._launcher = channel
                for fence in list(self._fences.values()):
                    channel.send(fence)
                self._read_launcher(channel)
            elif not 0 <= greeting.rank < self.world_size:
                logger.warning("refused rank %d: there are %d", greeting.rank, self.world_size)
                channel.close()
            elif greeting.role == "control":
                control = Control(channel)
                with self._lock:
                    self._controls[greeting.rank, greeting.incarnation] = control
                control.welcome(self.needed_adapters)
                channel.limit_sends(self._hang_seconds)
                self._read_beats(control, greeting)
            else:
                self._attach(channel, greeting)
        except OSError:
            channel.close()  # the peer is gone; a rank's loss is noticed at its other connection

    def _attach(self, channel: Channel, greeting: Greeting) -> None:
        with self._lock:
            control = self._controls.pop((greeting.rank, greeting.incarnation), None)
        if control is None:
            raise ChannelClosed("a rank opens its control connection first")
        channel.offer_memory()
        channel.send(self.sizes)
        channel.limit_sends(self._hang_seconds)
        self._arrived.append(AttachedRank(greeting, channel, control))
        self._wake()

    def _read_beats(self, control: Control, greeting: Greeting) -> None:
        try:
            while True:
                beat = control.channel.expect(Beat)
                control.beat = beat
                control.beat_at = time.monotonic()
                control.need(self.needed_adapters)  # a rank that sends beats reads its messages, too
        except ChannelClosed:
            control.is_closed = True
            with self._lock:
                key = greeting.rank, greeting.incarnation
                if self._controls.get(key) is control:
                    del self._controls[key]  # the rank never opened its "steps" connection
                    control.channel.close()
            self._wake()

    def _read_launcher(self, channel: Channel) -> None:
        try:
            while True:
                self.launch_phase = channel.expect(LaunchProgress)
                self._wake()
        finally:
            self.launch_phase = None

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the socket is already full of wake-ups
            self._wake_write.send(b"x")

    def _drain_wake(self) -> None:
        try:
            while self._wake_read.recv(4096):
                pass
        except BlockingIOError:
            return

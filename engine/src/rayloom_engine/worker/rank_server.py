"""RankServer: a rank that connects to the core, loads its part of the model and runs plans. It decides nothing.

The main thread computes. A second thread sends heartbeats (beats). A third thread receives AbortOrders and
NeededAdapters. When AbortOrders arrive, this thread ends the main thread's waits for other ranks. A fourth thread
fetches the files of needed adapters. When the core is gone, the rank keeps its weights and tries to connect again for
ORPHAN_SECONDS.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from rayloom_engine.common.process import node_name, thread_cpu_clock
from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError, CorruptRank, ModelError
from rayloom_engine.parallel.group_abort import GroupAbort
from rayloom_engine.protocol.channel import Channel, ChannelClosed, dial
from rayloom_engine.protocol.ranks import (
    AbortOrders,
    Allocate,
    Beat,
    Computed,
    Done,
    Failed,
    Greeting,
    Join,
    Loaded,
    NeededAdapters,
    OpenStore,
    Run,
    StoreOpen,
    Welcomed,
)
from rayloom_engine.worker.activity import Activity
from rayloom_engine.worker.adapter_files import AdapterFiles
from rayloom_engine.worker.machine import num_oom_kills

if TYPE_CHECKING:
    from rayloom_engine.parallel.tensor_group import TensorGroup
    from rayloom_engine.worker.loaded_rank import LoadedRank
    from rayloom_engine.worker.runner import Runner

logger = logging.getLogger(__name__)

DIAL_SECONDS = 0.2  # seconds between two attempts to reach a core
ORPHAN_SECONDS = 30.0
_OWN_SECONDS = 5.0  # a core that keeps the connection for longer than this has accepted this rank
# in a job: grace period for the main thread to exit by itself after the core is gone
_LAST_SECONDS = 5.0
_LAST_LOADING_SECONDS = 60.0  # the same for a rank that still loads: it does not know yet whether it can use the model
_ALL_TICKETS = 2**63  # higher than the ticket of every order
# Longest wait of a loaded rank for the files of adapters. After that, requests with a missing adapter get an error.
_ADAPTERS_SECONDS = 30.0
_ADAPTERS_POLL_SECONDS = 0.2  # during this wait: seconds between two checks whether the core is gone
_GROUP_SECONDS = 10.0  # longest wait for the other ranks at a rendezvous; short, because all of them have loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Identifies a start of a rank, and the core to which the rank connects."""

    rank: int
    incarnation: int  # number of this start: a later start of the rank has a higher number
    ranks_on_host: int  # number of ranks that share this machine's cores and memory, this one included
    address: str  # HOST:PORT of the core
    token: str = field(repr=False)


class RankServer:
    """A rank, which serves one core after another."""

    def __init__(
        self,
        config: EngineConfig,
        place: RankPlace,
        exit_code: Callable[[], int] | None = None,
        adapter_files: AdapterFiles | None = None,
    ) -> None:
        """`exit_code`: returns the exit code of a rank of a job; None for other ranks.

        A rank of a job exits with this code once its core is gone, even if its main thread hangs. `adapter_files`: None
        for a new AdapterFiles, which fetches from the hub.
        """
        self.is_refused = False  # True if this rank's last reply was that it cannot use the settings or the model
        self._exit_code = exit_code
        self._config = config
        self._given_config = config  # without the sizes that the core has chosen in its first assembly
        self._place = place
        self._rank: LoadedRank | None = None
        self._runner: Runner[Any] | None = None
        self._group: TensorGroup[Any] | None = None  # this rank and the other ranks of its stage
        # Each connection has a GroupAbort of its own, so that no thread of an earlier connection ends waits in the
        # present group.
        self._group_abort = GroupAbort()
        self._adapter_files = adapter_files or AdapterFiles()
        self._store: object = None  # rank 0: the rendezvous store, which must stay alive
        self._commit: str | None = None  # commit of the hub model: as the core sent it, then of the loaded weights
        self._failure: Failed | None = None  # the reason why loading failed
        self._beat = Beat(phase="start", step=0, memory_bytes=0)
        self._num_steps = 0
        self._last_problem = ""  # why the last attempt to connect failed; logged once
        self._had_order = False  # True if an order has arrived over the present connection

    def run(self) -> None:
        """Serves one core after the other. Returns when the rank has belonged to no core for ORPHAN_SECONDS."""
        core_seen_at = time.monotonic()  # last time at which this rank belonged to a core
        while time.monotonic() - core_seen_at < ORPHAN_SECONDS:
            dialled_at = time.monotonic()
            # A core that has a newer process of this rank closes the connection at once. So this process belongs to the
            # core only if the core sent an order over the connection, or kept the connection for a while.
            if self.serve_core() and (self._had_order or time.monotonic() - dialled_at > _OWN_SECONDS):
                core_seen_at = time.monotonic()
            time.sleep(DIAL_SECONDS)
        self.remove_host_memory()
        logger.warning("no core at %s for %.0f s; rank %d ends", self._place.address, ORPHAN_SECONDS, self._place.rank)

    def remove_host_memory(self) -> None:
        """Removes the file with copies of KV blocks. Call it when no core will use this rank's copies."""
        if self._rank is not None and self._rank.host is not None:
            self._rank.host.file.remove()

    def serve_core(self) -> bool:
        """Serves the core at the address until it is gone. Returns False if no core answers there."""
        try:
            control, greeted = self._dial("control")
            steps, welcomed = self._dial("steps")
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
            if problem != self._last_problem:
                logger.info("cannot reach the core at %s: %s", self._place.address, problem)
                self._last_problem = problem
            return False
        self._had_order = False
        self._last_problem = ""
        self._adapter_files.need(greeted.adapters)
        if self._rank is None:
            self._commit = welcomed.commit
        if self._rank is None and welcomed.num_kv_blocks is not None:
            sizes = {"num_kv_blocks": welcomed.num_kv_blocks, "max_model_len": welcomed.max_model_len}
            self._config = self._config.model_copy(update=sizes)
        try:
            group_abort = self._group_abort = GroupAbort()
            cpu_clock = thread_cpu_clock()
            for name, run in (
                ("beats", lambda: self._send_beats(control, cpu_clock)),
                ("control", lambda: self._receive_control(control, group_abort)),
            ):
                threading.Thread(target=run, name=name, daemon=True).start()
            self._serve(steps)
        except ChannelClosed as error:
            logger.info("the core is gone (%s)", error)
        finally:
            control.close()
            steps.close()
            if self._rank is not None:
                # Peers may wait for this rank's part of a step although the order never arrived here. The peers' waits
                # end when this rank leaves the group.
                self._leave()
        return True

    def _dial(self, role: str) -> tuple[Channel, Welcomed]:
        greeting = Greeting(
            role="control" if role == "control" else "steps",
            proof="",
            rank=self._place.rank,
            incarnation=self._place.incarnation,
            pid=os.getpid(),
            node=node_name(),
            host=platform.node(),
            num_oom_kills=num_oom_kills(),
        )
        return dial(self._place.address, self._place.token, greeting)

    def _send_beats(self, control: Channel, cpu_clock: Callable[[], float]) -> None:
        """Sends a beat every `heartbeat_seconds` until the core is gone. `cpu_clock`: CPU time of the main thread."""
        process = psutil.Process()
        with contextlib.suppress(ChannelClosed):
            while True:
                activity = self._rank.activity if self._rank is not None else Activity()
                beat = msgspec.structs.replace(
                    self._beat,
                    step=self._num_steps,
                    memory_bytes=process.memory_info().rss,
                    advance=activity.advance,
                    waits=activity.waits,
                    communication_s=activity.communication_s,
                    cpu_s=cpu_clock(),
                    adapters=self._adapter_files.reports,
                )
                control.send(beat)
                time.sleep(self._config.heartbeat_seconds)
        if self._exit_code is not None:
            is_loading = self._rank is None and self._failure is None
            # the main thread exits by itself, unless it waits for a peer that hangs
            time.sleep(_LAST_LOADING_SECONDS if is_loading else _LAST_SECONDS)
            self.remove_host_memory()
            os._exit(self._exit_code())

    def _receive_control(self, control: Channel, group_abort: GroupAbort) -> None:
        """Ends the main thread's waits for other ranks when the core orders it, and when the core is gone.

        Also sets the needed adapters.
        """
        with contextlib.suppress(ChannelClosed):
            while True:
                order = control.receive()
                if isinstance(order, NeededAdapters):
                    self._adapter_files.need(order.adapters)
                    continue
                if not isinstance(order, AbortOrders):
                    break
                if group_abort.abort(order.ticket):
                    logger.info("rank %d: the core has aborted the waits for other ranks", self._place.rank)
        control.close()  # a message of another type also ends the loop; the core then sees a closed connection
        # Without a core, a peer that hangs is not replaced. A rank that waits for this peer would not connect to a new
        # core.
        group_abort.abort(_ALL_TICKETS)

    def _progress(self, phase: str, done: int, total: int, unit: str) -> None:
        self._beat = Beat(phase=phase, step=self._num_steps, memory_bytes=0, done=done, total=total, unit=unit)

    def _serve(self, steps: Channel) -> None:
        """Loads the weights if they are not loaded yet, then executes the core's orders. Raises ChannelClosed."""
        loaded = self._load()
        if isinstance(loaded, Loaded):
            self._wait_for_adapters(steps)
        self.is_refused = isinstance(loaded, Failed)
        steps.send(loaded)
        self._progress("idle", 0, 0, "")
        while True:
            order = steps.receive()
            self._had_order = True
            reply: StoreOpen | Done | Computed | Failed | None
            try:
                reply = self._obey(order, steps.local_host)
            except ConfigError as error:
                reply = Failed(_ticket(order), "config", str(error))
            except CorruptRank as error:
                # Weights or memory stay damaged as long as this process lives, so it exits. The next start loads the
                # weights again.
                logger.error("rank %d: %s; the rank ends", self._place.rank, error)
                steps.send(Failed(_ticket(order), "rank", str(error)))
                self.remove_host_memory()  # the damaged rank may have written wrong copies
                os._exit(1)
            except Exception as error:
                # The cause may be a lost peer, so this process stays. The core decides which ranks to replace.
                cause = f"{type(error).__name__}: {error}".splitlines()[0]
                is_expected = isinstance(error, RuntimeError)  # torch raises it for a broken group
                logger.warning("%s failed: %s", type(order).__name__, cause, exc_info=not is_expected)
                reply = Failed(_ticket(order), "rank", cause)
            self.is_refused = isinstance(reply, Failed) and reply.kind != "rank"
            if reply is not None:
                steps.send(reply)
            if isinstance(reply, Failed) and self._rank is not None:
                # Peers may wait for this rank's part of a sum, even if the connection of another rank broke. When this
                # rank leaves the group, the waits of these peers end, and the peers report failures, too. The core must
                # get the original failure first, so leave only after the reply.
                self._leave()

    def _wait_for_adapters(self, steps: Channel) -> None:
        """Waits for the files of needed adapters, because a step reads them and must not wait for a download.

        Also returns when the core is gone. The next core replaces a rank that does not connect in time.
        """
        until = time.monotonic() + _ADAPTERS_SECONDS
        while not self._adapter_files.wait(_ADAPTERS_POLL_SECONDS):
            if steps.has_ended:
                return
            if time.monotonic() > until:
                logger.warning("the files of adapters are still missing after %g s", _ADAPTERS_SECONDS)
                return

    def _load(self) -> Loaded | Failed:
        if self._rank is None and self._failure is None:
            from rayloom_engine.worker.host_memory import HostMemoryPlace
            from rayloom_engine.worker.start import find_model, load_rank, part_of

            # A config that differs from the given one has sizes that the core chose before: this rank replaces another.
            is_first = self._config is self._given_config
            try:
                resolved, shape = find_model(self._given_config, self._progress, commit=self._commit)
                self._commit = resolved.commit
                self._rank = load_rank(
                    self._config,
                    resolved,
                    shape,
                    self._progress,
                    part=part_of(self._config, shape, self._place.rank),
                    ranks_on_host=self._place.ranks_on_host,
                    host=HostMemoryPlace(token=self._place.token, rank=self._place.rank, is_required=is_first),
                )
            except ModelError as error:
                self._failure = Failed(0, "model", str(error))
            except ConfigError as error:
                self._failure = Failed(0, "config", str(error))
        if self._rank is None:
            assert self._failure is not None
            return self._failure
        rank = self._rank
        return Loaded(
            num_blocks=rank.kv.num_blocks,
            max_model_len=rank.kv.max_model_len,
            num_step_tokens=rank.num_step_tokens,
            num_kept_blocks=rank.kv.num_kept_blocks,
            dtype=rank.dtype,
            compute_dtype=rank.compute_dtype,
            hidden_dtype=rank.hidden_dtype,
            arithmetic=rank.arithmetic,
            quantization=rank.quantization,
            weight_bytes=rank.weight_bytes,
            bytes_read=rank.num_bytes_read,
            kv_explanation=rank.kv.explanation,
            host_memory="" if rank.host is None else rank.host.file.id,
            num_host_slots=0 if rank.host is None else rank.host.num_slots,
            commit=self._commit,
        )

    def _leave(self) -> None:
        """Leaves the process group. First drops all objects that keep the group's connections open."""
        self._group_abort.forget()
        self._runner = None
        self._group = None
        if self._config.world_size == 1:
            return  # the rank has joined no group, and the module process_group imports torch
        from rayloom_engine.parallel.process_group import leave_group

        leave_group()

    def _obey(self, order: object, local_host: str) -> StoreOpen | Done | Computed | None:
        """Executes an order. Returns the reply, or None for a step that another rank answers."""
        assert self._rank is not None, "an order to a rank that could not load"
        match order:
            case Run(ticket, plan):
                if self._runner is None:
                    return None  # an earlier step failed here; the core sent this order before it knew of the failure
                self._progress("step", 0, 0, "")
                result = self._runner.run(plan)
                self._num_steps += 1
                self._progress("idle", 0, 0, "")
                return Computed(ticket, result) if self._runner.answers else None
            case OpenStore(ticket):
                from rayloom_engine.parallel.process_group import open_store

                self._store, port = open_store(local_host)
                return StoreOpen(ticket, local_host, port)
            case Join(ticket, host, port):
                self._join(self._rank, host, port, ticket)
                return Done(ticket)
            case Allocate(ticket, epoch, num_blocks):
                self._allocate(self._rank, epoch, num_blocks)
                return Done(ticket)
            case _:
                raise ValueError(f"a rank has no order of the type {type(order).__name__}")

    def _join(self, loaded: LoadedRank, host: str, port: int, ticket: int) -> None:
        """Joins a process group with the other ranks. The ranks find each other through the store at host:port."""
        from rayloom_engine.parallel.process_group import Rendezvous, join_group

        self._leave()
        rendezvous = Rendezvous(
            host=host,
            port=port,
            rank=self._place.rank,
            world_size=self._config.world_size,
            ranks_per_stage=self._config.tensor_parallel_size,
            backend=loaded.backend,
        )
        self._group_abort.begin(ticket)
        stage_group = join_group(rendezvous, _GROUP_SECONDS, self._group_abort)
        self._group = loaded.tensor_group(stage_group, self._group_abort)

    def _allocate(self, loaded: LoadedRank, epoch: int, num_blocks: int) -> None:
        """Makes the runner of an epoch and warms it up."""
        from rayloom_engine.worker.start import warm_up

        self._progress("kv_cache", 0, 0, "")
        self._runner = loaded.runner(num_blocks, epoch, loaded.link(), self._group)
        self._progress("warm_up", 0, 0, "")
        warm_up(self._runner, epoch)
        self._progress("idle", 0, 0, "")


def _ticket(order: object) -> int:
    """Returns the ticket of an order, by which the core recognises the reply; 0 for an order without a ticket."""
    return int(getattr(order, "ticket", 0))

"""Ranks without a model: they connect to a pool like real ranks, and a function of the test answers their orders."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable

from rayloom_engine.common.restarts import RestartBudget
from rayloom_engine.core.step import StepPlan, StepResult
from rayloom_engine.core_server.ranks.assembly import assemble
from rayloom_engine.core_server.ranks.pool import RankPool
from rayloom_engine.core_server.ranks.remote_executor import RemoteExecutor
from rayloom_engine.models.checkpoint.progress import Progress, no_progress
from rayloom_engine.protocol.channel import Channel, ChannelClosed, dial
from rayloom_engine.protocol.ranks import (
    Allocate,
    Beat,
    Computed,
    Done,
    Failed,
    Fence,
    Greeting,
    Join,
    Loaded,
    OpenStore,
    Run,
    StoreOpen,
)

TOKEN = "secret"


def make_loaded(
    num_blocks: int = 100, hidden_dtype: str = "float32", arithmetic: str = "torch", commit: str | None = None
) -> Loaded:
    return Loaded(
        num_blocks=num_blocks,
        max_model_len=64,
        num_step_tokens=32,
        dtype="float32",
        compute_dtype="float32",
        hidden_dtype=hidden_dtype,
        arithmetic=arithmetic,
        quantization="none",
        weight_bytes=10,
        bytes_read=10,
        kv_explanation=f"{num_blocks} blocks",
        commit=commit,
    )


class FakeRank:
    """A rank that sends beats until it is closed or silenced. `orders`: all orders that it has received."""

    def __init__(
        self,
        port: int,
        rank: int,
        *,
        incarnation: int = 1,
        first: Loaded | Failed | None = None,
        answer: Callable[[object], object | None] | None = None,
        is_last: bool = False,
        num_oom_kills: int = 0,
        is_loaded: threading.Event | None = None,
    ) -> None:
        """`answer` returns the answer to an order; None: the usual answer. If it raises ChannelClosed, the rank dies.

        The rank has loaded its weights (20 bytes, from files of 10) when `is_loaded` is set. Without `is_loaded`, it
        has loaded them at once.
        """
        self.orders: list[object] = []
        self.beat = Beat(phase="idle", step=0, memory_bytes=1)
        self._is_loaded = is_loaded
        if is_loaded is not None:
            self.beat = Beat(phase="load", step=0, memory_bytes=1, done=5, total=20, unit="bytes")
        self._answer = answer
        self._is_last = is_last
        self._is_silent = threading.Event()
        address = f"127.0.0.1:{port}"

        def greeting(role: str) -> Greeting:
            return Greeting(
                role=role,
                proof="",
                rank=rank,
                incarnation=incarnation,
                pid=rank + 1000,
                node="n",
                host="h",
                num_oom_kills=num_oom_kills,
            )

        self.control: Channel = dial(address, TOKEN, greeting("control"))[0]
        self.control.send(self.beat)
        self.steps, self.welcomed = dial(address, TOKEN, greeting("steps"))
        threading.Thread(target=self._beat, daemon=True).start()
        self._server = threading.Thread(target=self._serve, args=(first or make_loaded(),), daemon=True)
        self._server.start()

    def silence(self) -> None:
        """Behaves as if stopped by SIGSTOP: the connections stay open, but nothing is sent."""
        self._is_silent.set()

    def die(self) -> None:
        self._is_silent.set()
        self.control.close()
        self.steps.close()

    def wait_until_dead(self) -> None:
        """Waits until the rank's thread has ended after `die`. Until then, the thread's read keeps the socket open."""
        self._server.join(30.0)
        assert not self._server.is_alive()

    def _beat(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while not self._is_silent.wait(0.1):
                self.control.send(self.beat)

    def _serve(self, first: Loaded | Failed) -> None:
        if self._is_loaded is not None:
            self._is_loaded.wait(30.0)
        try:
            self.steps.send(first)
            while True:
                order = self.steps.receive()
                self.orders.append(order)
                reply = self._answer(order) if self._answer is not None else None
                reply = reply or self._usual(order)
                if reply is not None:
                    self.steps.send(reply)
        except ChannelClosed:
            self.die()

    def _usual(self, order: object) -> object | None:
        match order:
            case OpenStore(ticket):
                return StoreOpen(ticket, "127.0.0.1", 1234)
            case Join(ticket):
                return Done(ticket)
            case Allocate(ticket):
                return Done(ticket)
            case Run(ticket, plan) if self._is_last:
                return Computed(ticket, result_of(plan))
        return None


class FakeLauncher:
    """A launcher that receives fences. `on_fence` may start the rank again."""

    def __init__(self, port: int, on_fence: Callable[[Fence], None] = lambda _: None, token: str = TOKEN) -> None:
        self.fences: list[Fence] = []
        self.channel, _ = dial(f"127.0.0.1:{port}", token, Greeting(role="launch", proof=""))
        self._on_fence = on_fence
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                fence = self.channel.expect(Fence)
                self.fences.append(fence)
                self._on_fence(fence)


def result_of(plan: StepPlan) -> StepResult:
    return StepResult(step_id=plan.step_id, epoch=plan.epoch)


def make_listener() -> tuple[socket.socket, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


class Ranks:
    """A pool of two ranks, and the ranks and launchers that tests start for it."""

    def __init__(self, hang_seconds: float = 5.0, token: str = TOKEN) -> None:
        listener, self.port = make_listener()
        self.token = token
        self.pool = RankPool(listener, token, 2, hang_seconds)
        self.epochs = itertools.count(1)
        self._started: list[FakeRank] = []

    def start(self, rank: int, **other: object) -> FakeRank:
        started = FakeRank(self.port, rank, is_last=rank == 1, **other)  # type: ignore[arg-type]
        self._started.append(started)
        return started

    def assemble(
        self,
        num_blocks: int | None = None,
        seconds: float = 20.0,
        budget: int = 5,
        is_rebuild: bool = False,
        progress: Progress = no_progress,
    ) -> tuple[int, list[Loaded]]:
        return assemble(
            self.pool,
            self.epochs.__next__,
            num_blocks,
            time.monotonic() + seconds,
            RestartBudget(budget),
            progress,
            is_rebuild=is_rebuild,
        )

    def close(self) -> None:
        """Closes the connections of all ranks at both ends. Otherwise hundreds of tests use up the descriptors."""
        for rank in self._started:
            rank.die()
        self.pool.take_arrivals()
        for attached in self.pool.attached.values():
            attached.close()


def run_plan(executor: RemoteExecutor, plan: StepPlan) -> StepResult:
    executor.submit(plan)
    return executor.collect()

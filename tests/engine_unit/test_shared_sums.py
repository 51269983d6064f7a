"""Sums and logits of ranks that share memory, in three processes on any number of cores, and the loss of a rank.

With HostGroup, as for ranks that share a GPU, the ranks exchange copies of their parts.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from rayloom_engine.parallel import shared_sums
from rayloom_engine.parallel.group_abort import GroupAbort
from rayloom_engine.parallel.host_exchange import HostGroup
from rayloom_engine.parallel.process_group import Rendezvous, join_group, leave_group, open_store
from rayloom_engine.parallel.shared_sums import SharedTensorGroup
from rayloom_engine.parallel.tensor_group import TensorGroup
from rt_forks import forking_context
from rt_readable import is_readable

SIZE = 3
WIDTHS = (5, 4, 4)
ROW = 600
SLOT_ROWS = 4 * 1024 * 1024 // (4 * ROW)  # rows of float32 that a slot holds


def part_of(rank: int, step: int, num_rows: int, dtype: torch.dtype = torch.float32, width: int = ROW) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(num_rows, width, generator=generator).to(dtype)


def sum_of(step: int, num_rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return functools.reduce(torch.add, [part_of(rank, step, num_rows, dtype) for rank in range(SIZE)])


class RankOfTest:
    """The methods that the test calls in a rank's process."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._group: SharedTensorGroup | None = None
        self._group_abort = GroupAbort()

    def join(self, port: int, barred: int | None = None) -> str:
        """Returns why memory is not shared, or "" if it is. The `barred` rank cannot open the others' memory."""
        self._group_abort.forget()
        self._group = None
        leave_group()
        rendezvous = Rendezvous(host="127.0.0.1", port=port, rank=self._rank, world_size=SIZE, ranks_per_stage=SIZE)
        group = join_group(rendezvous, 20.0, self._group_abort)
        assert group is not None
        with pytest.MonkeyPatch.context() as patch:
            if self._rank == barred:
                patch.setattr(shared_sums, "open_memory_file", _refuse)
            try:
                self._group = SharedTensorGroup(group, WIDTHS)
            except OSError as error:
                return str(error)
        return ""

    def sums(
        self, first_step: int, rows: list[int], dtype: torch.dtype, through_host: bool = False
    ) -> list[torch.Tensor]:
        with torch.inference_mode():
            parts = [part_of(self._rank, first_step + index, num_rows, dtype) for index, num_rows in enumerate(rows)]
            if through_host:
                parts = [part.t().contiguous().t() for part in parts]  # HostGroup accepts all layouts
            group = self._tensor_group(through_host)
            for part in parts:
                assert group.all_reduce(part) is part
            return parts

    def gather(self, step: int, num_rows: int, through_host: bool = False) -> torch.Tensor | None:
        part = part_of(self._rank, step, num_rows, width=WIDTHS[self._rank])
        return self._tensor_group(through_host).gather(part)

    def _tensor_group(self, through_host: bool) -> TensorGroup[torch.Tensor]:
        assert self._group is not None
        return HostGroup(self._group) if through_host else self._group

    def wait_for(self, peer: int) -> None:
        """Returns when the peer's byte has arrived in this process. Then the peer waits for the other parts."""
        assert self._group is not None
        inbox = self._group._inboxes[peer - (peer > self._rank)]
        assert is_readable(inbox, 20.0)

    def leave(self) -> None:
        self._group_abort.forget()
        self._group = None


def _refuse(*_: object) -> None:
    raise OSError("in another container")


def _process(rank: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    of_test = RankOfTest(rank)
    while True:
        what, details = connection.recv()
        reply: Any
        try:
            reply = getattr(of_test, what)(*details)
        except RuntimeError as error:
            reply = error
        connection.send(reply)


class Ranks:
    def __init__(self) -> None:
        self._context = forking_context()
        self.processes: dict[int, Any] = {}
        self._connections: dict[int, Connection] = {}
        for rank in range(SIZE):
            self.start(rank)

    def start(self, rank: int) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_process, args=(rank, theirs), daemon=True)
        process.start()
        theirs.close()
        self.processes[rank], self._connections[rank] = process, ours

    def join(self, *details: object) -> list[str]:
        self._store, port = open_store("127.0.0.1")
        return self.ask_all("join", port, *details)

    def send(self, rank: int, what: str, *details: object) -> None:
        self._connections[rank].send((what, details))

    def reply(self, rank: int) -> Any:
        assert self._connections[rank].poll(60.0), f"rank {rank} does not answer"
        return self._connections[rank].recv()

    def ask_all(self, what: str, *details: object) -> list[Any]:
        for rank in range(SIZE):
            self.send(rank, what, *details)
        return [self.reply(rank) for rank in range(SIZE)]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join(60.0)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture
def joined(ranks: Ranks) -> Ranks:
    for rank, process in ranks.processes.items():
        if not process.is_alive():
            ranks.start(rank)
    assert ranks.join() == [""] * SIZE
    return ranks


@pytest.mark.parametrize("through_host", [False, True], ids=["", "through host memory"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_bit_for_bit_those_in_order_of_ranks(dtype: torch.dtype, through_host: bool, joined: Ranks) -> None:
    rows = [1, 16, 3, 2 * SLOT_ROWS + 1, 1, 7] + [1] * 300  # the fourth needs several slots
    expected = [sum_of(step, num_rows, dtype) for step, num_rows in enumerate(rows)]
    for got in joined.ask_all("sums", 0, rows, dtype, through_host):
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


@pytest.mark.parametrize("through_host", [False, True], ids=["", "through host memory"])
@pytest.mark.parametrize("num_rows", [1, 16, 1024 * 1024 // max(WIDTHS) + 1])
def test_logits_of_uneven_widths_meet_on_the_first_rank(num_rows: int, through_host: bool, joined: Ranks) -> None:
    """With the largest `num_rows`, the rows do not fit into a slot."""
    whole = torch.cat([part_of(rank, 7, num_rows, width=width) for rank, width in enumerate(WIDTHS)], dim=1)
    first, *others = joined.ask_all("gather", 7, num_rows, through_host)
    assert torch.equal(first, whole)
    assert others == [None] * (SIZE - 1)


@pytest.mark.parametrize("lost", [1])
def test_a_killed_rank_frees_those_that_wait_for_it(lost: int, joined: Ranks) -> None:
    """A stopped rank blocks its peers, a killed rank does not. The peers then meet a new rank in a new group."""
    others = [rank for rank in range(SIZE) if rank != lost]
    os.kill(joined.processes[lost].pid, signal.SIGSTOP)
    for rank in others:
        joined.send(rank, "sums", 0, [4], torch.float32)
    os.kill(joined.processes[lost].pid, signal.SIGKILL)
    began = time.monotonic()
    assert [type(joined.reply(rank)) for rank in others] == [RuntimeError] * len(others)
    assert time.monotonic() - began < 15.0, "before the group's time-out"
    joined.processes[lost].join(60.0)
    joined.start(lost)
    assert joined.join() == [""] * SIZE
    assert all(torch.equal(got[0], sum_of(5, 4)) for got in joined.ask_all("sums", 5, [4], torch.float32))


def test_a_rank_that_leaves_frees_those_that_wait_for_it(joined: Ranks) -> None:
    for rank in (0, 2):
        joined.send(rank, "sums", 0, [4], torch.float32)
    joined.send(1, "leave")
    assert joined.reply(1) is None
    assert [type(joined.reply(rank)) for rank in (0, 2)] == [RuntimeError] * 2


def test_a_rank_that_fails_frees_those_that_wait_for_it(joined: Ranks) -> None:
    """The last rank has sent both of its bytes, and waits for the bytes of the first rank.

    The first rank fails before it sends.
    """
    joined.send(2, "sums", 0, [4], torch.float32)
    joined.send(1, "wait_for", 2)
    assert joined.reply(1) is None
    joined.send(1, "leave")
    assert joined.reply(1) is None
    for again in range(2):
        joined.send(0, "sums", again, [4], torch.float32)
        assert type(joined.reply(0)) is RuntimeError
    assert type(joined.reply(2)) is RuntimeError


def test_when_one_rank_cannot_open_the_memory_none_uses_it(joined: Ranks) -> None:
    assert joined.join(1) == ["in another container"] * SIZE

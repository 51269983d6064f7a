"""`python -m rayloom_engine.launcher.fork_server`: starts the ranks of executor `mp`, each as a fork of this process.

Importing torch takes seconds, here once for all ranks and before any of them is lost: a replacement is there at once.
A fork is safe because this process has one thread and has touched no accelerator. It has nothing else to do, and ends
with its ranks when the launcher hangs up or is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
from pathlib import Path

import msgspec

from rayloom_engine.common.process import die_with_parent, name_process, without_garbage_collection
from rayloom_engine.config import load_config
from rayloom_engine.worker import process as rank_process
from rayloom_engine.worker.start import set_threads

MAX_MESSAGE_BYTES = 4096
# What every rank imports sooner or later.
_PRELOAD = (
    "torch",
    "rayloom_engine.models.loader",
    "rayloom_engine.worker.loaded_rank",
    "rayloom_engine.parallel.process_group",
)


class StartRank(msgspec.Struct, frozen=True, tag=True):
    rank: int
    incarnation: int
    device: str | None  # CUDA device of its own


class KillRank(msgspec.Struct, frozen=True, tag=True):
    rank: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The imports are done."""


class Killed(msgspec.Struct, frozen=True, tag=True):
    """The rank has its SIGKILL; RankEnd follows when it is gone."""

    rank: int


class RankEnd(msgspec.Struct, frozen=True, tag=True):
    rank: int
    code: int  # exit code, or minus the signal that ended it


class ForkServer:
    """`line`: to the launcher, one message a packet."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._running: dict[int, tuple[int, int]] = {}  # rank -> process id, descriptor that is readable at its end
        self._orders = msgspec.json.Decoder(StartRank | KillRank)

    def run(self) -> StartRank | None:
        """Obeys the launcher until it hangs up: then every rank has ended, and this gives None.

        Gives an order in a fork of this process, which then is to be that rank.
        """
        self._tell(Ready())
        while True:
            ends = {end: rank for rank, (_, end) in self._running.items()}
            line = self._line.fileno()
            readable, _, _ = select.select([line, *ends], [], [])
            for end in readable:
                if end != line:
                    self._report(ends[end])
            if line not in readable:
                continue
            message = b""
            with contextlib.suppress(ConnectionError):  # it hung up before it had read everything
                message = self._line.recv(MAX_MESSAGE_BYTES)
            if not message:
                break
            order = self._orders.decode(message)
            if isinstance(order, StartRank):
                if self._is_fork(order.rank):
                    return order
            elif order.rank in self._running:
                os.kill(self._running[order.rank][0], signal.SIGKILL)  # not waited for, so the id is still its own
                self._tell(Killed(order.rank))
        for pid, _ in self._running.values():
            os.kill(pid, signal.SIGKILL)
        for pid, _ in self._running.values():
            os.waitpid(pid, 0)
        return None

    def _is_fork(self, rank: int) -> bool:
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or too little memory: that costs no other rank
            self._give_up(rank, error)
            return False
        if pid == 0:
            self._line.close()
            for _, end in self._running.values():
                os.close(end)
            return True
        try:
            self._running[rank] = pid, os.pidfd_open(pid)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._give_up(rank, error)
        return False

    def _give_up(self, rank: int, error: OSError) -> None:
        print(f"rank {rank} cannot be started: {error}", file=sys.stderr, flush=True)
        self._tell(RankEnd(rank, 1))

    def _report(self, rank: int) -> None:
        pid, end = self._running.pop(rank)
        os.close(end)
        _, status = os.waitpid(pid, 0)
        self._tell(RankEnd(rank, os.waitstatus_to_exitcode(status)))

    def _tell(self, message: Ready | Killed | RankEnd) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone, which the next look shows
            self._line.send(msgspec.json.encode(message))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rayloom_engine.launcher.fork_server", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with config.json and token")
    parser.add_argument("--core-address", required=True, help="HOST:PORT of the core's rank port")
    parser.add_argument("--line-fd", type=int, required=True, help="socket of packets to the launcher")
    parser.add_argument("--parent", type=int, required=True, help="process id to end with")
    args = parser.parse_args()
    die_with_parent(args.parent)
    config = load_config(args.run_dir / "config.json")
    set_threads(config, config.world_size)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's own threads, which nothing here uses
    with without_garbage_collection():
        for module in _PRELOAD:
            importlib.import_module(module)
    gc.freeze()  # what was imported stays as it is, so that ranks share its memory
    parent = os.getpid()
    order = ForkServer(socket.socket(fileno=args.line_fd)).run()
    if order is None:
        return 0
    return _be_rank(order, args.run_dir, args.core_address, parent)


def _be_rank(order: StartRank, run_dir: Path, core_address: str, parent: int) -> int:
    name_process(f"rank{order.rank}")
    if order.device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = order.device
    arguments = ["--run-dir", str(run_dir), "--core-address", core_address, "--rank", str(order.rank)]
    return rank_process.main([*arguments, "--incarnation", str(order.incarnation), "--parent", str(parent)])


if __name__ == "__main__":
    sys.exit(main())

"""`python -m rayloom_engine.launcher.fork_server`: starts the ranks of executor `mp`, each as a fork of this process.

Importing torch takes seconds. Only this process imports torch. So every rank starts without delay, even a replacement
for a lost rank. A fork is safe because this process has one thread and has not used an accelerator. When the launcher
closes the connection or dies, this process and its ranks end.
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
from rayloom_engine.launcher.fork_messages import MAX_MESSAGE_BYTES, Killed, KillRank, RankEnd, Ready, StartRank
from rayloom_engine.worker import process as rank_process
from rayloom_engine.worker.start import set_threads

# Modules that every rank imports sooner or later.
_PRELOAD = (
    "torch",
    "rayloom_engine.worker.loaded_rank",
    "rayloom_engine.worker.part_loading",
    "rayloom_engine.worker.library_computation",
    "rayloom_engine.worker.torch_computation",
    "rayloom_engine.parallel.numpy_bridge",
    "rayloom_engine.parallel.process_link",
    "rayloom_engine.parallel.shared_sums",
)


class ForkServer:
    """Forks and kills ranks by the launcher's orders. `line`: connection to the launcher; a packet is one message."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._running: dict[int, tuple[int, int]] = {}  # rank -> (process id, pidfd: readable once the process ends)
        self._orders = msgspec.json.Decoder(StartRank | KillRank)

    def run(self) -> StartRank | None:
        """Carries out orders until the launcher closes the connection. Then kills every rank and returns None.

        In each forked process, `run` returns the StartRank order instead: the forked process must become the rank.
        """
        self._send(Ready())
        while True:
            ends = {end: rank for rank, (_, end) in self._running.items()}
            line = self._line.fileno()
            poller = select.poll()
            for end in (line, *ends):
                poller.register(end, select.POLLIN)
            readable = [end for end, _ in poller.poll()]
            for end in readable:
                if end != line:
                    self._report(ends[end])
            if line not in readable:
                continue
            message = b""
            with contextlib.suppress(ConnectionError):  # the launcher closed the connection with unread messages
                message = self._line.recv(MAX_MESSAGE_BYTES)
            if not message:
                break
            order = self._orders.decode(message)
            if isinstance(order, StartRank):
                if self._is_fork(order.rank):
                    return order
            elif order.rank in self._running:
                # the process is not reaped yet, so its pid cannot be reused
                os.kill(self._running[order.rank][0], signal.SIGKILL)
                self._send(Killed(order.rank))
        for pid, _ in self._running.values():
            os.kill(pid, signal.SIGKILL)
        for pid, _ in self._running.values():
            os.waitpid(pid, 0)
        return None

    def _is_fork(self, rank: int) -> bool:
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or too little memory: only this rank ends
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
        self._send(RankEnd(rank, 1))

    def _report(self, rank: int) -> None:
        pid, end = self._running.pop(rank)
        os.close(end)
        _, status = os.waitpid(pid, 0)
        self._send(RankEnd(rank, os.waitstatus_to_exitcode(status)))

    def _send(self, message: Ready | Killed | RankEnd) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: `run` notices it at the next select
            self._line.send(msgspec.json.encode(message))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rayloom_engine.launcher.fork_server", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with config.json and token")
    parser.add_argument("--core-address", required=True, help="HOST:PORT of the core's rank port")
    parser.add_argument("--line-fd", type=int, required=True, help="socket of packets to the launcher")
    parser.add_argument("--parent", type=int, required=True, help="id of the parent; this process ends with it")
    args = parser.parse_args()
    die_with_parent(args.parent)
    config = load_config(args.run_dir / "config.json")
    set_threads(config, config.world_size)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # ranks do not use numpy's threads
    with without_garbage_collection():
        _preload()
    # From now on, the garbage collector does not write to imported objects, so all ranks keep sharing the memory of
    # these objects.
    gc.freeze()
    parent = os.getpid()
    order = ForkServer(socket.socket(fileno=args.line_fd)).run()
    if order is None:
        return 0
    return _be_rank(order, args.run_dir, args.core_address, parent)


def _preload() -> None:
    """Imports the modules that every rank needs, and the modules of the plain kernels."""
    for module in _PRELOAD:
        importlib.import_module(module)
    import torch

    from rayloom_engine.kernels.kernel_set import choose_kernels
    from rayloom_engine.kernels.target import Target

    # Choosing kernels imports them. The backend "plain" needs no probe, which might start threads before the forks.
    choose_kernels(Target(device=torch.device("cpu"), compute_dtype=torch.float32, backend="plain"))


def _be_rank(order: StartRank, run_dir: Path, core_address: str, parent: int) -> int:
    name_process(f"rank{order.rank}")
    if order.device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = order.device
    arguments = ["--run-dir", str(run_dir), "--core-address", core_address, "--rank", str(order.rank)]
    return rank_process.main([*arguments, "--incarnation", str(order.incarnation), "--parent", str(parent)])


if __name__ == "__main__":
    sys.exit(main())

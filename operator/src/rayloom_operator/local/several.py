"""Serves a manifest with `replicas` of 2 or more on this machine: `replicas` engines behind one gateway.

manifest -> plans -> engines and gateway -> all serve -> a sample, restarts of processes that end -> a stop signal
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import NoReturn

from rayloom_operator.api.spec import LLMService
from rayloom_operator.engines.status import EngineStatus
from rayloom_operator.errors import EngineEnded, EngineUnavailable, OperatorError
from rayloom_operator.local.client import base_url, read_engines, read_status
from rayloom_operator.local.display import StartupDisplay
from rayloom_operator.local.member import Member
from rayloom_operator.local.plan import GATEWAY, KEY_FILE, LOOPBACK, Ports, plan_processes
from rayloom_operator.local.ports import ReservedPort
from rayloom_operator.local.process import tell
from rayloom_operator.local.sample import SampleRequest
from rayloom_operator.local.signals import StopRequested, StopSignals
from rayloom_operator.local.summary import print_summary, show_sample

_POLL_INTERVAL_S = 0.1
_STATUS_INTERVAL_S = 0.5
# An engine puts its sockets into a folder `rayloom-XXXXXXXX` below the folder for temporary files, but only if the path
# of `rayloom-XXXXXXXX` has at most 37 bytes (rayloom_engine/supervisor/sockets.py).
_MAX_FOLDER_BYTES = 37 - len("/rayloom-XXXXXXXX")
_STOP_GRACE_S = 2.5  # seconds for processes to end after SIGINT; a drain may last drainSeconds plus these seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRun:
    """The user's options for a local run. The ports are those of the gateway; 0 picks a free port."""

    service: LLMService
    environment: Mapping[str, str]  # environment of all processes
    devices: Sequence[str]  # names of accelerators
    host: str
    port: int
    admin_port: int
    ranks_per_gpu: int
    has_sample: bool


def serve_several(run: LocalRun, command: Path, signals: StopSignals) -> int:
    """Serves until a stop signal arrives, or until too few processes can be kept running.

    Returns the exit code. After a stop signal: 0 if no process has spent its restart budget, else the exit code of a
    process that has spent it. Without a stop signal: the exit code of the process that ended, or 1 for another error.
    Raises EngineUnavailable if a port is taken.
    """
    with ExitStack() as stack:
        ports = [stack.enter_context(closing(port)) for port in _reserve(run)]
        folder = _make_folder()
        _write_key(folder / KEY_FILE)
        several = Several(run, ports, command, folder)
        is_stop_requested = False
        try:
            several.start()
            with signals.raising():
                status = several.wait_until_serving()
                several.print_summary(status)
                several.watch(signals)
        except StopRequested:
            is_stop_requested = True
            several.drain(signals)
            return several.exit_code()
        except OperatorError as error:
            several.show_logs()
            tell(f"rayloom-operator: {error}")
            return error.exit_code if isinstance(error, EngineEnded) else 1
        finally:
            several.stop()
            if is_stop_requested:  # Unless a stop signal ended the run, the logs in the folder are kept.
                shutil.rmtree(folder)
            else:
                _keep_logs(folder)


class Several:
    """The processes of a local run: several engines and their gateway."""

    def __init__(self, run: LocalRun, ports: Sequence[ReservedPort], command: Path, folder: Path) -> None:
        self._run = run
        self._folder = folder
        api, admin, *own = ports
        triples = [own[index : index + 3] for index in range(0, len(own), 3)]
        engines = [_place(*triple) for triple in triples]
        plans = plan_processes(
            run.service,
            folder=folder,
            gateway=_place(api, admin),
            engines=engines,
            devices=run.devices,
            ranks_per_gpu=run.ranks_per_gpu,
        )
        self._members = [
            Member(
                plan,
                held,
                command=command,
                folder=folder,
                # A killed engine leaves its run folder behind. Inside `folder`, the run folder is deleted at the end.
                environment={**run.environment, "TMPDIR": str(folder)},
                recovery=run.service.spec.recovery,
            )
            for plan, held in zip(plans, [*triples, [api, admin]], strict=True)
        ]
        *self._engines, self._gateway = self._members
        self._sample = SampleRequest(
            lambda on_connect: show_sample(
                run.service, run.host, self._gateway.place.port, run.environment, on_connect
            ),
            _tell_serving,
        )
        self._asked_at = 0.0  # time of the last read of /status and /engines in `watch`, by time.monotonic

    def start(self) -> None:
        """Starts all processes. Raises EngineUnavailable."""
        for member in self._members:
            member.start()

    # --- start-up ---

    def wait_until_serving(self) -> EngineStatus:
        """Waits until every engine serves and is connected to the gateway. Returns the status of the first engine.

        Raises EngineEnded or EngineUnavailable if one of the processes cannot start.
        """
        display = StartupDisplay(sys.stderr)
        tell(f"Starting {len(self._engines)} engines and a gateway.")
        while True:
            statuses = {member.name: _status(member) for member in self._members}
            display.update_all(statuses)
            first = statuses[self._engines[0].name]
            if first is not None and self._note_serving(statuses) and all(self._are_serving()):
                return first
            for member in self._members:
                status = statuses[member.name]
                if status is not None and status.state == "failed":
                    member.last_end = EngineEnded(f"{member.name} could not start: {status.reason}", 1)
                    raise member.last_end
                if ended := member.reap(time.monotonic()):
                    raise ended
            time.sleep(_POLL_INTERVAL_S)

    def print_summary(self, status: EngineStatus) -> None:
        """Prints the addresses. If the run has a sample request, starts the thread that prints the answer.

        `status`: the status of an engine.
        """
        run = self._run
        port = self._gateway.place.port
        admin_port = self._gateway.place.admin_port
        states = read_engines(LOOPBACK, admin_port) or {}
        lines = [f"Engines, as {base_url(LOOPBACK, admin_port)}/engines lists them:"]
        for engine in self._engines:
            url = base_url(engine.place.host, engine.place.port)
            lines.append(f"  {engine.name}  {states.get(engine.name, 'disconnected')}  {url}")
        lines.append(f"Logs:   {self._folder}")
        more = "".join(f"\n{line}" for line in lines)
        print_summary(run.service, status, url=base_url(run.host, port), environment=run.environment, more=more)
        if run.has_sample:
            self._sample.start()
        else:
            _tell_serving()

    # --- serving ---

    def watch(self, signals: StopSignals) -> NoReturn:
        """Restarts processes that end. Raises EngineEnded once no engine, or no gateway, can be kept running."""
        while True:
            now = time.monotonic()
            for member in self._members:
                if ended := member.reap(now):
                    self._tell_end(member, ended, now)
                if self._gateway.is_lost or all(engine.is_lost for engine in self._engines):
                    raise self._last_end()
                if member.is_due(now):
                    with signals.held():
                        member.start()
            if now - self._asked_at > _STATUS_INTERVAL_S and not all(self._are_serving()):
                self._asked_at = now
                with suppress(EngineUnavailable):  # an answer that cannot be read must not end the other processes
                    self._note_serving({member.name: _status(member) for member in self._members})
            time.sleep(_POLL_INTERVAL_S)

    def _tell_end(self, member: Member, ended: EngineEnded, now: float) -> None:
        wait_s = (member.start_at or now) - now
        when = "now" if wait_s <= 0 else f"in {wait_s:.0f} s"
        meanwhile = "" if member is self._gateway else " Its streams continue on another engine, or wait for one."
        tell(f"{ended}. It is started again {when}.{meanwhile}")

    def _note_serving(self, statuses: Mapping[str, EngineStatus | None]) -> bool:
        """Records the processes that serve, and returns True if all do.

        An engine counts as serving once the gateway sends requests to it.
        """
        states = {GATEWAY: "serving", **(read_engines(LOOPBACK, self._gateway.place.admin_port) or {})}
        for member in self._members:
            status = statuses[member.name]
            is_up = status is not None and status.state == "serving" and states.get(member.name) == "serving"
            if is_up and member.served_at is None and member.is_running:
                member.served_at = time.monotonic()
                if member.last_end is not None:
                    tell(f"{member.name} serves again.")
        return all(self._are_serving())

    def _are_serving(self) -> Sequence[bool]:
        return [member.served_at is not None for member in self._members]

    def _last_end(self) -> EngineEnded:
        lost = [member.last_end for member in self._members if member.is_lost and member.last_end is not None]
        return lost[-1]

    # --- end ---

    def drain(self, signals: StopSignals) -> None:
        """Drains the gateway and then the engines. Another stop signal ends the drain."""
        self._sample.cancel()
        drain_s = self._run.service.spec.drain_seconds
        tell(f"\nStopping. Running requests have {drain_s} s to finish; Ctrl-C again stops at once.")
        deadline = time.monotonic() + drain_s + _STOP_GRACE_S
        for members in ([self._gateway], self._engines):
            for member in members:
                if member.process is not None:
                    member.process.send(signal.SIGTERM)
            while any(member.is_running for member in members) and time.monotonic() < deadline:
                if signals.is_urgent:
                    tell("Stopping at once.")
                    return
                time.sleep(0.02)

    def stop(self) -> None:
        """Ends all processes at once, and kills processes that do not end in time."""
        self._sample.cancel()
        running = [member.process for member in self._members if member.process is not None]
        for process in running:
            process.send(signal.SIGINT)
        deadline = time.monotonic() + _STOP_GRACE_S
        for process in running:
            if not process.stop(max(0.0, deadline - time.monotonic())):
                tell(f"{process.name} did not stop in time and was killed.")

    def exit_code(self) -> int:
        """Returns the exit code after a stop signal, and prints the reason if it is not 0."""
        if not any(member.is_lost for member in self._members):
            return 0
        ended = self._last_end()
        tell(f"rayloom-operator: {ended}, and did not serve again")
        return ended.exit_code

    def show_logs(self) -> None:
        """Prints the end of the log of each process that ended by itself and does not serve."""
        for member in self._members:
            if member.last_end is not None and member.served_at is None and member.process is not None:
                member.process.show_log()


def _reserve(run: LocalRun) -> list[ReservedPort]:
    """Returns ports for the API and the admin port of the gateway, then three ports for each engine."""
    if run.port and run.port == run.admin_port:
        raise EngineUnavailable(f"port {run.port} is given twice; choose another one with --admin-port PORT")
    ports = [ReservedPort(run.host, run.port, "--port"), ReservedPort(LOOPBACK, run.admin_port, "--admin-port")]
    return [*ports, *(ReservedPort(LOOPBACK) for _ in range(3 * run.service.spec.replicas))]


def _tell_serving() -> None:
    print("Serving. Press Ctrl-C to stop.", flush=True)


def _place(api: ReservedPort, admin: ReservedPort, front: ReservedPort | None = None) -> Ports:
    return Ports(
        host=api.host,
        port=api.number,
        admin_port=admin.number,
        front_port=0 if front is None else front.number,
    )


def _make_folder() -> Path:
    """Makes a folder for all files of the processes. Its path is short enough for the sockets of engines."""
    folder = tempfile.mkdtemp(prefix="rayloom-")
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="rayloom-", dir="/tmp")
    return Path(folder)


def _keep_logs(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix != ".log":
            path.unlink()


def _write_key(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(token_hex(32) + "\n")


def _status(member: Member) -> EngineStatus | None:
    return read_status(LOOPBACK, member.place.admin_port) if member.is_running else None

"""Leader election on a Lease of the cluster: reads and writes what `election` decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from rayloom_operator.errors import OperatorError
from rayloom_operator.kube.client import CONFLICT, NOT_FOUND, Kube, KubeError
from rayloom_operator.kube.election import Election, LeaseLost, Record
from rayloom_operator.names import Manifest, path_of

logger = logging.getLogger(__name__)

# Counts also while the machine is suspended, where the system has such a clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Lease:
    """Runs in a thread with a loop of its own, so that a busy operator does not lose its lease.

    `connect` makes a client that may always write. A lease of `seconds` is renewed four times in that time.
    """

    def __init__(
        self, *, namespace: str, name: str, identity: str, seconds: float, connect: Callable[[], Kube]
    ) -> None:
        self._manifest: Manifest = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"namespace": namespace, "name": name},
        }
        self._election = Election(identity, seconds)
        self._seconds = seconds
        self._connect = connect
        self._is_known = False  # the record is that of our last write
        self._said = ""
        self._has_led = False
        self._is_stopped = False
        self._wake: Callable[[], object] = lambda: None

    def may_write(self) -> bool:
        """Whether this process leads at this moment; from any thread."""
        return self._election.may_write(time.clock_gettime(_CLOCK))

    def stop(self) -> None:
        """Has `run` release the lease and return; from any thread."""
        self._is_stopped = True
        self._wake()

    async def run(self, on_lead: Callable[[], object]) -> None:
        """Takes the lease, calls `on_lead`, and keeps it. Raises LeaseLost when another process takes it."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(woken.set)
        kube = self._connect()
        try:
            while not self._is_stopped:
                due = min(loop.time() + self._seconds / 4, await self._turn(kube) + loop.time())
                if self.may_write() and not self._has_led:
                    self._has_led = True
                    self._say("this process leads")
                    on_lead()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), due - loop.time())
        finally:
            if self.may_write():
                await self._release(kube)
            self._wake = lambda: None
            await kube.close()

    async def _turn(self, kube: Kube) -> float:
        """One look at the lease, and a write where it is ours or free. The seconds until it is worth another look."""
        wait = self._seconds
        try:
            async with asyncio.timeout(self._seconds / 4):
                if not self._is_known:
                    record = await self._read(kube)
                    self._election.saw(record, time.clock_gettime(_CLOCK))
                    if record is not None and record.holder and not self._has_led:
                        self._say(f"waiting while {record.holder} leads")
                wait = self._election.wait_seconds(time.clock_gettime(_CLOCK))
                if wait == 0:
                    wait = self._seconds
                    await self._write(kube, self._election.claim(_clock()))
        except LeaseLost:
            raise
        except (OperatorError, TimeoutError) as error:
            self._is_known = False
            if not isinstance(error, KubeError) or error.code != CONFLICT:
                self._say(f"the lease cannot be read or written: {error or 'no answer in time'}", logging.WARNING)
        return wait

    async def _read(self, kube: Kube) -> Record | None:
        try:
            found = await kube.get(path_of(self._manifest))
        except KubeError as error:
            if error.code != NOT_FOUND:
                raise
            return None
        spec = found.get("spec", {})
        return Record(
            holder=spec.get("holderIdentity") or "",
            seconds=spec.get("leaseDurationSeconds") or self._seconds,
            transitions=spec.get("leaseTransitions") or 0,
            acquired=spec.get("acquireTime") or _clock(),
            version=found["metadata"]["resourceVersion"],
        )

    async def _write(self, kube: Kube, record: Record) -> None:
        self._is_known = False
        sent_at = time.clock_gettime(_CLOCK)
        spec = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": max(1, round(record.seconds)),
            "acquireTime": record.acquired,
            "renewTime": _clock(),
            "leaseTransitions": record.transitions,
        }
        if record.version:
            # The version makes the API server refuse it when somebody else has written meanwhile.
            body = {"metadata": {"resourceVersion": record.version}, "spec": spec}
            written = await kube.patch(path_of(self._manifest), body)
            self._is_known = True
            record = replace(record, version=written["metadata"]["resourceVersion"])
        elif not await kube.create(self._manifest | {"spec": spec}):
            return
        if record.holder:
            self._election.won(record, sent_at)

    async def _release(self, kube: Kube) -> None:
        self._election.stop()
        try:
            async with asyncio.timeout(self._seconds / 4):
                if not self._is_known:
                    self._election.saw(await self._read(kube), time.clock_gettime(_CLOCK))
                await self._write(kube, replace(self._election.claim(_clock()), holder="", seconds=1))
        except (OperatorError, TimeoutError) as error:
            logger.warning("the lease was not released, so the next leader waits: %s", error or "no answer in time")

    def _say(self, text: str, level: int = logging.INFO) -> None:
        """Once: a turn is taken several times in a second."""
        if text != self._said:
            self._said = text
            logger.log(level, "%s", text)


def _clock() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

"""Leader election with a Lease in the cluster: reads and writes the Lease, as `election` decides."""

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
from rayloom_operator.kube.election import Election, LeaseLost, LeaseRecord
from rayloom_operator.names import Manifest, path_of

logger = logging.getLogger(__name__)

# CLOCK_BOOTTIME, where the system has it, also counts the time while the machine is suspended.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Lease:
    """Takes and renews the Lease in a thread with its own event loop, so that a busy operator does not lose the Lease.

    `connect` returns a client that may always write. Without a renewal, the Lease lasts for `seconds`. The leader
    renews the Lease after a quarter of that time.
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
        self._is_known = False  # the record in the cluster is the last record that this process wrote
        self._logged = ""
        self._has_led = False
        self._is_stopped = False
        self._wake: Callable[[], object] = lambda: None

    def may_write(self) -> bool:
        """Returns True if this process leads at this moment. May be called from any thread."""
        return self._election.may_write(time.clock_gettime(_CLOCK))

    def stop(self) -> None:
        """Makes `run` release the Lease and return; may be called from any thread."""
        self._is_stopped = True
        self._wake()

    async def run(self, on_lead: Callable[[], object]) -> None:
        """Acquires the Lease, calls `on_lead` once it is acquired, and updates its renewTime until `stop` is called.

        Raises LeaseLost if this process was the leader and the Lease no longer names it as the holder.
        """
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(woken.set)
        kube = self._connect()
        try:
            while not self._is_stopped:
                due = min(loop.time() + self._seconds / 4, await self._renew(kube) + loop.time())
                if self.may_write() and not self._has_led:
                    self._has_led = True
                    self._log("this process leads")
                    on_lead()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), due - loop.time())
        finally:
            if self.may_write():
                await self._release(kube)
            self._wake = lambda: None
            await kube.close()

    async def _renew(self, kube: Kube) -> float:
        """Reads the Lease. Writes the Lease if this process holds it, or if nobody holds it. Returns the seconds until
        the next attempt."""
        wait = self._seconds
        try:
            async with asyncio.timeout(self._seconds / 4):
                if not self._is_known:
                    record = await self._read(kube)
                    self._election.saw(record, time.clock_gettime(_CLOCK))
                    if record is not None and record.holder and not self._has_led:
                        self._log(f"waiting while {record.holder} leads")
                wait = self._election.wait_seconds(time.clock_gettime(_CLOCK))
                if wait == 0:
                    wait = self._seconds
                    await self._write(kube, self._election.claim(_time_of_day()))
        except LeaseLost:
            raise
        except (OperatorError, TimeoutError) as error:
            self._is_known = False
            if not isinstance(error, KubeError) or error.code != CONFLICT:
                self._log(f"the lease cannot be read or written: {error or 'no answer in time'}", logging.WARNING)
        return wait

    async def _read(self, kube: Kube) -> LeaseRecord | None:
        try:
            found = await kube.get(path_of(self._manifest))
        except KubeError as error:
            if error.code != NOT_FOUND:
                raise
            return None
        spec = found.get("spec", {})
        return LeaseRecord(
            holder=spec.get("holderIdentity") or "",
            seconds=spec.get("leaseDurationSeconds") or self._seconds,
            transitions=spec.get("leaseTransitions") or 0,
            acquired=spec.get("acquireTime") or _time_of_day(),
            version=found["metadata"]["resourceVersion"],
        )

    async def _write(self, kube: Kube, record: LeaseRecord) -> None:
        self._is_known = False
        sent_at = time.clock_gettime(_CLOCK)
        spec = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": max(1, round(record.seconds)),
            "acquireTime": record.acquired,
            "renewTime": _time_of_day(),
            "leaseTransitions": record.transitions,
        }
        if record.version:
            # The version makes the API server refuse the write if another process has written in the meantime.
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
                await self._write(kube, replace(self._election.claim(_time_of_day()), holder="", seconds=1))
        except (OperatorError, TimeoutError) as error:
            logger.warning("the lease was not released, so the next leader waits: %s", error or "no answer in time")

    def _log(self, text: str, level: int = logging.INFO) -> None:
        """Logs `text` if it differs from the last logged text: renewals are frequent, and most change nothing."""
        if text != self._logged:
            self._logged = text
            logger.log(level, "%s", text)


def _time_of_day() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

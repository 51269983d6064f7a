"""RankFiles: waits until the machine of every rank has the files of an adapter of the hub.

The core passes the needed adapters on to the ranks, and each rank fetches the files in the background. The core's
status has the result.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rayloom_engine.core.adapter import NeededAdapter, ServedAdapter
from rayloom_engine.errors import ModelError
from rayloom_engine.protocol.messages import CoreStatus

_MOST_S = 900.0


@dataclass(slots=True)
class _Wait:
    problem: asyncio.Future[str]  # the reason why a rank cannot get the files; empty if every rank has them
    until_s: float | None = None  # by time.monotonic; None while the core does not serve


class RankFiles:
    """The adapters of the hub that a front needs on every rank's machine. For one event loop."""

    def __init__(self, send: Callable[[tuple[NeededAdapter, ...]], None], most_s: float = _MOST_S) -> None:
        """`send`: sends the list of needed adapters to the core.

        `most_s`: longest wait for an adapter while the core serves. While the core starts, there is no limit, because
        its ranks may wait for room in the cluster.
        """
        self._send = send
        self._most_s = most_s
        self._needed: dict[str, NeededAdapter] = {}  # path -> needed adapter
        self._kept: frozenset[str] = frozenset()  # paths of the latest `need`
        self._waits: dict[int, _Wait] = {}  # number of a needed adapter -> wait
        # path -> lock: two loads of the same files run one after the other
        self._loads: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._has_sent = False

    def need(self, entries: Iterable[ServedAdapter]) -> None:
        """Sets the needed adapters: the hub's adapters in `entries`, and the adapters that `bring` waits for.

        Does not wait for the files.
        """
        wanted = {entry.adapter.path: entry for entry in entries if entry.num_bytes}
        self._kept = frozenset(wanted)
        needed = {path: self._needed.get(path) or _needed(entry) for path, entry in wanted.items()}
        awaited = {path: each for path, each in self._needed.items() if each.number in self._waits}
        self._set({**needed, **awaited})

    async def bring(self, entry: ServedAdapter) -> None:
        """Returns once the machine of every rank has the adapter's files. Returns at once if the adapter is a folder.

        If a rank cannot get the files, raises ModelError, and these files are no longer needed.
        """
        if not entry.num_bytes:
            return
        async with self._loads.setdefault(entry.adapter.path, asyncio.Lock()):
            await self._bring(entry)

    async def _bring(self, entry: ServedAdapter) -> None:
        path, needed = entry.adapter.path, _needed(entry)
        before = self._needed.get(path)
        wait = self._waits[needed.number] = _Wait(asyncio.get_running_loop().create_future())
        self._set({**self._needed, path: needed})
        is_there = False
        try:
            if problem := await wait.problem:
                raise ModelError(f"{path}: {problem}", "Unreachable")
            is_there = True
        finally:
            del self._waits[needed.number]
            if not is_there:
                others = {key: each for key, each in self._needed.items() if key != path}
                # An adapter that was unloaded during the wait is not needed any more.
                self._set({**others, path: before} if before is not None and path in self._kept else others)

    def received(self, status: CoreStatus) -> None:
        """Ends the waits for adapters that a status of the core reports, and waits that take too long."""
        now_s = time.monotonic()
        reports = {report.number: report for report in status.adapter_reports}
        for number, wait in self._waits.items():
            if wait.problem.done():
                continue
            if number in reports:
                wait.problem.set_result(reports[number].problem)
            elif status.state != "serving":
                wait.until_s = None
            elif wait.until_s is None:
                wait.until_s = now_s + self._most_s
            elif now_s > wait.until_s:
                wait.problem.set_result(f"no answer of all ranks within {self._most_s:g} s; see their logs")

    def _set(self, needed: dict[str, NeededAdapter]) -> None:
        # The core may still have the list of an earlier front, so the first list is sent even if it is empty.
        if needed != self._needed or not self._has_sent:
            self._has_sent = True
            self._needed = needed
            self._send(tuple(needed.values()))


def _needed(entry: ServedAdapter) -> NeededAdapter:
    return NeededAdapter(adapter=entry.adapter, num_bytes=entry.num_bytes, number=secrets.randbits(63))

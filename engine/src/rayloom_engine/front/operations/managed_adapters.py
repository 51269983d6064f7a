"""ManagedAdapters: loads and unloads adapters of an AdapterList as the admin port demands (PUT /adapters).

A request to the admin port always names the whole list, so a repeated request changes nothing. An adapter that cannot
be loaded is tried again after a while, because its files may arrive later. The wanted list is stored in a file of the
run folder. So the next front also tries adapters that could not be loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from rayloom_engine.common.whole_file import write_whole
from rayloom_engine.errors import ModelError
from rayloom_engine.front.http.errors import ApiError
from rayloom_engine.front.operations.adapters import AdapterList
from rayloom_engine.status import ReportedAdapter

_MOST_MESSAGE = 300  # characters of a message in /status

logger = logging.getLogger(__name__)


class ManagedAdapters:
    """The wanted adapters, and why some of them are not loaded. For one event loop."""

    def __init__(
        self, adapters: AdapterList, wanted: Mapping[str, str], retry_s: float, file: Path | None = None
    ) -> None:
        """`wanted`: adapter's name -> folder, or place on the hub. `retry_s`: seconds between tries to load one.

        `file`: stores the wanted list for the next front; a list in this file replaces `wanted`. None: no list is
        stored.
        """
        self._adapters = adapters
        self._file = file
        self._kept = _read(file)  # the list in the file
        self._wanted = dict(wanted) if self._kept is None else self._kept
        self._problems: dict[str, str] = {}  # name -> why the adapter could not be loaded
        self._has_failed = False  # an unexpected error has interrupted the latest `bring`
        self._retry_s = retry_s
        self._is_changed = asyncio.Event()
        self._is_tried = asyncio.Event()  # `keep` has tried each wanted adapter once

    def want(self, wanted: Mapping[str, str]) -> None:
        """Sets the wanted adapters, name -> folder or place on the hub. `keep` then loads and unloads accordingly."""
        if dict(wanted) == self._wanted:
            return
        self._wanted = dict(wanted)
        self._problems = {}
        self._is_changed.set()

    def reports(self) -> list[ReportedAdapter]:
        """Returns the state of each wanted adapter, in the order in which they were given."""
        return [self._report(name, path) for name, path in self._wanted.items()]

    async def bring(self, folder: Path) -> None:
        """Unloads adapters that are not wanted any more, and loads wanted adapters. `folder`: the model's folder.

        If an adapter cannot be loaded, its problem is recorded, and a loaded adapter of the same name keeps its earlier
        files. Any other fault is logged, and `keep` tries again.
        """
        self._has_failed = False
        for part in (self._write, partial(self._bring, folder)):
            try:
                await part()
            except Exception:  # `keep` must not end, because it applies later lists, too
                logger.exception("cannot bring the adapters to the wanted list; tried again in %g s", self._retry_s)
                self._has_failed = True

    async def _write(self) -> None:
        wanted = self._wanted  # `want` replaces the dict, and never changes it
        if self._file is not None and wanted != self._kept:
            await asyncio.to_thread(write_whole, self._file, msgspec.json.encode(wanted))
            self._kept = wanted

    async def _bring(self, folder: Path) -> None:
        wanted = dict(self._wanted)
        for name in [entry.name for entry in self._adapters.entries if entry.name not in wanted]:
            with contextlib.suppress(ApiError):  # the adapter was unloaded in the meantime
                await self._adapters.unload(name)
        for name, path in wanted.items():
            if self._adapters.has(name, path):
                self._problems.pop(name, None)
                continue
            problem = ""
            try:
                await self._adapters.load(name, path, folder, in_place=True)
            except (ApiError, ModelError, OSError) as error:
                problem = str(error)[:_MOST_MESSAGE]
            if wanted != self._wanted:
                return  # the list has changed meanwhile, so `keep` calls `bring` again
            if problem and self._problems.get(name) != problem:
                logger.error("adapter %s: %s", name, problem)
            self._problems.pop(name, None)
            if problem:
                self._problems[name] = problem

    async def keep(self, folder: Path) -> None:
        """Calls `bring` at once, after every change, and every `retry_s` while a load fails. Runs until cancelled."""
        while True:
            self._is_changed.clear()
            await self.bring(folder)
            self._is_tried.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._retry_s if self._problems or self._has_failed else None):
                    await self._is_changed.wait()

    async def wait_for_first_try(self, timeout_s: float) -> None:
        """Returns once `keep` has tried each wanted adapter, at the latest after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_tried.wait()
        except TimeoutError:
            logger.warning("adapters are still being loaded after %g s; other requests are served meanwhile", timeout_s)

    def _report(self, name: str, path: str) -> ReportedAdapter:
        if self._adapters.has(name, path):
            return ReportedAdapter(name=name, path=path, state="loaded", commit=self._adapters.commit(name))
        problem = self._problems.get(name, "")
        return ReportedAdapter(name=name, path=path, state="failed" if problem else "loading", message=problem)


def _read(file: Path | None) -> dict[str, str] | None:
    """Returns the list in the file; None if there is no file."""
    if file is None or not file.exists():
        return None
    return msgspec.json.decode(file.read_bytes(), type=dict[str, str])

"""AdapterFiles: brings the files of needed adapters of the hub to a rank's machine, in a thread of its own.

A step reads only files that are already on the machine, because all ranks would wait for a download. A failed attempt
is repeated as long as the adapter is needed: for example, a replacement rank may start on another machine while the hub
cannot be reached.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from rayloom_engine.core.adapter import Adapter, AdapterReport, NeededAdapter
from rayloom_engine.errors import ModelError

logger = logging.getLogger(__name__)

_RETRY_S = 30.0
_MOST_PROBLEM = 300  # characters of a problem in a report


def _fetch(adapter: Adapter, num_bytes: int) -> None:
    # Imported in the thread, because most ranks need no adapter of the hub.
    from rayloom_engine.models.adapters.hub_adapter import fetch

    fetch(adapter, num_bytes)


class AdapterFiles:
    """The needed adapters of a rank, and the reports about them. For any thread."""

    def __init__(self, retry_s: float = _RETRY_S, fetch: Callable[[Adapter, int], None] = _fetch) -> None:
        """`retry_s`: seconds between attempts for an adapter whose files cannot be fetched."""
        self._retry_s = retry_s
        self._fetch = fetch
        self._needed: tuple[NeededAdapter, ...] = ()
        self._reports: dict[int, AdapterReport] = {}  # number -> report
        self._changed = threading.Condition()
        self._has_thread = False

    def need(self, adapters: Sequence[NeededAdapter]) -> None:
        """Sets the needed adapters. Their files are fetched one after the other. Returns at once."""
        with self._changed:
            self._needed = tuple(adapters)
            numbers = {each.number for each in adapters}
            self._reports = {number: report for number, report in self._reports.items() if number in numbers}
            self._changed.notify_all()
            if self._needed and not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, name="adapter-files", daemon=True).start()

    @property
    def reports(self) -> tuple[AdapterReport, ...]:
        """The reports about needed adapters for which an attempt has ended."""
        return tuple(self._reports.copy().values())

    def wait(self, timeout_s: float) -> bool:
        """Waits until each needed adapter has a report. Returns False if that takes longer than `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next(is_retry=False) is None, timeout_s)

    def _next(self, *, is_retry: bool) -> NeededAdapter | None:
        """Returns the first adapter without a report. With `is_retry`, a report of a failure does not count."""
        for needed in self._needed:
            report = self._reports.get(needed.number)
            if report is None or (is_retry and report.problem):
                return needed
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                while (needed := self._next(is_retry=False)) is None:
                    has_failed = self._next(is_retry=True) is not None
                    if not self._changed.wait(self._retry_s if has_failed else None):
                        self._forget_failures()
            report = AdapterReport(needed.number, self._attempt(needed))
            with self._changed:
                if needed in self._needed:
                    self._reports = {**self._reports, needed.number: report}
                self._changed.notify_all()

    def _forget_failures(self) -> None:
        self._reports = {number: report for number, report in self._reports.items() if not report.problem}

    def _attempt(self, needed: NeededAdapter) -> str:
        """Fetches the files of an adapter. Returns why the fetch failed; empty: the files are there."""
        try:
            self._fetch(needed.adapter, needed.num_bytes)
        except (ModelError, OSError) as error:
            logger.warning("cannot fetch an adapter: %s", error)
            return str(error)[:_MOST_PROBLEM]
        except Exception as error:  # the thread must live, because it fetches later adapters, too
            logger.exception("cannot fetch the adapter %s", needed.adapter.path)
            return f"{type(error).__name__}: {error}"[:_MOST_PROBLEM]
        logger.info("the files of adapter %s are there", needed.adapter.path)
        return ""

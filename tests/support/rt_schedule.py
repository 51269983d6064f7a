"""Assigns test files to the processes of a run: the longest files first, the shortest at the end.

In another order, a process might begin a long file when the other processes have nothing left to do. Files that share a
server are one unit, and one process runs a whole unit.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rt_shared import FILES, scope_of

if TYPE_CHECKING:
    import pytest

# file -> seconds in a run with several processes, for files of at least LISTED_S seconds. Only the order of the files
# matters. `-p cpu_by_file --write-seconds` writes this file.
SECONDS = Path(__file__).parents[1] / "data" / "seconds_by_file.json"
LISTED_S = 2.0
MOST_WITH_SERVERS = 2  # number of test processes that may run tests with servers at the same time


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@functools.cache
def seconds_on_file() -> Mapping[str, float]:
    found: Mapping[str, float] = json.loads(SECONDS.read_text())
    return found


def longest_first(nodeids: list[str], seconds: Mapping[str, float]) -> list[int]:
    """The indices of `nodeids` in the order of execution. The order of a unit's tests, and of equal units, is kept.

    `seconds`: file -> seconds. All other files count as shorter.
    """
    of_unit: Counter[str] = Counter()
    place_of_unit: dict[str, int] = {}
    for file in dict.fromkeys(map(file_of, nodeids)):
        of_unit[scope_of(file)] += seconds.get(file, 0.0)
        place_of_unit.setdefault(scope_of(file), len(place_of_unit))
    units = [scope_of(file_of(nodeid)) for nodeid in nodeids]
    return sorted(range(len(nodeids)), key=lambda index: (-of_unit[units[index]], place_of_unit[units[index]]))


def starts_servers(unit: str) -> bool:
    """True if the tests of a unit start whole servers. The processes of a server use more than one core."""
    return unit in FILES or any(folder in unit for folder in ("engine_real/", "tests/docs/"))


def next_unit(waiting: Iterable[str], running: Iterable[str]) -> str:
    """The first waiting unit, if fewer than `MOST_WITH_SERVERS` processes run units with servers.

    Otherwise returns the first waiting unit without servers, or the first unit if all units have servers. `running`:
    the unfinished units of other processes. If many tests ran servers at the same time, the servers would compete for
    the cores.
    """
    units = list(waiting)
    if sum(map(starts_servers, running)) < MOST_WITH_SERVERS:
        return units[0]
    return next((unit for unit in units if not starts_servers(unit)), units[0])


def scheduler(config: pytest.Config, log: Any) -> object:
    """xdist's scheduler of files, in which all files that share a server are one unit."""
    from xdist.scheduler import LoadFileScheduling

    class Units(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(file_of(nodeid))

        def _assign_work_unit(self, node: Any) -> None:
            others = [units for other, units in self.assigned_work.items() if other is not node]
            running = [unit for units in others for unit, is_done in units.items() if not all(is_done.values())]
            self.workqueue.move_to_end(next_unit(self.workqueue, running), last=False)
            super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            """Gives a process its next unit when one test of the last unit is left.

            xdist itself gives the next unit when two tests are left. Then a process with a long test would hold a unit
            that other processes could run. A process begins its last known test only when it has received the next
            test, or the message that there is none.
            """
            if node.shutting_down:
                return
            if not self.workqueue:
                node.shutdown()
            elif self._pending_of(self.assigned_work[node]) <= 1:
                self._assign_work_unit(node)

    return Units(config, log)

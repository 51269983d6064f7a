"""Activity: counts a rank's progress inside a step. The heartbeats (beats) report it, because a live rank may hang.

A model calls its TensorGroup twice in every layer, even without peers, or counts halves of layers itself. So `advance`
grows during a long step, but not during a hung step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from rayloom_engine.parallel.stage_link import StageLink
from rayloom_engine.parallel.tensor_group import TensorGroup

ArrayT = TypeVar("ArrayT")


class Activity:
    """The progress and the waits of the thread that computes. This thread writes them, and other threads read them.

    Use `with activity:` around a wait for a peer.
    """

    def __init__(self, model_progress: Callable[[], int] = lambda: 0) -> None:
        """`model_progress`: returns LoadedPart.progress."""
        self._model_progress = model_progress
        self._num_switches = 0  # number of times that a wait began or ended
        self._earlier = 0  # progress of the model before this epoch
        self.waits = False  # True while this rank waits for a peer
        self.communication_s = 0.0  # total seconds of all waits
        self._since = 0.0

    @property
    def advance(self) -> int:
        """A number that increases when a wait begins and when it ends, and with every half of a layer."""
        return self._num_switches + self._model_progress() - self._earlier

    def report(self) -> None:
        """Increases `advance`. Called while a step waits, with a time limit, for another thread of this process."""
        self._num_switches += 1

    def restart(self) -> None:
        """Sets `advance` back to 0."""
        self._num_switches = 0
        self._earlier = self._model_progress()

    def __enter__(self) -> None:
        self._since = time.perf_counter()
        self._num_switches += 1
        self.waits = True

    def __exit__(self, *_: object) -> None:
        self.waits = False
        self._num_switches += 1
        self.communication_s += time.perf_counter() - self._since


class WatchedGroup(Generic[ArrayT]):
    """Implements TensorGroup: forwards all calls to another group and counts them."""

    def __init__(self, group: TensorGroup[ArrayT], activity: Activity) -> None:
        self._group = group
        self._activity = activity

    def all_reduce(self, part: ArrayT) -> ArrayT:
        with self._activity:
            return self._group.all_reduce(part)

    def gather(self, part: ArrayT) -> ArrayT | None:
        with self._activity:
            return self._group.gather(part)


class WatchedLink(Generic[ArrayT]):
    """Implements StageLink: forwards all calls to another link and counts them."""

    def __init__(self, link: StageLink[ArrayT], activity: Activity) -> None:
        self._link = link
        self._activity = activity

    def receive(self, num_tokens: int) -> ArrayT:
        with self._activity:
            return self._link.receive(num_tokens)

    def send(self, hidden_TD: ArrayT) -> None:
        with self._activity:
            self._link.send(hidden_TD)

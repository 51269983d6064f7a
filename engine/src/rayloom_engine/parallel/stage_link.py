"""StageLink: sends hidden states from one pipeline stage to the next.

Legend: T tokens of the step, D model width.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

ArrayT = TypeVar("ArrayT")  # a torch tensor or a numpy array


class StageLink(Protocol[ArrayT]):
    """A stage's connections to its neighbours. The first stage only sends, the last stage only receives."""

    def receive(self, num_tokens: int) -> ArrayT:
        """Waits for the hidden states [T, D] of the previous stage and returns them. The caller may overwrite them."""

    def send(self, hidden_TD: ArrayT) -> None:
        """Starts to send hidden states to the next stage. May return before they are sent, so do not change them."""

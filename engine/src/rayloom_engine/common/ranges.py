"""Range: the numbers that a setting may have."""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The numbers that a setting may have, including both ends."""

    low: float
    high: float | None = None  # None = no limit
    is_whole: bool = False  # integers only

    @property
    def words(self) -> str:
        """The range in words, for messages and docs."""
        if self.high is None:
            return f"at least {_number(self.low)}"
        return f"from {_number(self.low)} to {_number(self.high)}"

    def check(self, name: str, value: object) -> None:
        """Raises RequestError that names the setting if `value` is not a number in this range."""
        if not isinstance(value, int if self.is_whole else (int, float)) or isinstance(value, bool):
            kind = "an integer" if self.is_whole else "a number"
            raise RequestError(f"{name} must be {kind}, given {shown(value)}", name)
        assert isinstance(value, int | float)
        # The value is compared with 1e300 instead of infinity: a huge int is finite, but too large for a float.
        if not -1e300 < value < 1e300 or value < self.low or (self.high is not None and value > self.high):
            raise RequestError(f"{name} must be {self.words}, given {shown(value)}", name)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"

"""Shows the engine's start-up phases: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Never, Protocol, TextIO

from tqdm import tqdm

from rayloom_operator.engine_status import Phase

_SPINNER = "|/-\\"
_QUARTERS = 4


class StartupDisplay(Protocol):
    def update(self, phases: tuple[Phase, ...]) -> None:
        """Shows the phases as they are now; called several times a second."""

    def close(self) -> None:
        """Leaves what was shown on the screen and the cursor below it."""


def startup_display(stream: TextIO) -> StartupDisplay:
    """Bars when `stream` is a terminal, plain lines otherwise."""
    return BarDisplay(stream) if stream.isatty() else LineDisplay(stream)


class BarDisplay:
    """One bar per phase, in the order in which the phases appear."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bars: list[tqdm[Never]] = []
        self._finished: set[int] = set()  # indices of bars that were shown complete
        self._num_updates = 0

    def update(self, phases: tuple[Phase, ...]) -> None:
        self._num_updates += 1
        for index, phase in enumerate(phases):
            if index == len(self._bars):
                self._bars.append(tqdm(file=self._stream, position=index, leave=True, total=0, bar_format="{desc}"))
            if index not in self._finished:
                self._show(self._bars[index], phase)
            if phase.finished:
                self._finished.add(index)

    def close(self) -> None:
        for bar in self._bars:
            bar.close()

    def _show(self, bar: tqdm[Never], phase: Phase) -> None:
        # The engine may be too busy to count the seconds of a phase that is not over.
        seconds = phase.seconds if phase.finished else max(phase.seconds, bar.format_dict["elapsed"])
        if phase.total > 0:
            bar.bar_format = "{desc}: {percentage:3.0f}% |{bar:30}| {n_fmt}/{total_fmt}{postfix}"
            bar.total = phase.total
            bar.n = phase.total if phase.finished else phase.done
            bar.unit_scale = is_bytes(phase)
            bar.set_postfix_str(f"{seconds:.1f} s", refresh=False)
        else:
            # Nothing to count, so only the turning sign and the seconds show that it goes on.
            sign = "done" if phase.finished else _SPINNER[self._num_updates % len(_SPINNER)]
            bar.bar_format = f"{{desc}}: {sign} {seconds:.1f} s"
        bar.set_description_str(f"{label(phase):<10}", refresh=False)
        bar.refresh()


class LineDisplay:
    """A line when a phase begins, at each quarter of what can be counted, and when it ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._quarters_shown: dict[str, int] = {}
        self._finished: set[str] = set()

    def update(self, phases: tuple[Phase, ...]) -> None:
        for phase in phases:
            if phase.name in self._finished:
                continue
            quarter = phase.done * _QUARTERS // phase.total if phase.total > 0 else 0
            if phase.finished:
                self._finished.add(phase.name)
            elif quarter <= self._quarters_shown.get(phase.name, -1):
                continue
            self._quarters_shown[phase.name] = quarter
            print(phase_line(phase), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is open: every line was written in full."""


def phase_line(phase: Phase) -> str:
    """One line about a phase: `load: 135.0 of 270.0 MB`, `load: done in 1.2 s (270.0 MB)`."""
    amount = _amount(phase)
    if phase.finished:
        return f"{label(phase)}: done in {phase.seconds:.1f} s" + (f" ({amount})" if amount else "")
    return f"{label(phase)}: {amount}" if amount else f"{label(phase)} ..."


def label(phase: Phase) -> str:
    """The phase's name as a reader sees it."""
    return phase.name.replace("_", " ")


def is_bytes(phase: Phase) -> bool:
    """Whether the phase counts bytes, which are shown with a unit prefix."""
    return phase.unit in ("B", "byte", "bytes")


def _amount(phase: Phase) -> str:
    if phase.total <= 0:
        return ""
    scale, unit = (1e6, "MB") if is_bytes(phase) else (1, phase.unit)
    digits = 1 if is_bytes(phase) else 0
    total = f"{phase.total / scale:.{digits}f} {unit}".rstrip()
    return total if phase.finished else f"{phase.done / scale:.{digits}f} of {total}"

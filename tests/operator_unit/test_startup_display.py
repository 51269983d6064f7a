import io

import pytest

from rayloom_operator.engines.status import Phase
from rayloom_operator.local.display import StartupDisplay, phase_line


def phase(name="load", done=0, total=0, unit="", finished=False, seconds=1.25):
    return Phase(name=name, seconds=seconds, done=done, total=total, unit=unit, finished=finished)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (phase("kv_cache"), "kv cache ..."),
        (phase("kv_cache", finished=True), "kv cache: done in 1.2 s"),
        (phase(done=135_000_000, total=270_000_000, unit="bytes"), "load: 135.0 of 270.0 MB"),
        (phase(done=270_000_000, total=270_000_000, unit="B", finished=True), "load: done in 1.2 s (270.0 MB)"),
        (phase("convert", done=3, total=30, unit="tensors"), "convert: 3 of 30 tensors"),
    ],
)
def test_a_line_has_the_amount_and_at_the_end_the_seconds(given, line):
    assert phase_line(given) == line


def test_lines_are_printed_only_at_quarters_and_at_the_end():
    stream = io.StringIO()
    display = StartupDisplay(stream)
    for done in range(0, 101, 10):
        display.update((phase(done=done, total=100, unit="tensors"),))
    display.update((phase(done=100, total=100, unit="tensors", finished=True), phase("warm_up")))
    display.update((phase(done=100, total=100, unit="tensors", finished=True), phase("warm_up")))

    assert stream.getvalue().splitlines() == [
        "load: 0 of 100 tensors",
        "load: 30 of 100 tensors",
        "load: 50 of 100 tensors",
        "load: 80 of 100 tensors",
        "load: 100 of 100 tensors",
        "load: done in 1.2 s (100 tensors)",
        "warm up ...",
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_each_phase_has_a_line_that_is_redrawn():
    stream = Terminal()
    display = StartupDisplay(stream)
    display.update((phase("import"),))
    display.update((phase("import", finished=True), phase(done=135_000_000, total=270_000_000, unit="bytes")))

    assert stream.getvalue() == (
        "\r\x1b[Kimport    : 1.2 s\n"
        "\x1b[1A"
        "\r\x1b[Kimport    : done in 1.2 s\n"
        "\r\x1b[Kload      :  50% |##########          | 135.0 of 270.0 MB, 1.2 s\n"
    )

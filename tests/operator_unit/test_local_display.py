"""The start-up of several local processes, on a terminal and in a file."""

import io

from rayloom_operator.engines.status import EngineStatus, Phase
from rayloom_operator.local.display import StartupDisplay


class Terminal(io.StringIO):
    def isatty(self):
        return True


def status(state, *phases):
    return EngineStatus(state=state, reason="", startup=phases, model=None, last_token_age_seconds=None, ranks=())


IMPORTED = Phase(name="import", seconds=0.5, done=0, total=0, unit="", finished=True)


def load(done):
    return Phase(name="load", seconds=0.2, done=done, total=100_000_000, unit="bytes", finished=done == 100_000_000)


def test_in_a_file_each_line_names_its_process_and_comes_once():
    file = io.StringIO()
    display = StartupDisplay(file)
    display.update_all({"engine-0": None, "engine-1": status("starting", IMPORTED), "gateway": None})
    display.update_all({"engine-0": status("starting", IMPORTED), "engine-1": status("starting", IMPORTED, load(0))})
    for _ in range(2):
        done = status("serving", IMPORTED, load(100_000_000))
        display.update_all({"engine-0": status("starting", IMPORTED), "engine-1": done, "gateway": status("serving")})

    assert file.getvalue().splitlines() == [
        "engine-1: import: done in 0.5 s",
        "engine-0: import: done in 0.5 s",
        "engine-1: load: 0.0 of 100.0 MB",
        "engine-1: load: done in 0.2 s (100.0 MB)",
        "engine-1: serving",
        "gateway: serving",
    ]


def test_on_a_terminal_each_process_has_one_line_which_is_redrawn():
    terminal = Terminal()
    display = StartupDisplay(terminal)
    display.update_all({"engine-0": None, "gateway": None})
    first = terminal.getvalue()
    display.update_all({"engine-0": status("starting", IMPORTED, load(50_000_000)), "gateway": status("recovering")})
    second = terminal.getvalue().removeprefix(first)

    assert first == "\r\x1b[Kengine-0  starting\n\r\x1b[Kgateway  starting\n"
    assert second == (
        "\x1b[2A\r\x1b[Kengine-0  load      :  50% |##########          | 50.0 of 100.0 MB, 0.2 s\n"
        "\r\x1b[Kgateway  recovering\n"
    )

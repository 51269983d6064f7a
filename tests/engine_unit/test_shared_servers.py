"""Servers that several test files use start once, and end with the last file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rt_shared import FILES, SharedServer, scope_of

FIRST, SECOND = (Path(f"tests/engine_real/{name}.py") for name in ("test_tools", "test_repeats"))
OTHER = Path("tests/engine_real/test_page.py")


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def shared(events: list[str]) -> SharedServer:
    @contextlib.contextmanager
    def start() -> Iterator[Any]:
        events.append("start")
        yield "the server"
        events.append("end")

    return SharedServer("server", start, [FIRST, SECOND, OTHER])


def use(shared: SharedServer, file: Path) -> object:
    with shared.used_by(file) as running:
        return running


def test_a_server_starts_once_and_ends_with_the_last_of_its_files(shared: SharedServer, events: list[str]) -> None:
    assert events == []
    assert use(shared, FIRST) == "the server"
    assert events == ["start"]
    assert use(shared, SECOND) == "the server"
    assert events == ["start", "end"]
    shared.close()
    assert events == ["start", "end"]


def test_a_server_ends_with_the_run_when_a_file_did_not_use_it(shared: SharedServer, events: list[str]) -> None:
    use(shared, SECOND)
    shared.close()
    assert events == ["start", "end"]


def test_a_file_that_is_not_listed_is_refused(shared: SharedServer) -> None:
    with pytest.raises(AssertionError, match="name test_page in FILES"):
        use(shared, OTHER)


def test_the_files_of_a_server_have_one_scope_and_any_other_file_its_own() -> None:
    scopes = {name: {scope_of(f"tests/engine_real/{file}.py") for file in files} for name, files in FILES.items()}
    assert scopes == {name: {name} for name in FILES}
    assert scope_of(str(OTHER)) == str(OTHER)


def test_the_listed_files_are_there() -> None:
    folder = Path(__file__).parents[1] / "engine_real"
    assert [file for files in FILES.values() for file in files if not (folder / f"{file}.py").exists()] == []

"""API keys: their file and variable, changes while the engine runs, and the headers of requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rayloom_engine.errors import ConfigError
from rayloom_engine.front.http.api_keys import MAX_FILE_BYTES, ApiKeys
from rt_front import FrontUnderTest, running_front


def test_they_come_from_file_and_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a\n\n b \n")
    assert ApiKeys.load(str(path), {"RAYLOOM_API_KEYS": "c, d,"}).accepted == (b"c", b"d", b"a", b"b")
    assert ApiKeys.load(None, {}).accepted == ()
    path.write_text("\n")
    with pytest.raises(ConfigError, match="has no key"):
        ApiKeys.load(str(path), {})
    with pytest.raises(ConfigError, match="cannot read"):
        ApiKeys.load(str(tmp_path / "none"), {})


@pytest.mark.parametrize("given", ["", " , ", ","])
def test_a_variable_without_a_key_is_refused(tmp_path: Path, given: str) -> None:
    path = tmp_path / "keys"
    path.write_text("a\n")
    for file in (None, str(path)):
        with pytest.raises(ConfigError, match="RAYLOOM_API_KEYS is set, but has no key, so everybody"):
            ApiKeys.load(file, {"RAYLOOM_API_KEYS": given})


def test_a_mounted_secret_changes_by_a_swapped_link(tmp_path: Path) -> None:
    for version, content in (("1", "old\nkept\n"), ("2", "kept\nnew\n")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys").write_text(content)
    (tmp_path / "..data").symlink_to("1")
    (tmp_path / "keys").symlink_to("..data/keys")
    keys = ApiKeys(["fixed"], tmp_path / "keys")
    changes: list[int] = []
    keys.on_change = lambda: changes.append(len(keys.accepted))
    asyncio.run(keys.refresh())
    assert (keys.accepted, changes) == ((b"fixed", b"old", b"kept"), [])
    (tmp_path / "..new").symlink_to("2")
    (tmp_path / "..new").replace(tmp_path / "..data")
    asyncio.run(keys.refresh())
    assert (keys.accepted, changes) == ((b"fixed", b"kept", b"new"), [3])
    assert [keys.knows(key) for key in (b"old", b"kept", b"new", b"fixed", b"")] == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b" \n", "has no key"),
        (b"\xff\n", "cannot read"),
        (b"x" * (MAX_FILE_BYTES + 1), "has more than 1048576 bytes"),
        (None, "cannot read"),
    ],
    ids=["empty", "not UTF-8", "too large", "gone"],
)
def test_a_file_that_cannot_be_used_keeps_the_keys(
    tmp_path: Path, content: bytes | None, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("a\n")
    keys = ApiKeys((), path)
    problems: list[str] = []
    keys.on_change = lambda: problems.append(keys.problem)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            asyncio.run(keys.refresh())
    assert keys.accepted == (b"a",)
    assert len(problems) == 1
    assert problem in problems[0]
    assert [record.message for record in caplog.records] == [f"{problems[0]}; the keys read before it stay in force"]
    path.write_text("b\n")
    asyncio.run(keys.refresh())
    assert (keys.accepted, keys.problem, problems[1:]) == ((b"b",), "", [""])


def test_an_empty_file_that_comes_back_as_it_was_is_no_problem_any_more(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a\n")
    keys = ApiKeys((), path)
    path.write_text("")
    asyncio.run(keys.refresh())
    path.write_text("a\n")
    asyncio.run(keys.refresh())
    assert (keys.accepted, keys.problem) == ((b"a",), "")


def test_the_file_is_read_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a\n")

    async def scenario() -> None:
        keys = ApiKeys((), path)
        is_changed = asyncio.Event()
        keys.on_change = is_changed.set
        watching = asyncio.create_task(keys.watch(poll_s=0.01))
        path.write_text("b\n")
        async with asyncio.timeout(60.0):
            await is_changed.wait()
        assert keys.accepted == (b"b",)
        watching.cancel()
        await ApiKeys(["a"]).watch()  # nothing to watch

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontUnderTest]:
    with running_front(tmp_path_factory.mktemp("front"), api_keys=("s3cret",)) as front:
        yield front


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer s3cret"}, 200),
        ({"X-Api-Key": "s3cret"}, 200),
        ({"X-Api-Key": "s3cret", "Authorization": "Basic abc"}, 200),
        ({"X-Api-Key": "s3cret", "Authorization": "Bearer other"}, 401),
        ({"X-Api-Key": "other"}, 401),
        ({"X-Api-Key": ""}, 401),
        ({"X-Api-Key": "Bearer s3cret"}, 401),
        ({}, 401),
    ],
)
def test_a_key_comes_as_bearer_token_or_in_x_api_key(
    front: FrontUnderTest, headers: dict[str, str], status: int
) -> None:
    answer = httpx.get(f"{front.api_url}/v1/models", headers=headers)
    assert answer.status_code == status
    if status == 401:
        expected = "no valid API key; send one as `Authorization: Bearer KEY` or `X-Api-Key: KEY`"
        assert answer.json()["error"]["message"] == expected

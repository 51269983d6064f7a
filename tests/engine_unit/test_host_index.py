"""The index of copies of KV blocks, in a file that outlives the core.

Closing a file stands for the death of its process: the system closes the files of a dead process, which ends its lock.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rayloom_engine.core.host_tier import HostTier
from rayloom_engine.core_server import host_index
from rayloom_engine.core_server.host_index import HostIndex, begin_host_epoch
from rayloom_engine.kv import host_file
from rayloom_engine.kv.host_file import HostFile

TOKEN = "a token of an engine"


@pytest.fixture
def shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of HostIndex's files, instead of /dev/shm."""

    def open_there(name: str | None, purpose: str, num_bytes: int) -> HostFile:
        return HostFile.open(name, purpose, num_bytes, tmp_path)

    class Here(HostFile):
        open = staticmethod(open_there)  # type: ignore[assignment]

    monkeypatch.setattr(host_index, "HostFile", Here)
    return tmp_path


def test_an_index_has_the_entries_that_its_predecessor_kept(shared_folder: Path) -> None:
    first = HostIndex(TOKEN, ("a", "b"), 4)
    assert first.entries() == []
    first.keep(1, bytes(16))
    first.keep(3, b"x" * 16)
    first.keep(2, b"y" * 16)
    first.drop(2)
    first.close()
    second = HostIndex(TOKEN, ("a", "b"), 4)
    assert second.entries() == [(1, bytes(16)), (3, b"x" * 16)]
    second.close()
    other = HostIndex(TOKEN, ("a", "c"), 4)
    assert other.entries() == [], "the second rank has other memory"
    other.close()


def test_a_half_written_entry_is_none(shared_folder: Path) -> None:
    index = HostIndex(TOKEN, ("a",), 2)
    index.keep(0, b"x" * 16)
    index._file.memory[15] = 0
    assert index.entries() == []
    index.close()


def _stored(tier: HostTier, content: bytes) -> None:
    copy = tier.slots.try_add(content, None)
    assert copy is not None
    tier.slots.stored(copy)


def test_a_new_core_finds_the_copies_of_the_old_one(shared_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = HostTier(4, 16)
    begin_host_epoch(old, ("a",), TOKEN)
    _stored(old, b"x" * 16)
    saved_index = old.slots.saved_index
    assert isinstance(saved_index, HostIndex)
    saved_index.close()
    new = HostTier(4, 16)
    with caplog.at_level(logging.INFO):
        begin_host_epoch(new, ("a",), TOKEN)
    assert new.slots.shareable_contents() == [b"x" * 16]
    assert "found copies of 1 KV blocks" in caplog.text


def test_copies_survive_an_epoch_with_the_same_memory_and_no_other(
    shared_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = HostTier(4, 16)
    begin_host_epoch(tier, ("a", "b"), TOKEN)
    _stored(tier, b"x" * 16)
    begin_host_epoch(tier, ("a", "b"), TOKEN)
    assert tier.slots.num_used == 1
    begin_host_epoch(tier, ("a", "c"), TOKEN)
    assert tier.slots.num_used == 0 and "a rank has other host memory than before" in caplog.text
    _stored(tier, b"x" * 16)
    begin_host_epoch(tier, ("a", ""), TOKEN)
    assert tier.slots.num_used == 0 and not tier.is_usable and "a rank has no host memory" in caplog.text


def test_a_core_does_not_wait_for_its_own_lock_when_the_memory_changes(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(host_file, "sleep", waits.append)
    tier = HostTier(4, 16)
    begin_host_epoch(tier, ("a",), TOKEN)
    begin_host_epoch(tier, ("b",), TOKEN)
    assert waits == []


def test_a_core_that_starts_with_a_rank_without_memory_says_so(caplog: pytest.LogCaptureFixture) -> None:
    begin_host_epoch(None, ("", ""), TOKEN)
    assert caplog.text == "", "copies are off"
    begin_host_epoch(None, ("a", ""), TOKEN)
    assert "so this core makes none" in caplog.text

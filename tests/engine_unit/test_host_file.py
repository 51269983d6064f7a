"""Files with copies of KV blocks, which outlive their process.

Closing a file stands for the death of its process: the system closes the files of a dead process, which ends its lock.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path

import psutil
import pytest

from rayloom_engine.errors import ConfigError
from rayloom_engine.kv import host_file
from rayloom_engine.kv.host_file import (
    SUPERVISOR,
    HostFile,
    allocated_bytes,
    file_name,
    remove_files,
    remove_stale_files,
    seconds_to_room,
)
from rayloom_engine.kv.host_plan import num_host_slots

TOKEN = "a token of an engine"
NAME = file_name(TOKEN, "rank0")
SIZE = 10_000


def make_file(folder: Path, purpose: str = "model", num_bytes: int = SIZE) -> HostFile:
    return HostFile.open(NAME, purpose, num_bytes, folder)


def age(path: Path, seconds: float = 3600.0) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_the_next_process_finds_what_the_first_has_written(tmp_path: Path) -> None:
    first = make_file(tmp_path)
    assert bytes(first.memory) == bytes(SIZE)
    first.memory[SIZE - 3 :] = b"abc"
    first.close()
    second = make_file(tmp_path)
    assert second.id == first.id
    assert bytes(second.memory[SIZE - 3 :]) == b"abc"
    second.close()


def test_the_file_is_private_and_its_name_does_not_tell_the_token(tmp_path: Path) -> None:
    file = make_file(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.name.startswith("rayloom-kv-") and TOKEN not in path.name
    file.close()


@pytest.mark.parametrize(("purpose", "num_bytes"), [("another model", SIZE), ("model", SIZE + 1)])
def test_a_file_for_another_purpose_or_of_another_size_is_replaced(
    purpose: str, num_bytes: int, tmp_path: Path
) -> None:
    first = make_file(tmp_path)
    first.memory[0] = 1
    first.close()
    second = make_file(tmp_path, purpose, num_bytes)
    assert second.id != first.id
    assert bytes(second.memory) == bytes(num_bytes)
    assert len(list(tmp_path.iterdir())) == 1
    second.close()


def test_a_file_that_another_process_still_uses_is_replaced_and_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_file, "_LOCK_SECONDS", 0.0)
    first = make_file(tmp_path)
    second = make_file(tmp_path)
    first.memory[0] = 1
    assert second.id != first.id and second.memory[0] == 0
    first.remove()
    assert len(list(tmp_path.iterdir())) == 1, "the name belongs to the second file"
    second.close()


def test_a_process_waits_for_the_lock_of_a_predecessor_that_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_file(tmp_path)
    waits = []

    def die(seconds: float) -> None:
        waits.append(seconds)
        first.close()

    monkeypatch.setattr(host_file, "sleep", die)
    second = make_file(tmp_path)
    assert second.id == first.id and len(waits) == 1
    second.close()


def test_memory_without_a_name_is_allocated_at_once(tmp_path: Path) -> None:
    before = psutil.Process().memory_info().rss
    file = HostFile.open(None, "model", 64 << 20, tmp_path)
    assert psutil.Process().memory_info().rss - before > 50 << 20
    file.close()


def test_a_file_without_a_whole_header_is_replaced(tmp_path: Path) -> None:
    first = make_file(tmp_path)
    first.close()
    (path,) = tmp_path.iterdir()
    with path.open("r+b") as file:
        file.seek(20)
        file.write(bytes(4000))
    second = make_file(tmp_path)
    assert second.id != first.id
    second.close()


def test_a_file_that_others_may_read_and_a_link_are_replaced(tmp_path: Path) -> None:
    first = make_file(tmp_path)
    first.close()
    path = tmp_path / NAME
    path.chmod(0o644)
    second = make_file(tmp_path)
    assert second.id != first.id and path.stat().st_mode & 0o777 == 0o600
    second.close()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    third = make_file(tmp_path)
    assert third.id != second.id and not path.is_symlink()
    third.close()


def test_without_a_name_the_memory_ends_with_the_process(tmp_path: Path) -> None:
    file = HostFile.open(None, "model", SIZE, tmp_path)
    assert file.memory.nbytes == SIZE and file.id
    assert list(tmp_path.iterdir()) == []
    file.remove()


def test_memory_that_cannot_be_allocated_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        make_file(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_mapped_is_removed_because_its_user_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_file(tmp_path).close()

    def refuse(descriptor: int, num_bytes: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    num_open = psutil.Process().num_fds()
    monkeypatch.setattr(host_file.mmap, "mmap", refuse)
    with pytest.raises(OSError, match="Cannot allocate"):
        make_file(tmp_path)
    assert list(tmp_path.iterdir()) == [] and psutil.Process().num_fds() == num_open


@pytest.mark.parametrize("removes", [False, True])
def test_an_engine_that_looks_for_stale_files_does_not_disturb_one_that_makes_a_file(
    removes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = os.open
    path = tmp_path / NAME
    waits: list[float] = []
    looking: list[int] = []

    def create_and_look(new: object, flags: int, *mode: int) -> int:
        descriptor = create(new, flags, *mode)
        if flags & os.O_CREAT and not waits:
            looking.append(host_file._locked(path))
            if removes:
                path.unlink()
                os.close(looking.pop())
        return descriptor

    def end_look(seconds: float) -> None:
        waits.append(seconds)
        for found in looking:
            os.close(found)

    monkeypatch.setattr(os, "open", create_and_look)
    monkeypatch.setattr(host_file, "sleep", end_look)
    file = make_file(tmp_path)
    assert len(waits) == 1 and allocated_bytes(TOKEN, tmp_path) > SIZE
    file.close()


def test_a_stale_file_that_another_engine_removes_first_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_file(tmp_path).close()
    path = tmp_path / NAME
    age(path)
    unlink, num_open = Path.unlink, psutil.Process().num_fds()

    def unlink_twice(self: Path) -> None:
        unlink(self)
        unlink(self)

    monkeypatch.setattr(Path, "unlink", unlink_twice)
    assert remove_stale_files(tmp_path) == 0
    assert psutil.Process().num_fds() == num_open


def test_a_file_of_the_future_does_not_stop_an_engine_that_needs_room(tmp_path: Path) -> None:
    make_file(tmp_path).close()
    age(tmp_path / NAME, -86400.0)
    assert seconds_to_room("another", tmp_path) == 75.0


def test_a_file_that_was_removed_before_it_is_locked_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_file(tmp_path)
    first.close()
    lock = host_file._lock

    def remove_and_lock(descriptor: int, path: Path) -> None:
        monkeypatch.setattr(host_file, "_lock", lock)
        path.unlink()  # an engine that removes stale files was faster
        lock(descriptor, path)

    monkeypatch.setattr(host_file, "_lock", remove_and_lock)
    second = make_file(tmp_path)
    assert second.id != first.id and (tmp_path / NAME).exists()
    second.close()


def test_files_of_killed_engines_are_removed_when_a_file_is_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    used = HostFile.open(file_name("used", "rank0"), "", SIZE, tmp_path)
    for token in ("left behind", "just killed"):
        HostFile.open(file_name(token, "rank0"), "", SIZE, tmp_path).close()
    foreign = tmp_path / "rayloom-something"
    foreign.touch()
    left = tmp_path / file_name("left behind", "rank0")
    for path in (left, foreign, tmp_path / file_name("used", "rank0")):
        age(path)
    with caplog.at_level(logging.INFO):
        make_file(tmp_path).close()
    assert not left.exists()
    kept = {file_name("used", "rank0"), file_name("just killed", "rank0"), foreign.name, NAME}
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert caplog.text.count("has left behind") == 1
    used.close()


def test_files_beside_that_of_a_killed_supervisor_are_removed_whatever_their_age(tmp_path: Path) -> None:
    def make(owner: str) -> HostFile:
        return HostFile.open(file_name("old", owner), "", 0 if owner == SUPERVISOR else SIZE, tmp_path)

    supervisor = make(SUPERVISOR)
    make("rank0").close()
    age(tmp_path / file_name("old", "rank0"))
    make_file(tmp_path).close()
    assert (tmp_path / file_name("old", "rank0")).exists(), "a living engine starts this rank again"
    dying = make("rank1")
    supervisor.close()
    remove_stale_files(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {NAME, file_name("old", "rank1")}
    dying.close()


def test_a_file_in_use_does_not_grow_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_file, "_RENEW_SECONDS", 0.01)
    file = make_file(tmp_path)
    path = tmp_path / NAME
    age(path)
    deadline = time.monotonic() + 10.0
    while time.time() - path.stat().st_mtime > 60.0:
        assert time.monotonic() < deadline, "nothing renewed the age"
        os.sched_yield()
    file.close()
    remove_stale_files(tmp_path)
    assert path.exists()


def test_an_engine_removes_its_files_alone(tmp_path: Path) -> None:
    make_file(tmp_path).close()
    HostFile.open(file_name(TOKEN, "index"), "", SIZE, tmp_path).close()
    HostFile.open(file_name("another", "rank0"), "", SIZE, tmp_path).close()
    assert allocated_bytes(TOKEN, tmp_path) >= 2 * SIZE
    assert allocated_bytes(None, tmp_path) >= allocated_bytes(TOKEN, tmp_path) + SIZE
    remove_files(TOKEN, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file_name("another", "rank0")]
    assert allocated_bytes(TOKEN, tmp_path) == 0


def test_the_number_of_slots_is_what_fits_into_the_bytes() -> None:
    assert num_host_slots(900, 300, free_bytes=1000) == 3
    # Each of two ranks may take half; the first has allocated its memory already.
    assert num_host_slots(600, 300, free_bytes=670, allocated_bytes=600, ranks_on_host=2) == 2
    # Ranks that replace others find the memory allocated, and need no more.
    assert num_host_slots(600, 300, free_bytes=0, allocated_bytes=1200, ranks_on_host=2) == 2


def test_a_tenth_of_the_free_memory_is_kept() -> None:
    with pytest.raises(ConfigError, match="a tenth of the free memory is kept"):
        num_host_slots(901, 300, free_bytes=1000)


def test_bytes_without_a_block_and_bytes_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"299 bytes hold no KV block.* 300 bytes; give at least as many, or 0"):
        num_host_slots(299, 300, free_bytes=10**6)
    gib = 1 << 30
    with pytest.raises(
        ConfigError, match=r"3\.00 GiB for each rank, .* \(2, of all engines\) .* at most 2\.75 GiB each"
    ):
        num_host_slots(3 * gib, 300, free_bytes=5 * gib, allocated_bytes=gib, ranks_on_host=2)

"""Limits on cores and memory from cgroups of both versions, in folders made for the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayloom_engine.worker import machine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "_cgroup_folders", lambda controller: iter([tmp_path]))
    return tmp_path


def test_a_quota_of_version_2_bounds_the_cores(folder: Path) -> None:
    (folder / "cpu.max").write_text("150000 100000\n")
    assert machine.usable_cores() == 1


def test_a_quota_of_version_1_bounds_the_cores(folder: Path) -> None:
    (folder / "cpu.cfs_quota_us").write_text("50000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.usable_cores() == 1


def test_no_quota_leaves_every_core(folder: Path) -> None:
    unlimited = machine.usable_cores()
    (folder / "cpu.max").write_text("max 100000\n")
    assert machine.usable_cores() == unlimited >= 1


@pytest.mark.parametrize(
    ("limit", "used", "inactive"),
    [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_memory_limit_counts_and_idle_page_cache_does_not(folder: Path, limit: str, used: str, inactive: str) -> None:
    (folder / limit).write_text("1000000\n")
    (folder / used).write_text("700000\n")
    (folder / "memory.stat").write_text(f"active_file 5\n{inactive} 200000\n")
    assert machine.free_memory_bytes() == 500_000


def test_without_a_memory_limit_the_machines_memory_counts(folder: Path) -> None:
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (folder / "memory.usage_in_bytes").write_text("700000\n")
    assert machine.free_memory_bytes() > 1_000_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 31\noom 3\noom_kill 2\noom_group_kill 0\n"),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
    ],
)
def test_processes_killed_for_want_of_memory_are_counted(folder: Path, name: str, content: str) -> None:
    assert machine.num_oom_kills() == 0
    (folder / name).write_text(content)
    assert machine.num_oom_kills() == 2


@pytest.mark.parametrize(
    ("setting", "num_present", "devices"),
    [
        (None, 0, []),
        (None, 2, ["0", "1"]),
        ("3, GPU-12", 4, ["3", "GPU-12"]),
        ("", 4, []),
        ("0,1", 0, []),  # set for machines that have GPUs
    ],
)
def test_visible_devices(
    setting: str | None, num_present: int, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    monkeypatch.setattr(machine.glob, "glob", lambda pattern: ["/dev/nvidia0"] * num_present)
    assert machine.visible_devices() == devices

"""The files of the run folder that outlive a core."""

from __future__ import annotations

from pathlib import Path

from rayloom_engine.core.step import FIRST_EPOCH
from rayloom_engine.core_server.run_folder import RunFolder


def test_each_epoch_is_new_also_for_the_next_core(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert [folder.draw_epoch() for _ in range(11)] == list(range(FIRST_EPOCH, FIRST_EPOCH + 11))
    assert RunFolder(tmp_path).draw_epoch() == FIRST_EPOCH + 11


def test_an_epoch_needs_no_new_file_so_that_a_full_disk_stops_no_recovery(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.draw_epoch()
    (tmp_path / "epoch.new").symlink_to("/dev/full")  # each write to a new file fails
    assert folder.draw_epoch() == FIRST_EPOCH + 1
    assert RunFolder(tmp_path).draw_epoch() == FIRST_EPOCH + 2

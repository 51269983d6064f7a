"""The cause of a failure in the run folder, which becomes the container's termination message."""

from __future__ import annotations

from pathlib import Path

from rayloom_engine.common.process import forget_failure, read_failure, write_failure


def test_a_failure_of_the_core_is_forgotten_once_the_engine_serves(tmp_path: Path) -> None:
    assert read_failure(tmp_path) == ""
    write_failure(tmp_path, "rank 1 died 5 times")
    assert read_failure(tmp_path) == "rank 1 died 5 times"
    forget_failure(tmp_path)
    assert read_failure(tmp_path) == ""


def test_a_front_that_gave_up_keeps_its_cause_when_the_core_begins_to_serve(tmp_path: Path) -> None:
    write_failure(tmp_path, "rank 1 died 5 times")
    write_failure(tmp_path, "there is no tokenizer.json", by="front")
    forget_failure(tmp_path)
    assert read_failure(tmp_path) == "there is no tokenizer.json"


def test_a_full_disk_does_not_replace_the_exit_code_of_a_failure(tmp_path: Path) -> None:
    (tmp_path / "failure").symlink_to("/dev/full")
    write_failure(tmp_path, "rank 1 died 5 times")


def test_an_empty_file_of_a_front_on_a_full_disk_does_not_hide_the_cause_of_the_core(tmp_path: Path) -> None:
    write_failure(tmp_path, "rank 1 died 5 times")
    write_failure(tmp_path, "", by="front")
    assert read_failure(tmp_path) == "rank 1 died 5 times"

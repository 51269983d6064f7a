"""Packages of a virtual environment that another checkout links from the cache."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import installed_packages
from installed_packages import INCOMPLETE, MOST_KEPT, restore, store


def _environment(folder: Path) -> Path:
    """Makes an environment with a package, a script that uses it, and files that belong to this environment alone."""
    venv = folder / "first" / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    packages = _packages(venv)
    (packages / "thing").mkdir()
    (packages / "thing" / "__init__.py").write_text("WORD = 'found'\n")
    (packages / "thing" / "bin").mkdir()
    (packages / "thing" / "bin" / "python-tool").write_text("belongs to the package")
    (packages / "__editable__.rayloom_engine-0.1.0.pth").write_text(str(folder))
    (packages / "rayloom_engine-0.1.0.dist-info").mkdir()
    script = venv / "bin" / "tool"
    script.write_text(f"#!{venv}/bin/python\nimport sys, thing\nprint(thing.WORD, sys.prefix)\n")
    script.chmod(0o755)
    (venv / "bin" / "rayloom-engine").write_text("")
    (venv / "installed-1").touch()
    return venv


def _packages(venv: Path) -> Path:
    [packages] = venv.glob("lib/python3*/site-packages")
    return packages


def test_another_checkout_links_the_packages_and_has_scripts_of_its_own(tmp_path: Path) -> None:
    first, second = _environment(tmp_path), tmp_path / "second" / ".venv"
    store(first, tmp_path / "cache" / "pins")
    restore(second, tmp_path / "cache" / "pins")

    done = subprocess.run([second / "bin" / "tool"], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["found", str(second)]
    for name in ("thing/__init__.py", "thing/bin/python-tool"):
        assert (_packages(second) / name).samefile(_packages(first) / name)
    assert not list(_packages(second).glob("*rayloom*"))
    assert not (second / "bin" / "rayloom-engine").exists()
    assert not (second / "installed-1").exists()
    assert str(first) in (first / "bin" / "tool").read_text(), "the first environment keeps its script"


def test_a_cache_on_another_file_system_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    venv = _environment(tmp_path)
    store(venv, tmp_path / "cache" / f"pins-{installed_packages._python()}")

    def check(kept: Path, venv: Path) -> None:
        raise OSError(errno.EXDEV, "the cache is on another file system")

    monkeypatch.setattr(installed_packages, "_check_device", check)
    for action in ("store", "restore"):
        monkeypatch.setattr(sys, "argv", ["installed_packages.py", action, str(venv), str(tmp_path / "cache"), "pins"])
        assert installed_packages.main() == 1
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert (_packages(venv) / "thing").is_dir()


def test_the_newest_environments_are_kept(tmp_path: Path) -> None:
    venv = _environment(tmp_path)
    for number in range(MOST_KEPT + 1):
        kept = tmp_path / "cache" / str(number)
        store(venv, kept)
        os.utime(kept, (number, number))
    assert {each.name for each in (tmp_path / "cache").iterdir()} == {str(number) for number in range(1, MOST_KEPT + 1)}


def test_what_another_process_is_storing_stays_and_what_a_killed_one_left_goes(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name, age_s in ((".new-present", 60), (".new-killed", 7200)):
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (time.time() - age_s,) * 2)
    store(_environment(tmp_path), cache / "pins")
    assert {each.name for each in cache.iterdir()} == {"pins", ".new-present"}


def test_an_environment_is_marked_until_it_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _environment(tmp_path), tmp_path / "second" / ".venv"
    store(first, tmp_path / "pins")
    monkeypatch.setattr(installed_packages.shutil, "copymode", lambda source, target: sys.exit("killed"))
    with pytest.raises(SystemExit):
        restore(second, tmp_path / "pins")
    assert (second / INCOMPLETE).exists()
    monkeypatch.undo()
    restore(second, tmp_path / "pins")
    assert not (second / INCOMPLETE).exists()


def test_a_missing_or_damaged_environment_is_an_exit_code_for_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / ".venv"
    monkeypatch.setattr(sys, "argv", ["installed_packages.py", "restore", str(venv), str(tmp_path / "cache"), "pins"])
    assert installed_packages.main() == 1
    (tmp_path / "cache" / f"pins-{installed_packages._python()}").mkdir(parents=True)
    assert installed_packages.main() == 1
    assert not venv.exists(), "`make` installs the packages into an empty folder"

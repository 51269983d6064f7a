"""Steps of `.ci/run` that run side by side share neither ports nor files that one of them removes."""

from pathlib import Path

import rt_ports
from local_kubernetes.images.build import source_files
from local_kubernetes.machine.place import HOST_PORTS, INDICES, Place, cache_folder
from operator_processes import ports
from rayloom_engine.cpu_library.build import NAME

ROOT = Path(__file__).parents[2]


def test_tests_operators_and_local_clusters_have_different_ports():
    of_clusters = {Place.of(index).port(usual) for index in INDICES for usual in HOST_PORTS}
    of_tests = range(rt_ports.FIRST, rt_ports.LAST + 1)
    of_operators = range(ports.FIRST, ports.FIRST + 5 * ports.NUM)

    assert len(of_clusters) == len(INDICES) * len(HOST_PORTS)
    assert of_clusters.isdisjoint(of_tests) and of_clusters.isdisjoint(of_operators)
    assert set(of_tests).isdisjoint(of_operators)
    assert rt_ports.free_port() in of_tests


def test_an_image_is_built_from_sources_and_not_from_files_that_a_build_or_a_test_may_remove(tmp_path):
    temporary = (f".{NAME}-a1b2/avx2.o", "__pycache__/module.pyc.140", "rayloom_engine.egg-info/SOURCES.txt")
    for name in ("module.py", "folder/kernel.cpp", f"{NAME}-0123.so", f".{NAME}-0123.so.lock", *temporary):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")

    assert source_files(tmp_path) == [tmp_path / "folder" / "kernel.cpp", tmp_path / "module.py"]
    assert f"**/.{NAME}-*" in (ROOT / ".dockerignore").read_text().splitlines()


def test_compiled_programs_are_kept_in_the_folder_of_the_other_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("RAYLOOM_CACHE", raising=False)
    assert cache_folder() == tmp_path / "xdg" / "rayloom" / "e2e"

    monkeypatch.setenv("RAYLOOM_CACHE", str(tmp_path / "given"))
    assert cache_folder() == tmp_path / "given" / "e2e"

"""The build of the C library: commands, one compilation for several processes, and reasons for a missing library.

`make venv` compiles the library itself. Most tests compile a small library instead, because compiling takes long.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rayloom_engine.cpu_library import build
from rayloom_engine.cpu_library.build import (
    CompileError,
    build_into,
    build_library,
    compile_commands,
    find_compiler,
    library_name,
    source_folder,
)
from rayloom_engine.cpu_library.finding import find_library
from rayloom_engine.models.checkpoint.source import cache_folder

COMPILER = find_compiler(os.environ)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "instruction_set.cpp").write_text("namespace RL_ISA { int RL_TABLE = 1; }\n")
    (folder / "step.cpp").write_text('extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n')
    (folder / "step.h").write_text("// A header.\n")
    return folder


@pytest.fixture
def counted_compiler(tmp_path: Path) -> tuple[Path, Path]:
    """A compiler that writes a line for each call, and the file with these lines."""
    script, calls = tmp_path / "counted", tmp_path / "calls"
    script.write_text(f'#!/bin/sh\necho "$*" >> {calls}\nexec {COMPILER} "$@"\n')
    script.chmod(0o755)
    return script, calls


def test_each_instruction_set_has_an_object_of_its_own_flags() -> None:
    commands = compile_commands("cc", source_folder(), Path("/build"), Path("/out.so"))
    of_sets = {command[-1]: command for command in commands.objects if "instruction_set.cpp" in command[-3]}

    assert sorted(of_sets) == ["/build/avx2.o", "/build/avx512.o"]
    assert "-DRL_ISA=avx2" in of_sets["/build/avx2.o"] and "-mavx512f" not in of_sets["/build/avx2.o"]
    assert "-mavx512bf16" in of_sets["/build/avx512.o"]
    others = [command for command in commands.objects if command[-1] not in of_sets]
    assert not [flag for command in others for flag in command if flag.startswith("-m")], "they run on every CPU"
    assert commands.link[:4] == ("cc", "-shared", "-o", "/out.so")
    assert set(commands.link[4:-1]) == {command[-1] for command in commands.objects}


def test_the_name_changes_with_the_sources(sources: Path) -> None:
    names = [library_name(sources)]
    (sources / "step.h").write_text("// Another header.\n")
    names.append(library_name(sources))
    (sources / "step.h").rename(sources / "other.h")
    names.append(library_name(sources))
    (sources / "notes.txt").write_text("no source\n")
    names.append(library_name(sources))

    assert len(set(names)) == 3 and names[2] == names[3]


@needs_compiler
def test_the_librarys_sources_compile() -> None:
    found = find_library(cache_folder(os.environ), os.environ)
    assert found.path is not None, found.problem


@needs_compiler
def test_several_processes_compile_once(sources: Path, counted_compiler: tuple[Path, Path], tmp_path: Path) -> None:
    compiler, calls = counted_compiler
    target = tmp_path / "cache" / "library.so"
    script = (
        "import sys, pathlib; from rayloom_engine.cpu_library.build import build_library;"
        "build_library(sys.argv[1], *map(pathlib.Path, sys.argv[2:])); import ctypes;"
        "sys.exit(ctypes.CDLL(sys.argv[3]).answer() != 42)"
    )
    command = [sys.executable, "-c", script, str(compiler), str(sources), str(target)]
    processes = [subprocess.Popen(command) for _ in range(3)]

    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert len(calls.read_text().splitlines()) == 4, "two instruction sets, another source, and the linker"
    assert sorted(path.name for path in target.parent.iterdir()) == [".library.so.lock", "library.so"]


@needs_compiler
def test_the_bytes_of_a_library_do_not_depend_on_its_folders(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert COMPILER is not None
    copy = shutil.copytree(sources, tmp_path / "elsewhere" / "copy")
    for folder in (sources, copy):  # a header of the system has a path in the debug information, too
        (folder / "header.cpp").write_text(
            "#include <vector>\nint size(std::vector<int>& v) { return (int)v.size(); }\n"
        )
    (tmp_path / "link").symlink_to(copy)
    libraries = []
    for folder, cwd in (
        (sources, tmp_path),
        (copy, tmp_path),
        (copy, copy),
        (copy, copy.parent),
        (copy, Path("/")),
        (Path("copy"), copy.parent),
        (tmp_path / "link", tmp_path),
    ):
        monkeypatch.chdir(cwd)
        libraries.append(tmp_path / str(len(libraries)) / "library.so")
        build_library(COMPILER, folder, libraries[-1])
    monkeypatch.chdir(tmp_path)
    build_library(COMPILER, sources, Path("relative.so"))
    libraries.append(tmp_path / "relative.so")
    assert len({library.read_bytes() for library in libraries}) == 1
    (copy / "step.cpp").write_text('extern "C" __attribute__((visibility("default"))) int answer() { return 43; }\n')
    build_library(COMPILER, copy, tmp_path / "changed.so")
    assert (tmp_path / "changed.so").read_bytes() != libraries[0].read_bytes()


@needs_compiler
def test_a_failed_compilation_leaves_nothing_and_says_why(sources: Path, tmp_path: Path) -> None:
    assert COMPILER is not None
    (sources / "step.cpp").write_text("int answer() { return 42 }\n")
    with pytest.raises(CompileError, match=r"failed \(1\): .*step\.cpp:1:.*error"):
        build_library(COMPILER, sources, tmp_path / "cache" / "library.so")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".library.so.lock"]


@needs_compiler
def test_a_package_keeps_the_newest_library_alone(sources: Path, tmp_path: Path) -> None:
    first = build_into(tmp_path / "package", sources)
    (sources / "step.h").unlink()
    second = build_into(tmp_path / "package", sources)

    assert first is not None and second is not None and first != second
    assert list((tmp_path / "package").glob("*.so")) == [second]


@needs_compiler
def test_another_package_copies_the_library_from_the_cache(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_into(tmp_path / "first", sources, tmp_path / "cache")
    monkeypatch.setattr(build, "_run", lambda commands: pytest.fail("it compiles again"))
    second = build_into(tmp_path / "second", sources, tmp_path / "cache")

    assert first is not None and second == tmp_path / "second" / first.name
    assert second.read_bytes() == first.read_bytes()


@needs_compiler
def test_a_cache_that_cannot_be_written_is_not_needed(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    library = build_into(tmp_path / "package", sources, tmp_path / "file")
    assert library is not None and library.exists()


def test_each_compiler_command_has_a_library_of_its_own(sources: Path, tmp_path: Path) -> None:
    commands = ("g++", "g++ -march=native")
    paths = {build.cached_library(tmp_path, each, sources) for each in commands}
    paths.add(build.cached_library(tmp_path, "g++", sources, ("-O1",)))
    assert len(paths) == 3


def test_a_package_without_a_compiler_has_no_library(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build_into(tmp_path, sources) is None
    assert capsys.readouterr().err == "The CPU library is not built: there is no C++ compiler\n"


def test_the_packages_library_is_found_without_a_compiler(tmp_path: Path) -> None:
    packaged = tmp_path / library_name(source_folder())
    packaged.touch()
    found = find_library(tmp_path / "cache", {}, package=tmp_path)
    assert (found.path, found.problem) == (packaged, "")


def test_a_library_that_the_environment_names_comes_first(tmp_path: Path) -> None:
    (tmp_path / library_name(source_folder())).touch()
    named = tmp_path / "sanitized.so"
    environ = {"RAYLOOM_CPU_LIBRARY": str(named)}
    missing = find_library(tmp_path / "cache", environ, package=tmp_path)
    assert missing.path is None and missing.problem == f"RAYLOOM_CPU_LIBRARY: there is no file '{named}'"
    named.touch()
    assert find_library(tmp_path / "cache", environ, package=tmp_path).path == named


def test_more_flags_follow_those_of_every_build() -> None:
    commands = compile_commands("cc", source_folder(), Path("/build"), Path("/out.so"), ("-O1", "-Werror"))
    for command in commands.objects:
        assert command.index("-O2") < command.index("-O1")
    assert commands.link[4:6] == ("-O1", "-Werror")


def test_without_a_library_and_a_compiler_the_problem_is_named(tmp_path: Path) -> None:
    found = find_library(tmp_path / "cache", {"CXX": "no-such-compiler"}, package=tmp_path)
    assert found.path is None
    assert found.problem == "the package has no compiled library, and there is no C++ compiler here"
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_cxx_may_be_a_command_with_arguments(sources: Path, tmp_path: Path) -> None:
    command = find_compiler({"CXX": f"env ANSWER=42 {COMPILER}", "PATH": os.environ["PATH"]})
    assert command is not None and command.split()[1:] == ["ANSWER=42", COMPILER]
    build_library(command, sources, tmp_path / "library.so")
    assert ctypes.CDLL(str(tmp_path / "library.so")).answer() == 42


def test_cxx_may_be_a_path_with_a_space(tmp_path: Path) -> None:
    compiler = tmp_path / "my tools" / "c++"
    compiler.parent.mkdir()
    compiler.touch(0o755)
    commands = compile_commands(find_compiler({"CXX": str(compiler)}) or "", tmp_path, tmp_path, tmp_path / "out.so")
    assert commands.link[0] == str(compiler)


def test_the_path_of_a_compiler_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands run in the folder of the sources."""
    (tmp_path / "c++").touch(0o755)
    monkeypatch.chdir(tmp_path)
    found = [find_compiler(environ) for environ in ({"CXX": "./c++"}, {"CXX": "./c++ -v"}, {"PATH": "."})]
    assert found == [f"{tmp_path}/c++", f"{tmp_path}/c++ -v", f"{tmp_path}/c++"]


@pytest.mark.parametrize("command", ["no-such-compiler -O2", '"c++', " "])
def test_cxx_that_names_no_program_is_no_compiler(command: str) -> None:
    assert find_compiler({"CXX": command, "PATH": os.environ["PATH"]}) is None


@needs_compiler
def test_a_cache_that_cannot_be_written_is_a_problem_not_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = find_library(tmp_path / "file", os.environ, package=tmp_path)
    assert found.path is None
    assert "compiling it failed: [Errno" in found.problem and "/file" in found.problem


def test_a_compiled_library_is_found_in_a_folder_that_cannot_be_written(sources: Path, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "library.so"
    target.parent.mkdir()
    target.touch()
    (target.parent / ".library.so.lock").mkdir()  # opening the lock to write fails, as on a read-only file system
    build_library("no-such-compiler", sources, target)

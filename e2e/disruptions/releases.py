"""Bad releases: images built FROM the engine's image with a patch. The engine has no hooks for faults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from local_kubernetes.clusters.existing import ExistingCluster
from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.images.build import ENGINE

FOLDER = Path(__file__).with_name("bad_images")
NEXT_VERSION = "0.1.0+next"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A release whose `patch`, a file of bad_images/, is appended to `module` below rayloom_engine."""

    patch: str
    module: str

    @property
    def image(self) -> str:
        """The image's name in a manifest."""
        return f"{ENGINE.name.removeprefix('docker.io/').rpartition(':')[0]}:{self.patch.removesuffix('.py')}"


NEXT = Release(patch="next_version.py", module="front/operations/service.py")
CRASHES = Release(patch="crashes_at_start.py", module="supervisor/supervisor.py")
FAILS_REQUESTS = Release(patch="fails_requests.py", module="front/openai/completions.py")
FAILS_SEQUENCES = Release(patch="fails_sequences.py", module="worker/runner.py")
SLOW = Release(patch="ten_times_slower.py", module="worker/runner.py")


def release(cluster: Cluster, wanted: Release) -> str:
    """The release's image, loaded on every node. The image is rebuilt if the engine or the patch has changed."""
    if isinstance(cluster, ExistingCluster):
        pytest.skip("the nodes' images are not ours to change")
    name = f"docker.io/{wanted.image}"
    cluster.derive_image(name, FOLDER, {"MODULE": wanted.module, "PATCH": wanted.patch})
    cluster.load_image(name)
    return wanted.image

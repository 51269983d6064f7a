"""Names of containers, volumes, folders and labels that the operator or KubeRay puts into an engine's pods.

A pod template may change parts of these containers, but must not use the names of these volumes, folders and labels. A
test builds every kind of pod and compares the names in the pod with these lists.
"""

from __future__ import annotations

HEAD_CONTAINERS = ("ray-head", "engine")
WORKER_CONTAINERS = ("ray-worker",)
OWN_CONTAINERS = (*HEAD_CONTAINERS, *WORKER_CONTAINERS)
# KubeRay's container that waits for the head.
OWN_INIT_CONTAINERS = ("wait-gcs-ready",)
# Volumes for the claims and node folders that contain LoRA adapters: `api.adapters.MAX_PLACES` volumes. The names and
# the folder are reserved only for a service with spec.model.adapters: templates older than that field may use the
# names.
ADAPTER_VOLUMES = tuple(f"adapters-{number}" for number in range(8))
ADAPTERS_FOLDER = "/adapters"  # the claims of adapters are mounted below this folder
# The volume of a draft model, and the folder at which its claim is mounted: reserved only beside spec.model.draft.
DRAFT_VOLUME = "draft-model"
DRAFT_FOLDER = "/draft-model"
OWN_VOLUMES = (
    "api-keys",
    "config",
    "engine-scratch",
    "head-scratch",
    "hub-ca",
    "model",
    "model-cache",
    "ray",
    "scratch",
    "shared-memory",
)
OWN_FOLDERS = (
    "/cache",
    "/dev/shm",
    "/etc/rayloom",
    "/etc/rayloom-ca",
    "/etc/rayloom-keys",
    "/models",
    "/tmp",
    "/tmp/ray",
)
# Folders inside which nothing may be mounted: they are read-only, and an engine trusts the files in them.
SEALED_FOLDERS = ("/etc/rayloom", "/etc/rayloom-ca", "/etc/rayloom-keys")
OWN_PREFIXES = ("rayloom.dev/", "ray.io/")
OWN_LABELS = ("app.kubernetes.io/created-by", "app.kubernetes.io/managed-by", "app.kubernetes.io/name")

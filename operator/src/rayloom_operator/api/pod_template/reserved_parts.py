"""What an engine's pods have of the operator's: names that a pod template may change in parts, or not use at all.

A test builds pods of every kind and compares them with these lists.
"""

from __future__ import annotations

HEAD_CONTAINERS = ("ray-head", "engine")
WORKER_CONTAINERS = ("ray-worker",)
OWN_CONTAINERS = (*HEAD_CONTAINERS, *WORKER_CONTAINERS)
# KubeRay's container that waits for the head.
OWN_INIT_CONTAINERS = ("wait-gcs-ready",)
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
# Folders into which nothing else may be mounted: they are read-only, and hold what an engine trusts.
SEALED_FOLDERS = ("/etc/rayloom", "/etc/rayloom-ca", "/etc/rayloom-keys")
OWN_PREFIXES = ("rayloom.dev/", "ray.io/")
OWN_LABELS = ("app.kubernetes.io/created-by", "app.kubernetes.io/managed-by", "app.kubernetes.io/name")

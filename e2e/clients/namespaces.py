"""Namespaces of tests on pods."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator

from local_kubernetes.machine.kubectl import Kubectl


@contextlib.contextmanager
def new_namespace(kubectl: Kubectl, purpose: str) -> Iterator[str]:
    """A new namespace. Its pods are deleted when the block ends, since the next test needs their memory and cores.

    The namespace itself disappears a little later: the namespace controller waits for half of a pod's grace period
    before it checks a terminating namespace again.
    """
    name = f"e2e-{slug(purpose)[:40].strip('-')}-{time.time_ns() // 1_000_000 % 100_000}"
    kubectl("create", "namespace", name)
    kubectl("label", "namespace", name, "rayloom.dev/e2e=true")
    try:
        yield name
    finally:
        kubectl("delete", "namespace", name, "--wait=false")
        # The namespace controller would delete the pods later. No new pod can be created in a terminating namespace.
        kubectl("delete", "pods", "--all", "--now", "--namespace", name, "--timeout=120s", timeout_s=130)


def slug(name: str) -> str:
    """The name as a part of a file name or of a Kubernetes name: lower-case letters, digits and single hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")

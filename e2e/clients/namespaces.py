"""Namespaces of tests on pods."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator

from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.shell import wait_until

_ACCOUNT_S = 120.0


@contextlib.contextmanager
def new_namespace(kubectl: Kubectl, purpose: str) -> Iterator[str]:
    """A new namespace that accepts pods. When the block ends, its pods are deleted: the next test needs their memory.

    The namespace itself is removed later: the namespace controller waits for half of a pod's grace period before it
    checks a terminating namespace again.
    """
    name = f"e2e-{slug(purpose)[:40].strip('-')}-{time.time_ns() // 1_000_000 % 100_000}"
    kubectl("create", "namespace", name)
    kubectl("label", "namespace", name, "rayloom.dev/e2e=true")
    # The API server refuses pods until a controller has created the namespace's default ServiceAccount.
    account = ("get", "serviceaccount", "default", "--namespace", name)
    wait_until(f"the default account of {name}", lambda: kubectl.succeeds(*account), _ACCOUNT_S)
    try:
        yield name
    finally:
        kubectl("delete", "namespace", name, "--wait=false")
        # The namespace controller would delete the pods only later. In a terminating namespace no new pod can be
        # created.
        kubectl("delete", "pods", "--all", "--now", "--namespace", name, "--timeout=300s", timeout_s=330)


def slug(name: str) -> str:
    """The name as a part of a file name or of a Kubernetes name: lower-case letters, digits and single hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")

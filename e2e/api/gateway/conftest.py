"""definition   the path of the real CRD of HTTPRoutes, which the cluster does not have before and after the test"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.parts.build import gateway_crds

_DEFINITION = "gateway.networking.k8s.io_httproutes.yaml"


@pytest.fixture
def definition(kubectl: Kubectl) -> Iterator[str]:
    path = str(gateway_crds() / _DEFINITION)
    kubectl("delete", "--ignore-not-found", "--filename", path, "--timeout=30s")
    yield path
    kubectl("delete", "--ignore-not-found", "--filename", path, "--wait=false")

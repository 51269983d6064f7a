"""without_routes   the cluster has no kind HTTPRoute before and after the test"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from api import gateway_api
from local_kubernetes.machine.kubectl import Kubectl


@pytest.fixture
def without_routes(kubectl: Kubectl) -> Iterator[None]:
    gateway_api.remove(kubectl)
    yield
    gateway_api.remove(kubectl)

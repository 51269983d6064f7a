"""The local cluster of this test process.

Each process of `pytest -n` has a cluster of its own. Index 1 belongs to e2e/tool and index 5 to bench/operator.
E2E_INDEX=6 chooses another cluster for the first process, so that tests can run beside a cluster with nodes.
"""

from __future__ import annotations

import os

from local_kubernetes.machine.place import Place

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_INDICES = (int(os.environ.get("E2E_INDEX", "0")), 2, 3, 4)
if len(_INDICES) <= WORKER:
    raise ValueError(f"at most {len(_INDICES)} processes of tests have clusters: make test-api WORKERS={len(_INDICES)}")
PLACE = Place.of(_INDICES[WORKER])

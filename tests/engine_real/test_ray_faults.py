"""Ranks on several Ray nodes (of this machine): their nodes, and the pauses when nodes or all of Ray are lost.

The nodes are killed with their processes, as if a machine lost power. The tests of the first server depend on each
other: each test leaves Ray in the state that the next test needs. All of them are marked slow. test_ray_placement.py
tests the placement without a model. The tests on pods lose a Ray node with each lost worker pod.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from rt_faults import breakable, breakable_server
from rt_server import RunningServer, running_server, wait_until
from rt_streams import NUM_TOKENS, Said, disturb

pytestmark = pytest.mark.slow

ARGUMENTS = ("--dtype", "float32", "--device", "cpu", "--served-model-name", "m", "--num-kv-blocks", "256")
FOUR = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2", "--restart-budget", "20")
# With these settings, Ray notices a lost node in about 3 s instead of a minute.
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 5,
}


class RayOnThisMachine:
    """A Ray cluster: a head without room for ranks, and nodes with two CPUs."""

    def __init__(self) -> None:
        self.start(port=None)
        self.address: str = self._cluster.address

    def start(self, port: int | None) -> None:
        from ray.cluster_utils import Cluster

        same_port = {} if port is None else {"gcs_server_port": port}
        # Drivers on this machine use the first node.
        head = {"num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False, **same_port}
        self._cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": HEALTH})

    def add_node(self, **arguments: object) -> Any:
        return self._cluster.add_node(**{"num_cpus": 2, "object_store_memory": 80 << 20, **arguments})

    def kill_node(self, status_name: str) -> None:
        """Kills the node with this name in /status."""
        node = next(n for n in self._cluster.worker_nodes if n.node_id.startswith(status_name.rpartition("/")[2]))
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_all(self) -> None:
        """Kills the control store first, then all other processes."""
        self._cluster.head_node.kill_gcs_server(check_alive=False)
        for node in [*self._cluster.worker_nodes, self._cluster.head_node]:
            self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the first server."""
    return tmp_path_factory.mktemp("four")


@pytest.fixture(scope="module")
def ray_nodes(folder: Path) -> Iterator[RayOnThisMachine]:
    with breakable(folder):  # Ray's nodes give their environment to the ranks
        nodes = RayOnThisMachine()
        yield nodes
        nodes.close()


@pytest.fixture(scope="module")
def expected(said_by_one_rank: Callable[[int], list[Said]]) -> list[Said]:
    return said_by_one_rank(NUM_TOKENS)


@pytest.fixture(scope="module")
def server(ray_nodes: RayOnThisMachine, three_layers: str, folder: Path) -> Iterator[RunningServer]:
    for _ in range(2):
        ray_nodes.add_node()
    where = ("--ray-address", ray_nodes.address)
    with running_server(folder, "--model", three_layers, *ARGUMENTS, *FOUR, *where) as running:
        yield running


def _check(
    server: RunningServer,
    expected: list[Said],
    strike: Callable[[], None],
    fault: str,
    measured: Callable[[str], None],
) -> dict[int, tuple[str, int]]:
    """Causes a fault while streams run. No request may fail, and every token must be as expected. Returns `_places`."""
    seen = disturb(server, expected, strike)
    assert seen.failures == []
    assert seen.survivors_read_nothing()
    measured(f"{fault}; tokens again after {seen.seconds:.2f} s, 0 of {seen.num_requests} requests failed")
    return _places(server)


def _places(server: RunningServer) -> dict[int, tuple[str, int]]:
    """rank -> (node, process id)"""
    return {rank["rank"]: (rank["node"], rank["pid"]) for rank in server.status()["ranks"]}


def test_a_stages_ranks_share_a_node_and_stages_are_apart(server: RunningServer) -> None:
    nodes = [node for _, (node, _) in sorted(_places(server).items())]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]


def test_a_lost_node_costs_a_pause_while_another_one_has_room(
    server: RunningServer, ray_nodes: RayOnThisMachine, expected: list[Said], measured: Callable[[str], None]
) -> None:
    spare = ray_nodes.add_node()
    before = _places(server)
    strike = partial(ray_nodes.kill_node, before[2][0])
    after = _check(server, expected, strike, "a node lost with room on another", measured)
    assert [after[0], after[1]] == [before[0], before[1]], "survivors keep process and weights"
    assert {after[2][0].rpartition("/")[2], after[3][0].rpartition("/")[2]} == {spare.node_id[:6]}


def test_streams_wait_for_a_node_when_there_is_no_room(
    server: RunningServer, ray_nodes: RayOnThisMachine, expected: list[Said], measured: Callable[[str], None]
) -> None:
    before = _places(server)

    def strike() -> None:
        ray_nodes.kill_node(before[2][0])
        wait_until(lambda: server.status()["state"] == "recovering", 60.0, server.log_text)
        ray_nodes.add_node()

    after = _check(server, expected, strike, "a node lost and another one added", measured)
    assert [after[0], after[1]] == [before[0], before[1]]


def test_a_ray_that_is_killed_and_started_again_costs_a_pause(
    server: RunningServer, ray_nodes: RayOnThisMachine, expected: list[Said], measured: Callable[[str], None]
) -> None:
    before = _places(server)

    def strike() -> None:
        ray_nodes.kill_all()
        ray_nodes.start(port=int(ray_nodes.address.rpartition(":")[2]))
        for _ in range(2):
            ray_nodes.add_node()

    after = _check(server, expected, strike, "all of Ray killed and started again", measured)
    assert {pid for _, pid in before.values()}.isdisjoint(pid for _, pid in after.values())


def test_an_engine_whose_node_does_not_return_in_time_fails_with_the_cause(
    ray_nodes: RayOnThisMachine, three_layers: str, tmp_path: Path
) -> None:
    node = ray_nodes.add_node(num_cpus=0, resources={"slot": 1})
    resources = ("--ray-resources-per-rank", '{"slot": 0.5}', "--pipeline-parallel-size", "2")
    where = ("--ray-address", ray_nodes.address, "--rebuild-seconds", "3")
    with running_server(tmp_path, "--model", three_layers, *ARGUMENTS, *resources, *where) as server:
        assert {name.rpartition("/")[2] for name, _ in _places(server).values()} == {node.node_id[:6]}
        ray_nodes.kill_node(node.node_id[:6])
        started = time.monotonic()
        assert server.process.wait(90.0) == 70
        print(f"gave up after {time.monotonic() - started:.1f} s")
        assert "not there in time (missing ranks: [0, 1]); not mended within 3 s" in server.log_text()


@pytest.fixture(scope="module")
def local_server(three_layers: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a private Ray."""
    arguments = ("--executor", "ray", "--pipeline-parallel-size", "2")
    folder = tmp_path_factory.mktemp("local")
    with breakable_server(folder, "--model", three_layers, *ARGUMENTS, *arguments) as running:
        yield running


@pytest.mark.parametrize("part", ["raylet", "gcs_server", "python"])
def test_a_part_of_the_servers_own_ray_that_is_killed_costs_a_pause(
    local_server: RunningServer, part: str, expected: list[Said], measured: Callable[[str], None]
) -> None:
    before = _places(local_server)

    def strike() -> None:
        ray = local_server.children()["local_ray"]
        next(process for process in [ray, *ray.children()] if process.name() == part).kill()

    after = _check(local_server, expected, strike, f"{part} of the server's own Ray killed", measured)
    assert {pid for _, pid in before.values()}.isdisjoint(pid for _, pid in after.values())
    lost = [pid for _, pid in before.values()]
    wait_until(lambda: not any(map(psutil.pid_exists, lost)), 60.0, lambda: f"ranks of before live on: {lost}")

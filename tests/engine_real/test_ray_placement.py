"""The nodes on which Ray puts ranks: a cluster of two nodes (on this machine) with two CPUs each, and no model."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rayloom_engine.config import EngineConfig, parse_config
from rayloom_engine.errors import ConfigError, EngineDead, EngineError
from rayloom_engine.launcher import ray_ranks
from rayloom_engine.launcher.ray_ranks import RayRanks
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.worker.rank_server import RankPlace
from rt_equal_tokens import ARGUMENTS, tokens_of_one_rank, tokens_of_ranks, uneven_checkpoint
from rt_server import running_server


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=2, num_gpus=0, object_store_memory=80 << 20, include_dashboard=False)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def address(cluster: Any) -> str:
    return str(cluster.address)


def _config(address: str, **changes: object) -> EngineConfig:
    return parse_config(
        {"executor": "ray", "ray_address": address, "device": "cpu", "placement_seconds": 10.0, **changes}
    )


def test_the_ranks_of_a_stage_share_a_node_and_the_stages_are_apart(address: str, tmp_path: Path) -> None:
    from ray.util.placement_group import placement_group_table

    ranks = RayRanks(_config(address, tensor_parallel_size=2, pipeline_parallel_size=2), tmp_path, "token", 1)
    try:
        ranks.prepare(no_progress)
        table = placement_group_table(ranks._group)
        assert table["bundles"] == {0: {"CPU": 2.0}, 1: {"CPU": 2.0}}
        assert len(set(table["bundles_to_node_id"].values())) == 2
        assert [ranks._num_ranks_beside(rank) for rank in range(4)] == [2, 2, 2, 2]
        assert (tmp_path / "placed").exists(), "for the next launcher"
    finally:
        ranks.close()


@pytest.mark.slow  # it starts six processes
def test_ray_puts_exactly_the_wanted_number_of_ranks_on_each_gpu(
    cluster: Any, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray counts GPUs, and does not use them, so a node can have two without a GPU in the machine."""

    class Noting:
        def run(self, _: str, place: RankPlace) -> None:
            import ray

            path = tmp_path / f"new-{place.rank}"
            path.write_text(",".join(map(str, ray.get_gpu_ids())))
            path.rename(tmp_path / f"rank-{place.rank}")
            threading.Event().wait()  # keeps its part of the GPU until the test ends

    monkeypatch.setattr(ray_ranks, "RankActor", Noting)
    node = cluster.add_node(num_cpus=0, num_gpus=2, object_store_memory=80 << 20, include_dashboard=False)
    config = _config(
        address,
        device="cuda",
        tensor_parallel_size=6,
        ranks_per_gpu=3,
        ray_resources_per_rank={"GPU": 0.3333},
    )
    ranks = RayRanks(config, tmp_path, "token", 1)
    try:
        ranks.prepare(no_progress)
        for rank in range(6):
            ranks.start(rank, 1)
        deadline = time.monotonic() + 120.0
        while len(found := list(tmp_path.glob("rank-*"))) < 6:
            assert time.monotonic() < deadline, f"ranks with a GPU: {sorted(path.name for path in found)}"
            ranks.wait(0.1)
        assert sorted(path.read_text() for path in found) == ["0", "0", "0", "1", "1", "1"]
    finally:
        ranks.close()
        cluster.remove_node(node)


@pytest.mark.slow
def test_two_stages_of_two_ranks_on_two_nodes_give_the_tokens_of_one_rank(address: str, tmp_path: Path) -> None:
    """The only test here with a model.

    In `make test`, the test above is about the placement of these ranks, test_rank_death.py compares the tokens of
    ranks in Ray, and test_tensor_parallel.py those of two stages of two ranks.
    """
    model = uneven_checkpoint(tmp_path / "model", "qwen3-biases")
    layout = ("--ray-address", address, "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")
    with running_server(tmp_path, "--model", model, *ARGUMENTS, *layout) as server:
        nodes = [rank["node"] for rank in server.status()["ranks"]]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
        tokens = tokens_of_ranks(server, "ray", 4)
    assert tokens == tokens_of_one_rank(model)


def test_stages_whose_nodes_were_lost_are_not_beside_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = {"bundles_to_node_id": {0: "a", 1: "", 2: "", 3: "a"}}
    module = importlib.import_module("ray.util.placement_group")
    monkeypatch.setattr(module, "placement_group_table", lambda group: table)
    ranks = RayRanks(_config("127.0.0.1:1", pipeline_parallel_size=4), tmp_path, "token", 1)
    assert [ranks._num_ranks_beside(rank) for rank in range(4)] == [2, 1, 1, 2]


def test_a_stage_without_room_is_refused_with_the_resources_of_the_nodes(address: str, tmp_path: Path) -> None:
    ranks = RayRanks(_config(address, tensor_parallel_size=3, placement_seconds=1.0), tmp_path, "token", 1)
    try:
        with pytest.raises(ConfigError) as refusal:
            ranks.prepare(no_progress)
    finally:
        ranks.close()
    text = str(refusal.value)
    start = "tensor_parallel_size 3 x pipeline_parallel_size 1: no room in the Ray cluster after 1 s for 1 x (3 CPU). "
    assert text.startswith(start + "The nodes have too little: ")
    assert text.count(" has 2 CPU, lacks 1 CPU") == 2


@pytest.mark.parametrize(("had_room", "error"), [(False, ConfigError), (True, EngineDead)])
def test_a_ray_that_is_not_there_is_the_configs_fault_until_there_was_room(
    had_room: bool, error: type[EngineError], tmp_path: Path
) -> None:
    if had_room:
        (tmp_path / "placed").touch()
    config = _config("127.0.0.1:1", placement_seconds=0.2, rebuild_seconds=1.0)
    started = time.monotonic()
    with pytest.raises(error, match=r"no Ray at 127\.0\.0\.1:1 \(.*refused\); start it, or name another one"):
        RayRanks(config, tmp_path, "token", 1).prepare(no_progress)
    assert time.monotonic() - started > (1.0 if had_room else 0.2), "it waited for Ray to come"


def test_a_ray_that_refuses_and_a_missing_ray_have_different_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("Traceback of Ray's\nAuthenticationError: no") from None

    monkeypatch.setattr("ray.init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = _config(f"127.0.0.1:{listener.getsockname()[1]}", placement_seconds=0.2)
        with pytest.raises(
            ConfigError, match=r"cannot join the Ray at .* \(AuthenticationError: no\); is this machine"
        ):
            RayRanks(config, tmp_path, "token", 1).prepare(no_progress)


def test_serve_names_the_missing_resources_within_seconds(address: str, measured: Callable[[str], None]) -> None:
    command = [sys.executable, "-m", "rayloom_engine", "serve", "--port", "0", "--admin-port", "0", "--device", "cpu"]
    started = time.monotonic()
    done = subprocess.run(
        [*command, "--ray-address", address, "--pipeline-parallel-size", "5"],
        capture_output=True,
        text=True,
        timeout=120.0,
    )
    seconds = time.monotonic() - started
    assert done.returncode == 78
    assert done.stderr.count(" has 2 CPU, holds 2 stages") == 2, done.stderr
    assert "Traceback" not in done.stderr
    measured(f"too little room said after {seconds:.1f} s")
    # The refusal takes 4 s on an idle machine, mostly for imports. A wait for ranks that may still start would take
    # minutes.
    assert seconds < 60.0

"""Executor `ray`: ranks as actors of a Ray cluster. Ray finds the room, starts them and tells of their end.

No Ray call is made per step, and none polls the cluster while ranks run: a driver that asks for the list of nodes while
Ray's control store restarts is aborted.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Any

from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError
from rayloom_engine.launcher.starter import NO_CORE
from rayloom_engine.models.progress import Progress
from rayloom_engine.rank_process import RankPlace, RankServer

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # nothing of ours goes through it; Ray's least
_POLL_SECONDS = 0.25


def ray_address(config: EngineConfig) -> str | None:
    """The Ray cluster to use; None = start one on this machine."""
    return config.ray_address or os.environ.get("RAY_ADDRESS") or None


class RankActor:
    """Runs one rank inside an actor's process, for as long as there is a core."""

    def run(self, config: str, place: RankPlace) -> None:
        """`config` is the EngineConfig document as JSON."""
        from rayloom_engine.process import set_up_logging

        parsed = EngineConfig.model_validate_json(config)
        set_up_logging(f"rank{place.rank}", parsed.log_level)
        RankServer(parsed, place).run()


class RayRanks:
    """Implements RankStarter."""

    def __init__(self, config: EngineConfig, token: str, core_port: int, is_restart: bool) -> None:
        """`is_restart`: a launcher before this one had found room; then too little of it is no fault of the config."""
        self._config = config
        self._is_restart = is_restart
        self._patience = config.rebuild_seconds if is_restart else config.placement_seconds
        self._token = token
        self._core_port = core_port
        self._address = ray_address(config)
        self._core_host = "127.0.0.1"
        self._group: Any = None  # ray.util.placement_group.PlacementGroup
        self._resources: dict[str, float] = {}  # of one rank
        self._actors: dict[int, Any] = {}  # rank -> actor handle
        self._runs: dict[Any, int] = {}  # object reference of a running `run` -> rank

    def prepare(self, progress: Progress) -> None:
        import ray
        from ray.util.placement_group import placement_group, placement_group_table

        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
        progress("discover", 0, 0, "")
        deadline = time.monotonic() + self._patience
        world_size = self._config.world_size
        if self._address is None:
            from rayloom_engine.worker.machine import usable_cores

            ray.init(
                address="local",
                num_cpus=max(world_size, usable_cores()),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                configure_logging=False,
            )
        else:
            _wait_until_open(self._address, deadline)
            ray.init(address=self._address, configure_logging=False)
            self._core_host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        uses_gpu = self._config.device == "cuda"
        if self._config.device == "auto":
            uses_gpu = ray.cluster_resources().get("GPU", 0) >= world_size  # type: ignore[no-untyped-call]
        self._resources = {"CPU": 1.0, "GPU": 1.0} if uses_gpu else {"CPU": 1.0}
        deadline = time.monotonic() + self._patience  # Ray's own start does not count
        progress("reserve", 0, world_size, "ranks")
        # A stage's ranks talk in every layer, so they share a node; stages talk once a step and may be apart.
        bundles = [self._stage_resources()] * self._config.pipeline_parallel_size
        self._group = placement_group(bundles, strategy="SPREAD")
        # Not `group.wait`: each call leaves a callback in Ray's control store, and it takes whole seconds only.
        while placement_group_table(self._group)["state"] != "CREATED":
            if time.monotonic() > deadline:
                shortage = self._shortage()
                raise RuntimeError(shortage) if self._is_restart else ConfigError(shortage)
            time.sleep(_POLL_SECONDS)
        progress("reserve", world_size, world_size, "ranks")

    def start(self, rank: int, incarnation: int) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = RankPlace(
            rank=rank,
            incarnation=incarnation,
            ranks_on_host=self._num_ranks_beside(rank),
            address=f"{self._core_host}:{self._core_port}",
            token=self._token,
        )
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group,
            placement_group_bundle_index=rank // self._config.tensor_parallel_size,
            placement_group_capture_child_tasks=False,
        )
        actor_class: Any = ray.remote(
            num_cpus=self._resources["CPU"],
            num_gpus=self._resources.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=strategy,
        )(RankActor)
        actor = actor_class.remote()
        self._actors[rank] = actor
        self._runs[actor.run.remote(self._config.model_dump_json(), place)] = rank

    def kill(self, rank: int) -> None:
        import ray

        if rank in self._actors:
            ray.kill(self._actors[rank], no_restart=True)

    def wait(self, timeout_s: float) -> list[tuple[int, str]]:
        import ray

        if not self._runs:
            time.sleep(timeout_s)
            return []
        ended, _ = ray.wait(list(self._runs), num_returns=1, timeout=timeout_s)
        causes = []
        for run in ended:
            rank = self._runs.pop(run)
            del self._actors[rank]
            try:
                ray.get(run)
                causes.append((rank, NO_CORE))
            except ray.exceptions.RayError as error:
                causes.append((rank, str(error).strip().splitlines()[-1]))
        return causes

    def close(self) -> None:
        import ray

        ray.shutdown()

    def _stage_resources(self) -> dict[str, float]:
        return {name: amount * self._config.tensor_parallel_size for name, amount in self._resources.items()}

    def _num_ranks_beside(self, rank: int) -> int:
        """Ranks, this one included, that Ray has put on the same node."""
        from ray.util.placement_group import placement_group_table

        nodes: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        own = nodes.get(rank // self._config.tensor_parallel_size)
        return self._config.tensor_parallel_size * max(1, sum(node == own for node in nodes.values()))

    def _shortage(self) -> str:
        import ray

        wanted = ", ".join(f"{amount:g} {name}" for name, amount in self._stage_resources().items())
        nodes = []
        for node in ray.nodes():  # type: ignore[no-untyped-call]
            if node["Alive"]:
                has = ", ".join(f"{node['Resources'].get(name, 0):g} {name}" for name in self._resources)
                nodes.append(f"{node['NodeManagerHostname']}: {has}")
        return (
            f"{self._config.parallelism}: no room in the Ray cluster within {self._patience:g} s for "
            f"{self._config.pipeline_parallel_size} x {wanted}, each on one node (the nodes have {'; '.join(nodes)}); "
            "add nodes, or lower one of the sizes"
        )


def _wait_until_open(address: str, deadline: float) -> None:
    """Ray beside us may start later than we. Raises ConfigError after the deadline."""
    if address == "auto":
        return  # Ray looks for it itself
    host, _, port = address.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"ray_address: no Ray at {address} ({error}); start it, or name another one"
                ) from error
            time.sleep(_POLL_SECONDS)
        except ValueError as error:
            raise ConfigError(f"ray_address (or RAY_ADDRESS): {address!r} is not HOST:PORT") from error

"""Executor `ray`: ranks are actors of a Ray cluster. Ray places them, starts them and reports when they end.

Steps do not call Ray. While ranks run, nothing polls the cluster either: if a driver requests the list of nodes while
the control store restarts, Ray aborts the driver.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import threading
import time
from pathlib import Path
from typing import Any

from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError, EngineDead
from rayloom_engine.launcher.local_ray import address_file, use_private_ray, wait_while_ray_runs
from rayloom_engine.launcher.placement import Node, rank_resources, shortage, stage_resources
from rayloom_engine.launcher.starter import NO_CORE
from rayloom_engine.models.checkpoint.progress import Progress
from rayloom_engine.worker.rank_server import RankPlace, RankServer

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_LOCAL_SECONDS = 60.0  # the least seconds to wait for a Ray that this server itself starts


def ray_address(config: EngineConfig) -> str | None:
    """Returns the address of the Ray cluster to use. None: the server starts a Ray on this machine."""
    return config.ray_address or os.environ.get("RAY_ADDRESS") or None


class RankActor:
    """Runs one rank in an actor's process, until the rank finds no core any more."""

    def run(self, config: str, place: RankPlace) -> None:
        """Runs the rank until it finds no core any more. `config`: the EngineConfig as JSON."""
        import ray

        from rayloom_engine.common.process import set_up_logging

        parsed = EngineConfig.model_validate_json(config)
        set_up_logging(f"rank{place.rank}", parsed.log_level)
        # Several Ray nodes may run on one host, so the name contains both host and Ray node.
        os.environ.setdefault("RAYLOOM_NODE_NAME", _node_name(platform.node(), ray.get_runtime_context().get_node_id()))
        RankServer(parsed, place).run()


class RayRanks:
    """Implements RankStarter."""

    def __init__(self, config: EngineConfig, run_dir: Path, token: str, core_port: int) -> None:
        self._config = config
        self._run_dir = run_dir
        # True if an earlier launcher has placed all ranks. In this case, a lack of room has another cause than the
        # config.
        self._is_restart = _placed_file(run_dir).exists()
        self._patience = config.rebuild_seconds if self._is_restart else config.placement_seconds
        self._token = token
        self._core_port = core_port
        self._core_host = "127.0.0.1"
        self._is_closed = False
        self._group: Any = None  # ray.util.placement_group.PlacementGroup
        self._resources: dict[str, float] = {}  # Ray resources of one rank
        self._actors: dict[int, Any] = {}  # rank -> actor handle
        self._runs: dict[Any, int] = {}  # object reference of an actor's `run` call -> rank

    def prepare(self, progress: Progress) -> None:
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
        if ray_address(self._config) is None:
            use_private_ray(self._run_dir)
        import ray
        from ray.util.placement_group import placement_group, placement_group_table

        progress("discover", 0, 0, "")
        self._connect()
        threading.Thread(target=self._end_with_ray, name="ray-watch", daemon=True).start()
        num_gpus = ray.cluster_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
        self._resources = rank_resources(self._config, num_gpus)
        world_size = self._config.world_size
        progress("reserve", 0, world_size, "ranks")
        bundles = [stage_resources(self._config, self._resources)] * self._config.pipeline_parallel_size
        self._group = placement_group(bundles, strategy=self._config.ray_placement_strategy)
        deadline = time.monotonic() + self._patience  # begins only here, because Ray's own start does not count
        # Polls instead of calling `group.wait`, which leaves a callback in Ray's control store and only accepts whole
        # seconds.
        while placement_group_table(self._group)["state"] != "CREATED":
            if time.monotonic() > deadline:
                raise self._no_room(shortage(self._config, _nodes(), self._resources, self._patience))
            time.sleep(_POLL_SECONDS)
        _placed_file(self._run_dir).touch()
        progress("reserve", world_size, world_size, "ranks")

    def _connect(self) -> None:
        """Makes this process a Ray driver. Retries for a while, because Ray may not run yet or may be restarting."""
        import ray

        named = ray_address(self._config)
        if named is not None and named != "auto" and not named.rpartition(":")[2].isdigit():
            raise ConfigError(f"ray_address (or RAY_ADDRESS): {named!r} is not HOST:PORT")
        deadline = time.monotonic() + (self._patience if named else max(self._patience, _LOCAL_SECONDS))
        while True:
            is_there = False
            try:
                # Read at each attempt, because the file changes when the local Ray restarts.
                address = named or address_file(self._run_dir).read_text()
                if address != "auto":  # Ray resolves "auto" itself
                    host, _, port = address.rpartition(":")
                    socket.create_connection((host, int(port)), timeout=1.0).close()
                    is_there = True
                ray.init(address=address, runtime_env=self._config.ray_runtime_env, configure_logging=False)
                break
            except (TypeError, ValueError) as error:
                raise ConfigError(f"ray_address or ray_runtime_env: Ray refuses it: {error}") from error
            except (OSError, RuntimeError) as error:
                if time.monotonic() > deadline:
                    where = f"at {named}" if named else "on this machine"
                    # Ray's message may contain a whole stack trace. Its last line is the cause.
                    cause = (str(error.__cause__ or error).strip() or repr(error)).splitlines()[-1]
                    sentence = f"no Ray {where} ({cause}); start it, or name another one"
                    if is_there:
                        ask = "is this machine a node of that cluster, and has it the cluster's token?"
                        sentence = f"cannot join the Ray {where} ({cause}); {ask}"
                    raise self._no_room(f"ray_address: {sentence}") from error
                time.sleep(_POLL_SECONDS)
        if named is not None:
            self._core_host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]

    def _no_room(self, sentence: str) -> ConfigError | EngineDead:
        return EngineDead(sentence) if self._is_restart else ConfigError(sentence)

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
        own = {name: amount for name, amount in self._resources.items() if name not in ("CPU", "GPU", "memory")}
        actor_class: Any = ray.remote(
            num_cpus=self._resources.get("CPU", 0),
            num_gpus=self._resources.get("GPU", 0),
            memory=self._resources.get("memory", 0),
            resources=own,
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

        self._is_closed = True
        ray.shutdown()

    def _end_with_ray(self) -> None:
        """Exits this process once Ray has ended. A driver cannot join another Ray, but a restarted launcher can."""
        wait_while_ray_runs()
        if not self._is_closed:
            logger.error("Ray's control store or this machine's raylet is gone; the launcher restarts")
            os._exit(1)

    def _num_ranks_beside(self, rank: int) -> int:
        """Returns the number of ranks that Ray has placed on the node of `rank`, including `rank` itself."""
        from ray.util.placement_group import placement_group_table

        nodes: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        own = nodes.get(rank // self._config.tensor_parallel_size)
        num_stages = sum(node == own for node in nodes.values()) if own else 1  # `own` is "" if the node is lost
        return self._config.tensor_parallel_size * num_stages


def _placed_file(run_dir: Path) -> Path:
    """Returns the path of the file that exists once Ray has placed all ranks of this server."""
    return run_dir / "placed"


def _nodes() -> list[Node]:
    import ray

    available = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return [
        Node(
            name=_node_name(node["NodeManagerHostname"], node["NodeID"]),
            total=node["Resources"],
            available=available.get(node["NodeID"], {}),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


def _node_name(host: str, node_id: str) -> str:
    return f"{host}/{node_id[:6]}"

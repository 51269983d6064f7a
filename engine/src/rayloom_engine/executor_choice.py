"""Chooses the executor, which starts the ranks.

Pure, so that `doctor` can explain the choice without starting anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError

_JOB_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TOKEN_VARIABLE = "RAYLOOM_RANK_TOKEN"
_MIN_TOKEN_LENGTH = 32


@dataclass(frozen=True, slots=True)
class ExecutorChoice:
    name: Literal["uni", "mp", "ray", "external"]
    reason: str

    @property
    def has_rank_processes(self) -> bool:
        """False if the core itself is the only rank."""
        return self.name != "uni"


def choose_executor(config: EngineConfig, environ: Mapping[str, str]) -> ExecutorChoice:
    """Returns the executor that the config sets.

    With "auto", the first rule that applies decides: ray if ray_address is set; uni for one rank; external in the
    environment of a job of `world_size` ranks; ray if RAY_ADDRESS is set; mp in all other cases.
    """
    if config.executor != "auto":
        return ExecutorChoice(config.executor, "set")
    if config.ray_address is not None:
        return ExecutorChoice("ray", "ray_address is set")
    if config.world_size == 1:
        return ExecutorChoice("uni", "one rank")
    is_job = all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    if is_job and environ["WORLD_SIZE"] == str(config.world_size):
        return ExecutorChoice("external", f"this is rank {environ['RANK']} of a job of {config.world_size}")
    if environ.get("RAY_ADDRESS"):
        return ExecutorChoice("ray", "RAY_ADDRESS is set")
    return ExecutorChoice("mp", f"{config.world_size} ranks on this machine")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """The position of this process in a job of torchrun or a similar launcher, taken from its environment."""

    rank: int
    local_rank: int
    ranks_on_host: int
    address: str  # HOST:PORT at which ranks reach the core
    token: str = field(repr=False)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def is_on_one_host(self) -> bool:
        return self.address.startswith("127.0.0.1:")


def job_place(config: EngineConfig, environ: Mapping[str, str]) -> JobPlace:
    """Returns this process's position in its job.

    Raises ConfigError if variables are missing or contradict the config.
    """
    missing = [name for name in _JOB_VARIABLES if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"executor: 'external' needs {', '.join(missing)} in the environment; start it with torchrun "
            f"--nproc-per-node {config.world_size} -m rayloom_engine serve ..."
        )
    names = [name for name in _JOB_VARIABLES if name != "MASTER_ADDR"]
    try:
        rank, local_rank, world_size, ranks_on_host, port = (int(environ[name]) for name in names)
    except ValueError as error:
        raise ConfigError(f"executor: 'external': one of {', '.join(names)} is no number: {error}") from error
    if world_size != config.world_size:
        raise ConfigError(
            f"executor: 'external': the job has WORLD_SIZE {world_size}, but {config.parallelism} needs "
            f"{config.world_size} ranks; start as many, or change one of the sizes"
        )
    if not 0 <= local_rank < ranks_on_host <= world_size:
        raise ConfigError(
            f"executor: 'external': LOCAL_RANK {local_rank} and LOCAL_WORLD_SIZE {ranks_on_host} cannot be in a job of "
            f"WORLD_SIZE {world_size}; use LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE, as torchrun does"
        )
    if config.rank_port == 0 and port == 65535:
        raise ConfigError("executor: 'external': MASTER_PORT 65535 has no next port; set rank_port")
    token = environ.get(_TOKEN_VARIABLE, "")
    if len(token) < _MIN_TOKEN_LENGTH:
        raise ConfigError(
            f"executor: 'external' needs {_TOKEN_VARIABLE} in the environment, the same {_MIN_TOKEN_LENGTH} characters "
            f"or more for all ranks; make one with: export {_TOKEN_VARIABLE}=$(openssl rand -hex 32)"
        )
    host = "127.0.0.1" if ranks_on_host == world_size else environ["MASTER_ADDR"]
    return JobPlace(
        rank=rank,
        local_rank=local_rank,
        ranks_on_host=ranks_on_host,
        address=f"{host}:{config.rank_port or port + 1}",
        token=token,
    )

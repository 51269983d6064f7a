"""`rayloom-engine doctor`: prints this machine's resources, what a config would do on it, and problems."""

from __future__ import annotations

import argparse
import glob
import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from rayloom_engine.cli.arguments import add_config_arguments, config_from
from rayloom_engine.common.process import EXIT_CONFIG
from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError, ModelError
from rayloom_engine.executor_choice import choose_executor, job_place

if TYPE_CHECKING:
    from rayloom_engine.models.checkpoint.source import ResolvedModel
    from rayloom_engine.models.shape import ModelShape

_GIB = 1 << 30
_PACKAGES = ("torch", "ray", "triton")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show what would be served and how, and what would prevent it",
        usage="rayloom-engine doctor [MODEL] [flags]",
        description="Prints this machine's resources, what `serve` would do with these flags, and what prevents it.",
        allow_abbrev=False,
    )
    add_config_arguments(parser, is_server=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    problems: list[str] = []
    rows = [*_machine(), *_executor(config, problems), *_model(config, problems), *_ports(config, problems)]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    for problem in problems:
        print(f"\nproblem: {problem}")
    return EXIT_CONFIG if problems else 0


def _machine() -> list[tuple[str, str]]:
    import psutil

    from rayloom_engine.worker.machine import free_memory_bytes, usable_cores

    memory = psutil.virtual_memory().total
    devices = len(glob.glob("/dev/nvidia[0-9]*"))
    return [
        ("rayloom-engine", f"{version('rayloom-engine')}, Python {platform.python_version()}"),
        ("packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)),
        ("cores", f"{usable_cores()} usable of {os.cpu_count()}"),
        (
            "memory",
            f"{free_memory_bytes() / _GIB:.1f} GiB free for this process, the machine has {memory / _GIB:.1f} GiB",
        ),
        ("accelerators", f"{devices} NVIDIA" if devices else "none seen"),
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _executor(config: EngineConfig, problems: list[str]) -> list[tuple[str, str]]:
    choice = choose_executor(config, os.environ)
    shape = f"tensor {config.tensor_parallel_size} x pipeline {config.pipeline_parallel_size}"
    rows = [("executor", f"{choice.name} ({choice.reason}), {shape} = {config.world_size} ranks")]
    address = config.ray_address or os.environ.get("RAY_ADDRESS")
    if choice.name == "ray":
        rows.append(("ray", f"at {address}" if address else "would be started on this machine"))
        if address and address != "auto" and not _answers(address):
            problems.append(f"ray_address: nothing answers at {address}; start Ray there, or name another address")
    if choice.name == "external":
        try:
            job = job_place(config, os.environ)
        except ConfigError as error:
            problems.append(str(error))
        else:
            rows.append(("job", f"rank {job.rank}, {job.ranks_on_host} ranks on this machine, core at {job.address}"))
    return rows


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except (OSError, ValueError):
        return False
    return True


def _model(config: EngineConfig, problems: list[str]) -> list[tuple[str, str]]:
    from rayloom_engine.models.checkpoint.progress import no_progress
    from rayloom_engine.worker.machine import free_memory_bytes
    from rayloom_engine.worker.start import find_model

    if config.model.startswith("hf://"):
        rows = [("model", f"{config.model} (on the hub, not looked up)")]
        return [*rows, ("draft model", f"{config.draft_model} (not looked up)")] if config.draft_model else rows
    try:
        resolved, shape = find_model(config, no_progress)
    except (ModelError, ConfigError) as error:
        problems.append(str(error))
        return [("model", f"{config.model} cannot be served")]
    weights = _weight_bytes(config, shape)
    rows = [("model", f"{config.model}: {_facts(config, shape)}"), ("folder", str(resolved.path))]
    draft_rows, draft_weights = _draft_model(config, resolved, shape, problems)
    if weights + draft_weights > free_memory_bytes() and not glob.glob("/dev/nvidia[0-9]*"):
        of_draft = f" and {draft_weights / _GIB:.1f} GiB of the draft model's" if draft_weights else ""
        problems.append(
            f"model: {weights / _GIB:.1f} GiB of weights{of_draft} do not fit into the memory that is free; free some, "
            "or take a smaller model"
        )
    return [*rows, *draft_rows]


def _draft_model(
    config: EngineConfig, target: ResolvedModel, target_shape: ModelShape, problems: list[str]
) -> tuple[list[tuple[str, str]], int]:
    """Returns the rows of the draft model, and the bytes of its weights; nothing if there is none."""
    from rayloom_engine.models.checkpoint.progress import no_progress
    from rayloom_engine.worker.draft_loading import find_draft

    name = config.draft_model
    if name is None:
        return [], 0
    if name.startswith("hf://"):
        return [("draft model", f"{name} (on the hub, not looked up)")], 0
    try:
        found = find_draft(config, target, target_shape, no_progress)
    except (ModelError, ConfigError) as error:
        problems.append(str(error))
        return [("draft model", f"{name} cannot be used")], 0
    assert found is not None, "setting_conflicts.py demands speculation draft"
    return [("draft model", f"{name}: {_facts(config, found.shape)}")], _weight_bytes(config, found.shape)


def _facts(config: EngineConfig, shape: ModelShape) -> str:
    weights = _weight_bytes(config, shape) / _GIB
    parameters = f"{shape.num_parameters / 1e6:.0f} M parameters"
    return f"{shape.architecture}, {parameters}, {shape.num_layers} layers, {weights:.2f} GiB of weights"


def _weight_bytes(config: EngineConfig, shape: ModelShape) -> int:
    return shape.weight_bytes(4 if "float32" in (config.dtype, shape.checkpoint_dtype) else 2)


def _ports(config: EngineConfig, problems: list[str]) -> list[tuple[str, str]]:
    from rayloom_engine.supervisor.sockets import bind_sockets

    try:
        for listener in bind_sockets(config):
            listener.close()
    except ConfigError as error:
        problems.append(str(error))
    return [("ports", f"API {config.host}:{config.port}, admin {config.admin_host}:{config.admin_port}")]

"""`rayloom-operator run`: reads the flags and starts kopf, which calls `handlers`."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass
from pathlib import Path

import kopf
import uvloop

from rayloom_operator import handlers as handlers  # the import registers the handlers with kopf
from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.decide.scaling.windows import Windows
from rayloom_operator.decide.settings import Settings
from rayloom_operator.errors import OperatorError
from rayloom_operator.objects.tls.files import TlsMode
from rayloom_operator.reconcile.runtime import Runtime, RuntimeSettings
from rayloom_operator.resolve.resolved import Hub
from rayloom_operator.telemetry import logs

_MIN_KEY_BYTES = 16
# Thresholds of Python's garbage collector. The youngest generation is collected after 2,000 new objects. The middle
# generation is collected after 10 collections of the youngest generation, and the oldest generation after 10
# collections of the middle generation. The first number limits the garbage that waits for a collection: kopf leaves the
# document of each event in a cycle of objects. In 1,200 events of a service the resident memory grew by 8.1 MiB with a
# first number of 20,000, and by 1.4 MiB with 2,000. With 2,000 it grew no more in the next 1,200 events.
_COLLECT = (2_000, 10, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlags:
    """The flags of the command. `--help` and docs/operator.md describe them."""

    engine_image: str
    key_file: Path
    previous_key_file: Path | None
    pod_tls: TlsMode
    namespace: str
    health_port: int
    log_level: str
    log_format: str
    watch_namespaces: tuple[str, ...]
    lease_namespace: str
    lease_name: str
    lease_seconds: int
    max_reconciles: int
    autoscaling_window: float
    hub_endpoint: str
    hub_ca_config_map: str
    host_paths: tuple[str, ...]
    hub_endpoints: bool
    allowed_in_pod_templates: frozenset[str]
    routes: bool
    route_annotations: tuple[str, ...]


def run_operator(flags: RunFlags) -> None:
    """Runs until SIGTERM or SIGINT. Raises OperatorError if the operator cannot start, or if it loses the Lease."""
    logs.set_up(flags.log_level, flags.log_format)
    settings = _settings(flags)
    _collect_seldom()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings))
    except kopf.LoginError as error:
        raise OperatorError(str(error)) from error


async def _run(settings: RuntimeSettings) -> None:
    runtime = Runtime(settings)
    try:
        await kopf.operator(
            memo=kopf.Memo(runtime=runtime),
            standalone=True,  # the Lease elects the leader; with kopf's peering, two operators could lead
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            stop_flag=runtime.stopping,
        )
    finally:
        if runtime.failure is not None:
            raise runtime.failure


def _settings(flags: RunFlags) -> RuntimeSettings:
    hub = Hub(endpoint=flags.hub_endpoint, allows_own=flags.hub_endpoints, ca_config_map=flags.hub_ca_config_map)
    permissions = Permissions(
        host_paths=flags.host_paths,
        hub_endpoints=flags.hub_endpoints,
        allowed_in_pod_templates=flags.allowed_in_pod_templates,
        routes=flags.routes,
        route_annotations=flags.route_annotations,
    )
    settings = Settings(
        engine_image=flags.engine_image,
        operator_key=_operator_key(flags.key_file),
        previous_key=_previous_key(flags.previous_key_file),
        pod_tls=flags.pod_tls,
        namespace=flags.namespace,
        hub=hub,
        permissions=permissions,
        windows=Windows(window_s=flags.autoscaling_window),
    )
    return RuntimeSettings(
        settings=settings,
        namespaces=flags.watch_namespaces,
        health_port=flags.health_port,
        lease_namespace=flags.lease_namespace,
        lease_name=flags.lease_name,
        lease_seconds=flags.lease_seconds,
        max_reconciles=flags.max_reconciles,
    )


def _collect_seldom() -> None:
    """Makes garbage collections rarer than by Python's defaults.

    Decoding and packing 20,000 pods takes 0.30 s of CPU time with these thresholds, 0.35 s with the defaults, and
    0.27 s without collections.
    """
    gc.collect()
    gc.freeze()  # exempts the imported modules from garbage collections
    gc.set_threshold(*_COLLECT)


def _operator_key(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise OperatorError(
            f"cannot read the operator's key {path}: {error.strerror}; name it with --key-file"
        ) from error
    if len(key) < _MIN_KEY_BYTES:
        raise OperatorError(f"the key {path} has {len(key)} bytes; use {_MIN_KEY_BYTES} random ones or more")
    return key


def _previous_key(path: Path | None) -> bytes:
    """Returns the previous key; empty if there is no file. The file exists only while keys are being rotated."""
    return b"" if path is None or not path.exists() else _operator_key(path)

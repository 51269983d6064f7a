"""The engines and the gateway of a service on one machine: their documents, ports and accelerators. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayloom_operator.api.spec import LLMService
from rayloom_operator.objects.engine_config import engine_config
from rayloom_operator.objects.gateway.config import GATEWAY_ARGS

LOOPBACK = "127.0.0.1"
GATEWAY = "gateway"
KEY_FILE = "key"
_DEVICES = "CUDA_VISIBLE_DEVICES"

# The fields of an engine's document that are also in a gateway's document.
GATEWAY_FIELDS = ("served_model_name", "host", "port", "admin_host", "admin_port", "drain_seconds", *GATEWAY_ARGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The address and the ports of one process. Only an engine has a `front_port`, to which gateways connect."""

    host: str
    port: int
    admin_port: int
    front_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """A process to start. `document` becomes the file that the process gets as `--config`."""

    name: str
    command: str  # command of rayloom-engine: serve or gateway
    place: Ports
    document: Mapping[str, Any]
    environment: Mapping[str, str]  # added to the environment of all processes


def visible_devices(environment: Mapping[str, str], num_present: int) -> tuple[str, ...]:
    """Returns the names of the accelerators that engines may use. `num_present`: the number that the machine has.

    As in CUDA, the first -1 in CUDA_VISIBLE_DEVICES and all names after it are ignored.
    """
    setting = environment.get(_DEVICES)
    names = [str(index) for index in range(num_present)]
    if setting is not None and num_present:
        names = [name.strip() for name in setting.split(",") if name.strip()]
    return tuple(names[: names.index("-1")] if "-1" in names else names)


def replicas_problem(service: LLMService, devices: Sequence[str], ranks_per_gpu: int = 1) -> str | None:
    """Returns the reason why a machine with `devices` cannot run the engines; None if there is no such reason."""
    number = service.spec.replicas
    if number == 0:
        return "spec.replicas: 0 suspends the service; use 1 or more to serve it on this machine"
    if number == 1 or not _uses_devices(service, devices):
        return None
    num_needed = _num_devices(service, ranks_per_gpu)
    most = len(devices) // num_needed
    if number <= most:
        return None
    each = "an accelerator" if num_needed == 1 else f"{num_needed} accelerators"
    cures = [f"use at most {most} replicas" if most else "use a machine with more of them"]
    cures.append("set spec.engine.args.device to cpu")
    if (enough := _enough_on_each(service, len(devices))) is not None:
        cures.append(f"let {enough} ranks of an engine share an accelerator by --ranks-per-gpu {enough}, which is slow")
    *others, last = cures
    return (
        f"spec.replicas: {number} engines need {each} each, and this machine has {len(devices)}; {', '.join(others)}, "
        f"or {last}"
    )


def plan_processes(
    service: LLMService,
    *,
    folder: Path,
    gateway: Ports,
    engines: Sequence[Ports],
    devices: Sequence[str],
    ranks_per_gpu: int = 1,
) -> tuple[ProcessPlan, ...]:
    """Returns the plans of the engines, then the gateway's plan. `folder` contains the key file; the gateway stores
    the tokenizer there.

    Each engine gets as many of the `devices` as it has ranks, or fewer if ranks share devices. The caller checks with
    `replicas_problem` that there are enough devices.
    """
    key = str(folder / KEY_FILE)
    num_own = _num_devices(service, ranks_per_gpu)
    shared = {"engines_on_host": len(engines), **sharing_document(ranks_per_gpu)}
    plans = []
    for index, place in enumerate(engines):
        own = devices[index * num_own : (index + 1) * num_own] if _uses_devices(service, devices) else ()
        front = {"front_host": place.host, "front_port": place.front_port, "front_key_file": key}
        plans.append(
            ProcessPlan(
                name=f"engine-{index}",
                command="serve",
                place=place,
                document={**_engine_document(service, place), **front, **shared},
                environment={_DEVICES: ",".join(own)} if own else {},
            )
        )
    whole = _engine_document(service, gateway)
    document: dict[str, Any] = {name: whole[name] for name in GATEWAY_FIELDS if name in whole}
    document["engines"] = {plan.name: f"{plan.place.host}:{plan.place.front_port}" for plan in plans}
    document |= {"key_file": key, "cache_dir": str(folder / "texts")}
    if service.spec.gateway is not None:
        document["hold_seconds"] = service.spec.gateway.hold_seconds
    own_plan = ProcessPlan(name=GATEWAY, command="gateway", place=gateway, document=document, environment={})
    return (*plans, own_plan)


def sharing_document(ranks_per_gpu: int) -> dict[str, int]:
    """Returns the fields of an engine's document that let its ranks share accelerators. No manifest has such fields."""
    return {"ranks_per_gpu": ranks_per_gpu} if ranks_per_gpu > 1 else {}


def shareable_numbers(tensor: int, pipeline: int) -> tuple[int, ...]:
    """Returns the numbers of ranks per accelerator that an engine with these sizes accepts."""
    num_ranks = tensor * pipeline
    return tuple(
        number
        for number in range(1, num_ranks + 1)
        if num_ranks % number == 0 and (tensor % number == 0 or number % tensor == 0)
    )


def _enough_on_each(service: LLMService, num_devices: int) -> int | None:
    """Returns the least number of ranks per accelerator with which all engines have enough; None if there is none."""
    numbers = shareable_numbers(service.spec.parallelism.tensor or 1, service.spec.parallelism.pipeline or 1)
    enough = (number for number in numbers if service.spec.replicas * _num_devices(service, number) <= num_devices)
    return next(enough, None)


def _engine_document(service: LLMService, place: Ports) -> dict[str, Any]:
    return dict(engine_config(service, host=place.host, port=place.port, admin_port=place.admin_port))


def _num_devices(service: LLMService, ranks_per_gpu: int) -> int:
    """Returns the number of accelerators that an engine's ranks need."""
    num_ranks = (service.spec.parallelism.tensor or 1) * (service.spec.parallelism.pipeline or 1)
    return -(-num_ranks // ranks_per_gpu)


def _uses_devices(service: LLMService, devices: Sequence[str]) -> bool:
    device = service.spec.engine.args.device
    return device == "cuda" or (device != "cpu" and bool(devices))

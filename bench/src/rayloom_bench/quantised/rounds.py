"""Runs `bench quantised`: the machine's bandwidth, greedy answers, then the rounds. One server runs at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from rayloom_bench.child import run_child
from rayloom_bench.client import Failure, Outcome, RequestOptions, run_workload
from rayloom_bench.endpoint import Endpoint, EndpointError
from rayloom_bench.figures import summarise
from rayloom_bench.machine import CpuClock, others_percent
from rayloom_bench.peers.answers.agreement import Ids, answers_of, compare
from rayloom_bench.peers.engines import llama_cpp
from rayloom_bench.peers.engines.contestants import no_fields
from rayloom_bench.peers.engines.installation import Log
from rayloom_bench.peers.engines.shown_command import shown
from rayloom_bench.peers.names import Dialect
from rayloom_bench.peers.rounds import rotated
from rayloom_bench.quantised.files import QuantisedFile
from rayloom_bench.quantised.result import LLAMA, OURS, OURS_INT8, FileResult, QuantisedResult, ServerSample
from rayloom_bench.server import ServerFailed, ServerProcess, free_ports, running_process, running_server
from rayloom_bench.workload import Purpose, Workload, token_prompts

START_S = 300
INT8_KIND = "Q8_0"  # files of this type are also served with int8 weights


@dataclass(frozen=True, slots=True, kw_only=True)
class FileServer:
    """A server of one file, ready to be started."""

    name: str
    shown_command: str
    dialect: Dialect = "vllm"
    fields_of: Callable[[Workload], Mapping[str, object]] = no_fields
    start: Callable[[], AbstractContextManager[ServerProcess]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsPlan:
    """The sizes of a run. `prompts`: prompts whose greedy answers are compared; empty: no comparison."""

    num_rounds: int
    seed: int
    num_threads: int
    vocab_size: int
    prompts: Sequence[Ids] = ()
    ends: frozenset[int] = frozenset()


def servers(file: QuantisedFile, llama: Path, num_threads: int) -> tuple[FileServer, ...]:
    """The servers of a file: this engine, llama.cpp, and for a Q8_0 file also this engine with int8 weights."""
    found = [_ours(OURS, file, num_threads, ()), _llama_cpp(file, llama, num_threads)]
    if file.choice.kind == INT8_KIND:
        found.append(_ours(OURS_INT8, file, num_threads, ("--quantization", "int8")))
    return tuple(found)


def measure(
    files: Sequence[tuple[QuantisedFile, Sequence[FileServer]]], plan: RoundsPlan, result: QuantisedResult, *, log: Log
) -> None:
    """Adds all measurements to `result`. A failed server is recorded there, and all other servers are measured."""
    log("measuring the machine: memory bandwidth")
    rates = run_child("rayloom_bench.limit_probe", {"threads": plan.num_threads}, threads=plan.num_threads)
    result.read_bytes_s = rates["read_bytes_s"]
    for file, of_file in files:
        found = FileResult(file=file)
        result.files.append(found)
        for server in of_file:
            result.commands.setdefault(server.name, server.shown_command)
        if plan.prompts:
            _compare_answers(of_file, plan, found, result, log)
    for number in range(1, plan.num_rounds + 1):
        for (_, of_file), found in zip(files, result.files, strict=True):
            for server in rotated(of_file, number - 1):
                log(f"round {number} of {plan.num_rounds}: {found.file.choice.title}, {server.name}")
                _turn(server, plan, number, found, result)


def _ours(name: str, file: QuantisedFile, num_threads: int, flags: tuple[str, ...]) -> FileServer:
    words = ["--model", str(file.path), "--threads", str(num_threads), *flags]
    return FileServer(
        name=name,
        shown_command=shown(["rayloom-engine", "serve", *words]),
        start=lambda: running_server(words),
    )


def _llama_cpp(file: QuantisedFile, llama: Path, num_threads: int) -> FileServer:
    environment = llama_cpp.environment(os.environ)

    def command(port: int) -> list[str]:
        # Flash attention is on, and continuous batching is llama.cpp's default.
        return [*llama_cpp.command(llama, file.path, num_threads=num_threads, port=port), "-fa", "on"]

    def start() -> AbstractContextManager[ServerProcess]:
        (port,) = free_ports(1)
        return running_process("llama-server", command(port), environment, port=port, ready_path="/health")

    return FileServer(
        name=LLAMA,
        shown_command=shown(command(0)),
        dialect="llama.cpp",
        fields_of=llama_cpp.sampling_fields,
        start=start,
    )


def _compare_answers(
    of_file: Sequence[FileServer], plan: RoundsPlan, found: FileResult, result: QuantisedResult, log: Log
) -> None:
    """Compares the greedy answers of this engine and llama.cpp. The first start of each also fills the file caches."""
    answers: dict[str, tuple[Ids, ...]] = {}
    for server in of_file:
        if server.name not in (OURS, LLAMA):
            continue
        log(f"greedy answers: {found.file.choice.title}, {server.name}")
        try:
            with server.start() as running:
                running.wait_ready(START_S)
                answers[server.name] = answers_of(running.endpoint(), plan.prompts, server.dialect)
        except (ServerFailed, EndpointError) as error:
            name = f"{found.file.choice.title}, {server.name}, greedy answers"
            result.failures.append(Failure(name=name, reason=str(error)))
            return
    found.agreement = compare(answers[OURS], answers[LLAMA], plan.ends)


def _turn(server: FileServer, plan: RoundsPlan, number: int, found: FileResult, result: QuantisedResult) -> None:
    """Starts the server and measures every workload, each after a warm-up of one batch with other prompts."""
    name = f"{found.file.choice.title}, {server.name}, round {number}"
    prompts = Prompts(seed=plan.seed + number, vocab_size=plan.vocab_size)
    try:
        with server.start() as running:
            running.wait_ready(START_S)
            endpoint = running.endpoint()
            for workload in result.workloads:
                failures = prompts.send(endpoint, server, workload.warm_up(), "warm-up").failures
                if not failures:
                    clock, cpu_s = CpuClock.read(), running.cpu_seconds()
                    outcome = prompts.send(endpoint, server, workload, "measured")
                    used_s = running.cpu_seconds() - cpu_s
                    failures = outcome.failures
                if failures:
                    result.failures += failures
                    continue
                figures = summarise(outcome.records)
                sample = ServerSample(
                    output_tok_s=figures.output_tok_s, cpu_ms_per_token=1e3 * used_s / figures.output_tokens
                )
                found.add(server.name, workload.name, number, sample)
                result.most_disturbed_percent = max(result.most_disturbed_percent, _disturbed_percent(clock, used_s))
    except (ServerFailed, EndpointError, psutil.Error) as error:
        result.failures.append(Failure(name=name, reason=str(error)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts of one round."""

    seed: int
    vocab_size: int

    def send(self, endpoint: Endpoint, server: FileServer, workload: Workload, purpose: Purpose) -> Outcome:
        """Sends the workload's prompts for this purpose, and returns when all are answered or failed."""
        prompts = token_prompts(workload, seed=self.seed, vocab_size=self.vocab_size, purpose=purpose)
        # llama-server closes connections after an answer, so every server gets a new connection for each request.
        options = RequestOptions(extra_fields=server.fields_of(workload), reuses_connections=False)
        label = f"{server.name}, {workload.name}, {purpose}"
        return run_workload(endpoint, workload, prompts, label=label, options=options)


def _disturbed_percent(clock: CpuClock, used_s: float) -> float:
    """Share of the CPU time since `clock` that neither this process nor the server used."""
    after = CpuClock.read()
    return others_percent(clock, replace(after, own_s=after.own_s + used_s), psutil.cpu_count() or 1)

"""Runs `bench peers`: the machine's limit, the answers of every engine, then the rounds. One engine runs at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import psutil

from rayloom_bench.child import run_child
from rayloom_bench.client import Failure, RequestOptions, run_workload
from rayloom_bench.endpoint import Endpoint, EndpointError
from rayloom_bench.figures import summarise
from rayloom_bench.limit import MachineRates, model_cost
from rayloom_bench.machine import CpuClock, others_percent
from rayloom_bench.peers.answers.agreement import Ids, answers_of, compare, end_ids, reference_answers
from rayloom_bench.peers.answers.greedy_prompts import prompts as greedy_prompts
from rayloom_bench.peers.engines.contestants import MODEL, Contestant
from rayloom_bench.peers.engines.installation import Log, peers_folder
from rayloom_bench.peers.names import OURS_FP32
from rayloom_bench.peers.neighbour import STREAM, measure_neighbour
from rayloom_bench.peers.result import PeersResult, Turn
from rayloom_bench.peers.settings import PeersSettings
from rayloom_bench.server import ServerFailed
from rayloom_bench.start_up import start_to_first_token_s
from rayloom_bench.workload import Workload, token_prompts
from rayloom_engine.models.checkpoint.source import resolve
from rayloom_engine.models.shape import read_shape

START_S = 900  # vLLM compiles the model at its first start
ELEMENT_BYTES = 2  # bytes of a bfloat16 number
SWEEP_ROUND = 0  # round number of the sweeps' turns; prompts differ from round to round

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """The measurements of one turn, between an engine's start and its end."""

    workloads: tuple[Workload, ...]
    round_number: int
    seed: int
    vocab_size: int
    neighbour_s: float = 0.0  # 0: no stream beside a busy process


def measure(settings: PeersSettings, contestants: Sequence[Contestant], result: PeersResult, *, log: Log) -> None:
    """Adds all measurements to `result`. A failed engine is recorded there, and the other engines are still measured.

    Raises EngineError if the machine or the reference cannot be measured.
    """
    folder = resolve(MODEL).path
    shape = read_shape(folder)
    num_cores = len(settings.cores)
    log("measuring the machine: memory bandwidth and matrix products")
    result.rates = MachineRates(**run_child("rayloom_bench.limit_probe", {"threads": num_cores}, threads=num_cores))
    result.cost = model_cost(
        num_parameters=shape.num_parameters,
        num_head_parameters=shape.vocab_size * shape.hidden_size,
        element_bytes=ELEMENT_BYTES,
        is_tied=shape.tie_word_embeddings,
    )
    if settings.compares_answers:
        prompts = greedy_prompts(folder)
        log(f"greedy answers of transformers in float32 to {len(prompts)} prompts")
        reference = reference_answers(folder, prompts, threads=num_cores, cache=peers_folder(os.environ))
        for contestant in contestants:
            _compare_answers(contestant, prompts, reference, end_ids(folder), result, log)
    measured = [each for each in contestants if each.name != OURS_FP32]
    measure_rounds(settings, measured, shape.vocab_size, result, log=log)


def measure_rounds(
    settings: PeersSettings, contestants: Sequence[Contestant], vocab_size: int, result: PeersResult, *, log: Log
) -> None:
    """Adds the turns of all rounds, then those of the sweeps, to `result`."""
    for number in range(1, settings.num_rounds + 1):
        for contestant in rotated(contestants, number - 1):
            log(f"round {number} of {settings.num_rounds}: {contestant.title}")
            plan = TurnPlan(
                workloads=tuple(each for each in settings.workloads if each.name in contestant.workload_names),
                round_number=number,
                seed=settings.seed + number,
                vocab_size=vocab_size,
                neighbour_s=settings.neighbour_s,
            )
            result.turns += _turn(contestant, plan, result)
    for contestant in contestants:
        sweeps = tuple(each for each in settings.sweeps if each.name in contestant.workload_names)
        if sweeps:
            log(f"sweeps: {contestant.title}")
            plan = TurnPlan(workloads=sweeps, round_number=SWEEP_ROUND, seed=settings.seed, vocab_size=vocab_size)
            result.sweep_turns += _turn(contestant, plan, result)


def rotated(items: Sequence[T], by: int) -> tuple[T, ...]:
    """Returns the items from index `by` on, then the items before it, so that each round begins with another engine."""
    start = by % len(items) if items else 0
    return (*items[start:], *items[:start])


def _compare_answers(
    contestant: Contestant,
    prompts: Sequence[Ids],
    reference: Sequence[Ids],
    ends: frozenset[int],
    result: PeersResult,
    log: Log,
) -> None:
    """Starts an engine for the first time, and compares its answers.

    The start also fills the caches of compiled code and of files.
    """
    log(f"greedy answers: {contestant.title}")
    try:
        with contestant.start() as server:
            server.wait_ready(START_S)
            answers = answers_of(server.endpoint(), prompts, contestant.dialect)
    except (ServerFailed, EndpointError) as error:
        result.failures.append(Failure(name=f"{contestant.title}, greedy answers", reason=str(error)))
        return
    result.agreements[contestant.name] = compare(answers, reference, ends)


def _turn(contestant: Contestant, plan: TurnPlan, result: PeersResult) -> list[Turn]:
    """The engine's turn as the only item of a list; an empty list if the engine failed. Records failures."""
    before = CpuClock.read()
    try:
        with contestant.start() as server:
            turn = Turn(
                engine=contestant.name,
                round_number=plan.round_number,
                start_to_first_token_s=start_to_first_token_s(server, START_S),
            )
            endpoint = server.endpoint()
            for workload in plan.workloads:
                result.failures += _measure_workload(endpoint, contestant, workload, plan, turn)
                turn.pss_bytes = turn.pss_after[workload.name] = server.pss_bytes()
            if plan.neighbour_s:
                options = _options(contestant, STREAM)
                turn.neighbour = measure_neighbour(
                    endpoint, options, seed=plan.seed, vocab_size=plan.vocab_size, seconds=plan.neighbour_s
                )
            # The CPU time is read while the server runs. When vLLM ends, it may kill its processes, and then no counter
            # has their CPU time.
            clock = CpuClock.read()
            after = replace(clock, own_s=clock.own_s + server.cpu_seconds())
    except (ServerFailed, EndpointError, psutil.Error) as error:
        result.failures.append(Failure(name=f"{contestant.title}, round {plan.round_number}", reason=str(error)))
        return []
    turn.others_percent = others_percent(before, after, psutil.cpu_count() or 1)
    return [turn]


def _measure_workload(
    endpoint: Endpoint, contestant: Contestant, workload: Workload, plan: TurnPlan, turn: Turn
) -> Sequence[Failure]:
    """Warms up with one batch of other prompts, then measures. Every round has prompts of its own."""
    options = _options(contestant, workload)
    label = f"{contestant.name}, round {turn.round_number}"
    warm_up = workload.warm_up()
    prompts = token_prompts(warm_up, seed=plan.seed, vocab_size=plan.vocab_size, purpose="warm-up")
    outcome = run_workload(endpoint, warm_up, prompts, label=f"{label}, warm-up", options=options)
    if outcome.failures:
        return outcome.failures
    prompts = token_prompts(workload, seed=plan.seed, vocab_size=plan.vocab_size)
    outcome = run_workload(endpoint, workload, prompts, label=label, options=options)
    if outcome.failures:
        return outcome.failures
    turn.figures[workload.name] = summarise(outcome.records)
    turn.records[workload.name] = outcome.records
    return ()


def _options(contestant: Contestant, workload: Workload) -> RequestOptions:
    # llama-server closes connections after an answer, so every engine gets a new connection for each request.
    return RequestOptions(extra_fields=contestant.fields_of(workload), reuses_connections=False)

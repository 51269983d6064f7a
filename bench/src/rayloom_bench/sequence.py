"""Runs the measurements in order: the machine's limit, the server, then each peer, never two at the same time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import psutil
from tqdm import tqdm

from rayloom_bench.child import ChildFailed, run_child
from rayloom_bench.client import Failure, Outcome, Prompt, RequestOptions, run_workload
from rayloom_bench.endpoint import Endpoint, authorization, first_model_name
from rayloom_bench.figures import summarise
from rayloom_bench.limit import MachineRates, ModelCost, model_cost
from rayloom_bench.machine import (
    BUSY_WARNING_PERCENT,
    CpuClock,
    busy_percent,
    others_percent,
    package_versions,
    processor_name,
)
from rayloom_bench.peer import run_transformers
from rayloom_bench.result import Measured, Memory, Peer, RunResult, StartUp
from rayloom_bench.server import running_server
from rayloom_bench.settings import BenchSettings
from rayloom_bench.start_up import start_to_first_token_s
from rayloom_bench.text_prompts import text_prompts, token_counter
from rayloom_bench.workload import Purpose, Workload, token_prompts
from rayloom_engine.models.checkpoint.source import resolve
from rayloom_engine.models.shape import ModelShape, read_shape

FIRST_START_S = 1800  # seconds; the first start may download and convert the model
SECOND_START_S = 300
UNKNOWN_VOCAB_SIZE = 32000  # the smallest of today's common vocabularies
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

Log = Callable[[str], None]
MakePrompts = Callable[[Workload, Purpose], Sequence[Prompt]]


def measure(settings: BenchSettings, api_key: str | None, *, log: Log) -> RunResult:
    """Does the whole run. Failed requests and peers are in the result. Raises EngineError for all other failures."""
    busy = busy_percent()
    result = RunResult(
        about={
            "processor": processor_name(),
            "threads": settings.threads,
            "busy_percent_before": busy,
            "versions": package_versions(),
            "seed": settings.seed,
            "scale": settings.scale,
            "url": settings.url,
            "model": settings.model,
            "serve_flags": list(settings.serve_flags),
        },
        workloads=settings.workloads,
    )
    log(f"prompts from seed {settings.seed}, {settings.threads} threads")
    if busy > BUSY_WARNING_PERCENT:
        log(
            f"warning: other processes keep {busy:.0f} % of this machine busy; neither figures nor ratios will be right"
        )
    if settings.measures_limit:
        log("measuring the machine: memory bandwidth and matrix products")
        module = "rayloom_bench.limit_probe"
        result.rates = MachineRates(**run_child(module, {"threads": settings.threads}, threads=settings.threads))
    if settings.url is None:
        _measure_own_engine(settings, result, log)
    else:
        _measure_url(settings, settings.url, api_key, result, log)
    if settings.compares:
        for dtype in settings.compare_dtypes:
            _measure_transformers(settings, dtype, result, log)
    return result


def _measure_own_engine(settings: BenchSettings, result: RunResult, log: Log) -> None:
    assert settings.model is not None  # for mypy: without a URL, BenchSettings has a checkpoint
    flags = ["--model", settings.model, "--dtype", settings.dtype, "--threads", str(settings.threads)]
    if settings.revision is not None:
        flags += ["--revision", settings.revision]
    if settings.served_model_name is not None:
        flags += ["--served-model-name", settings.served_model_name]
    # The result's label and cost are for dense weights, but by default a GGUF file's weights would stay quantised.
    flags += ["--quantization", "none", *settings.serve_flags]

    log("first start of rayloom-engine serve (converts the model if it is not converted yet)")
    with running_server(flags) as server:
        first_s = start_to_first_token_s(server, FIRST_START_S)
    log("second start, measured")
    before = CpuClock.read()
    with running_server(flags) as server:
        second_s = start_to_first_token_s(server, SECOND_START_S)
        cpu_s = server.cpu_seconds_by_process()
        status = server.status()
        result.start_up = StartUp(
            first_s=first_s,
            second_s=second_s,
            phases={phase.name: phase.seconds for phase in status.startup},
            cpu_s=cpu_s,
        )
        assert status.model is not None  # for mypy: the engine has just answered a request
        dtype = status.model.dtype
        compute_dtype = status.model.compute_dtype
        shape = read_shape(_folder(settings))
        result.cost = _cost(shape, settings.weight_bytes, ELEMENT_BYTES[dtype])
        result.ours = f"rayloom {SHORT_DTYPES[dtype]}"
        if compute_dtype != dtype:
            result.ours += f" (computes in {SHORT_DTYPES[compute_dtype]})"
        result.about["server"] = {**status.model.model_dump(), "engine_version": status.engine_version}
        # Memory is read after W1, or after the first workload of a run without W1.
        memory_after = next((each for each in settings.workloads if each.name == "W1"), settings.workloads[0])
        make_prompts = _token_prompt_maker(settings, shape.vocab_size)
        for workload in settings.workloads:
            _measure_workload(server.endpoint(), workload, make_prompts, settings, result, log)
            if workload is memory_after:
                result.memory = Memory(after=workload.name, pss_bytes=server.pss_bytes())
    _note_others(result, result.ours, before)


def _measure_url(settings: BenchSettings, url: str, api_key: str | None, result: RunResult, log: Log) -> None:
    headers = authorization(api_key)
    endpoint = Endpoint(
        base_url=url, model_name=settings.served_model_name or first_model_name(url, headers), headers=headers
    )
    result.ours = settings.name or urlsplit(url).netloc
    shape = None if settings.model is None else read_shape(_folder(settings))
    dtype = settings.dtype if settings.dtype != "auto" or shape is None else shape.checkpoint_dtype
    result.cost = _cost(shape, settings.weight_bytes, ELEMENT_BYTES.get(dtype, 2))
    if settings.uses_text:
        make_prompts = _text_prompt_maker(settings, endpoint)
    else:
        make_prompts = _token_prompt_maker(settings, UNKNOWN_VOCAB_SIZE if shape is None else shape.vocab_size)
    for workload in settings.workloads:
        _measure_workload(endpoint, workload, make_prompts, settings, result, log)


def _measure_workload(
    endpoint: Endpoint,
    workload: Workload,
    make_prompts: MakePrompts,
    settings: BenchSettings,
    result: RunResult,
    log: Log,
) -> None:
    """Warms up with one batch of other prompts, then measures. A workload with a failed request gets no figures."""
    log(f"{result.ours}, {workload.name}: {workload.description}")
    options = RequestOptions(ignores_eos=settings.ignores_eos)
    warm_up = workload.warm_up()
    outcome = run_workload(endpoint, warm_up, make_prompts(warm_up, "warm-up"), label="warm-up", options=options)
    if not outcome.failures:
        prompts = make_prompts(workload, "measured")
        with _bar(f"{result.ours} {workload.name}", len(prompts)) as bar:
            outcome = run_workload(endpoint, workload, prompts, options=options, on_finished=bar.update)
        _add(result, workload, result.ours, outcome)
    result.failures += outcome.failures


def _add(result: RunResult, workload: Workload, engine: str, outcome: Outcome) -> None:
    if not outcome.failures:
        figures = summarise(outcome.records)
        result.add(workload, Measured(engine=engine, figures=figures, records=outcome.records))


def _measure_transformers(settings: BenchSettings, dtype: str, result: RunResult, log: Log) -> None:
    engine = f"transformers {SHORT_DTYPES[dtype]}, static batches"
    log(f"{engine}: " + ", ".join(workload.name for workload in settings.workloads))
    folder = _folder(settings)
    vocab_size = settings.vocab_size or read_shape(folder).vocab_size
    prompts = [
        (workload, token_prompts(workload, seed=settings.seed, vocab_size=vocab_size))
        for workload in settings.workloads
    ]
    before = CpuClock.read()
    try:
        with _bar(engine, sum(workload.num_requests for workload in settings.workloads)) as bar:
            peer = run_transformers(
                folder,
                dtype,
                prompts,
                threads=settings.threads,
                on_progress=lambda done: bar.update(done - bar.n),
            )
    except ChildFailed as error:
        # A failed peer does not end the run: the figures of the server are still printed.
        result.failures.append(Failure(name=engine, reason=str(error)))
        return
    _note_others(result, engine, before)
    result.peers[engine] = Peer(load_s=peer.load_s, version=peer.version, pss_bytes=peer.pss_bytes)
    for workload, _ in prompts:
        records = peer.records[workload.name]
        result.add(workload, Measured(engine=engine, figures=summarise(records), records=records))


def _note_others(result: RunResult, engine: str, before: CpuClock) -> None:
    """Records the CPU time of other processes.

    Call it after `engine` has ended, because a running `engine` would count as another process.
    """
    result.others_percent[engine] = others_percent(before, CpuClock.read(), psutil.cpu_count() or 1)


def _cost(shape: ModelShape | None, weight_bytes: int | None, element_bytes: int) -> ModelCost | None:
    """The cost of a forward pass, or None if the model is unknown. Without a shape all weights count as layers."""
    if shape is None and weight_bytes is None:
        return None
    if shape is None:
        assert weight_bytes is not None  # for mypy: the case above has returned
        return model_cost(
            num_parameters=weight_bytes // element_bytes,
            num_head_parameters=0,
            element_bytes=element_bytes,
            is_tied=True,
        )
    cost = model_cost(
        num_parameters=shape.num_parameters,
        num_head_parameters=shape.vocab_size * shape.hidden_size,
        element_bytes=element_bytes,
        is_tied=shape.tie_word_embeddings,
    )
    return cost if weight_bytes is None else dataclasses.replace(cost, weight_bytes=weight_bytes)


def _token_prompt_maker(settings: BenchSettings, known_vocab_size: int) -> MakePrompts:
    vocab_size = settings.vocab_size or known_vocab_size
    return lambda workload, purpose: token_prompts(workload, seed=settings.seed, vocab_size=vocab_size, purpose=purpose)


def _text_prompt_maker(settings: BenchSettings, endpoint: Endpoint) -> MakePrompts:
    count_tokens = token_counter(endpoint)
    return lambda workload, purpose: text_prompts(
        workload, seed=settings.seed, count_tokens=count_tokens, purpose=purpose
    )


def _folder(settings: BenchSettings) -> Path:
    assert settings.model is not None  # for mypy: the callers have checked this
    return resolve(settings.model, settings.revision).path


@contextmanager
def _bar(title: str, total: int) -> Iterator[tqdm[NoReturn]]:
    """A progress bar on stderr, without output if stderr is not a terminal."""
    with tqdm(total=total, desc=title, unit="req", disable=None, leave=False) as bar:
        yield bar

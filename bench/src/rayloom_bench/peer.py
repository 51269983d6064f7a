"""Measures `generate` of transformers on the same prompts in static batches: the parent process's side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayloom_bench.child import run_child
from rayloom_bench.figures import RequestRecord
from rayloom_bench.workload import Workload

MODULE = "rayloom_bench.peer_transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """The figures of a peer. Maps have the workloads' names as keys."""

    load_s: float
    version: str
    records: Mapping[str, tuple[RequestRecord, ...]]
    pss_bytes: Mapping[str, int]  # memory of the peer's only process, after the workload


def run_transformers(
    folder: Path,
    dtype: str,
    prompts: Sequence[tuple[Workload, Sequence[Sequence[int]]]],
    *,
    threads: int,
    on_progress: Callable[[int], object] = lambda done: None,
) -> PeerResult:
    """Measures in a fresh process, one batch after another, each as large as the workload's concurrency.

    `on_progress` gets the number of finished requests. Raises ChildFailed.
    """
    job = {
        "folder": str(folder),
        "dtype": dtype,
        "threads": threads,
        "workloads": [
            {
                "name": workload.name,
                "batch_size": workload.concurrency,
                "num_output": workload.num_output,
                "prompts": [list(prompt) for prompt in ids],
            }
            for workload, ids in prompts
        ],
    }
    result = run_child(MODULE, job, threads=threads, on_progress=on_progress)
    return PeerResult(
        load_s=result["load_s"],
        version=result["version"],
        records={
            workload.name: batch_records(workload, ids, result["workloads"][workload.name]["batches"])
            for workload, ids in prompts
        },
        pss_bytes={workload.name: result["workloads"][workload.name]["pss_bytes"] for workload, _ in prompts},
    )


def batch_records(
    workload: Workload, prompts: Sequence[Sequence[int]], batches: Sequence[Mapping[str, list[float]]]
) -> tuple[RequestRecord, ...]:
    """One record per request. All requests of a static batch start, receive tokens and end at the same times.

    A batch is `{"start_s": [t], "steps_s": [t, ...], "end_s": [t]}`.
    """
    records = []
    for index, prompt in enumerate(prompts):
        batch = batches[index // workload.concurrency]
        steps_s = tuple(batch["steps_s"])
        records.append(
            RequestRecord(
                index=index,
                num_prompt=len(prompt),
                num_output=len(steps_s),
                start_s=batch["start_s"][0],
                arrivals_s=steps_s,
                last_s=steps_s[-1],
                end_s=batch["end_s"][0],
            )
        )
    return tuple(records)

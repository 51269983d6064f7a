"""The goals of the CPU engine in comparison with its peers, and whether a run meets them. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayloom_bench.peers.names import LLAMA_BF16, OURS, OURS_FP32, PEERS, VLLM
from rayloom_bench.peers.report import comparison
from rayloom_bench.peers.result import PeersResult
from rayloom_bench.spread import Spread, spread

GOAL_RATIO = 1.5
SAMPLED_RATIO = 0.95
JSON_RATIO = 0.97
START_S = 2.0
PSS_BYTES = 1.5e9
LIMIT_SHARE = 0.6  # least share of the machine's limit, at W1
PEER_TOLERANCE = 0.1
NEIGHBOUR_SHARE = 0.4  # least speed of one stream beside a busy process, as a share of the speed without this process

# (workload, peers, required ratio of our median to the best median of these peers)
REQUIRED_RATIOS = (
    ("W1", (VLLM,), 1.35),
    ("W2", (VLLM,), 1.5),
    ("W3", PEERS, 1.5),
    ("W4", (VLLM,), 1.25),
)
LATENCY_WORKLOADS = ("W1", "W4")

# Output tokens per second of the peers' pinned versions in earlier runs, on two cores of an AMD EPYC (Zen 5) with
# AVX-512 bf16. If a peer's figures on such a processor are far lower, the peer is not tuned.
EARLIER_TOK_S = {
    VLLM: {"W1": 570.0, "W2": 546.0, "W3": 94.0, "W4": 30.5},
    LLAMA_BF16: {"W1": 319.0, "W3": 118.0},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One goal and its value in a run."""

    text: str
    value: str
    is_met: bool | None  # None: the run has no value for it

    @property
    def verdict(self) -> str:
        return "not measured" if self.is_met is None else "met" if self.is_met else "missed"


def goals(result: PeersResult) -> tuple[Goal, ...]:
    """All goals, in the order of the page."""
    found = (*_throughput(result), *_latencies(result), *_start_and_memory(result), *_answers(result))
    return (*found, _neighbour(result))


def peer_checks(result: PeersResult) -> tuple[Goal, ...]:
    """The peers' medians, compared with the figures of EARLIER_TOK_S, for the workloads of this run."""
    checks = []
    for engine, by_workload in EARLIER_TOK_S.items():
        for workload, earlier in by_workload.items():
            found = spread(comparison.tok_s_by_round(result, engine, workload).values())
            if found is not None:
                checks.append(
                    Goal(
                        text=f"{result.engines[engine].title}, {workload}: {earlier:g} tok/s before",
                        value=f"{found.median:.4g} tok/s, {found.median / earlier:.2f}x",
                        is_met=abs(found.median / earlier - 1) <= PEER_TOLERANCE,
                    )
                )
    return tuple(checks)


def _throughput(result: PeersResult) -> list[Goal]:
    found = []
    for workload, others, required in REQUIRED_RATIOS:
        ratio = comparison.ratio(result, OURS, others, workload)
        names = "the best peer" if len(others) > 1 else "vLLM"
        found.append(_goal(f"{workload}: at least {required}x {names}, required", ratio, operator.ge, required))
        if required < GOAL_RATIO:
            found.append(_goal(f"{workload}: at least {GOAL_RATIO}x {names}", ratio, operator.ge, GOAL_RATIO))
    sampled = comparison.workload_ratio(result, OURS, "W1s", "W1")
    found.append(_goal(f"W1 with sampling: at least {SAMPLED_RATIO}x greedy W1", sampled, operator.ge, SAMPLED_RATIO))
    forced = comparison.workload_ratio(result, OURS, "W1j", "W1")
    found.append(_goal(f"W1 with JSON answers: at least {JSON_RATIO}x W1", forced, operator.ge, JSON_RATIO))
    w1 = next((workload for workload in result.workloads if workload.name == "W1"), None)
    share = None if w1 is None else comparison.share_of_limit(result, OURS, w1)
    found.append(_goal(f"W1: at least {LIMIT_SHARE}x the machine's limit", share, operator.ge, LIMIT_SHARE))
    return found


def _latencies(result: PeersResult) -> list[Goal]:
    found = []
    for workload in LATENCY_WORKLOADS:
        ours = comparison.latency(result, OURS, workload)
        theirs = [each for peer in PEERS if (each := comparison.latency(result, peer, workload)) is not None]
        found.append(
            _no_worse(
                f"{workload}: TTFT p50 no longer than that of the best peer",
                None if ours is None else ours.ttft_p50_ms,
                [each.ttft_p50_ms for each in theirs],
            )
        )
        found.append(
            _no_worse(
                f"{workload}: ITL p99 no longer than that of the best peer",
                None if ours is None else ours.itl_p99_ms,
                [each.itl_p99_ms for each in theirs if each.itl_p99_ms is not None],
            )
        )
    return found


def _start_and_memory(result: PeersResult) -> list[Goal]:
    start_s = comparison.start_s(result, OURS)
    pss = comparison.pss_bytes(result, OURS)
    return [
        Goal(
            text=f"start to first token: less than {START_S:g} s",
            value="" if start_s is None else f"{start_s.median:.2f} s",
            is_met=None if start_s is None else start_s.median < START_S,
        ),
        Goal(
            text=f"PSS of all processes after all workloads: less than {PSS_BYTES / 1e9:g} GB",
            value="" if pss is None else f"{pss.largest / 1e9:.2f} GB",
            is_met=None if pss is None else pss.largest < PSS_BYTES,
        ),
    ]


def _answers(result: PeersResult) -> list[Goal]:
    ours = result.agreements.get(OURS)
    theirs = result.agreements.get(LLAMA_BF16)
    exact = result.agreements.get(OURS_FP32)
    return [
        Goal(
            text="bf16 answers equal to float32: at least as many as those of llama.cpp in bf16",
            value="" if ours is None or theirs is None else f"{ours.num_equal} against {theirs.num_equal}",
            is_met=None if ours is None or theirs is None else ours.num_equal >= theirs.num_equal,
        ),
        Goal(
            text="float32 answers equal to those of transformers: all",
            value="" if exact is None else f"{exact.num_equal} of {exact.num_prompts}",
            is_met=None if exact is None else exact.num_equal == exact.num_prompts,
        ),
    ]


def _neighbour(result: PeersResult) -> Goal:
    share = comparison.neighbour_share(result, OURS)
    text = f"W3 beside a busy process: at least {NEIGHBOUR_SHARE}x its speed alone"
    return _goal(text, share, operator.ge, NEIGHBOUR_SHARE)


def _goal(text: str, ratio: Spread | None, holds: Callable[[float, float], bool], bound: float) -> Goal:
    if ratio is None:
        return Goal(text=text, value="", is_met=None)
    return Goal(text=text, value=f"{ratio.median:.2f}x", is_met=holds(ratio.median, bound))


def _no_worse(text: str, ours: float | None, theirs: Sequence[float]) -> Goal:
    if ours is None or not theirs:
        return Goal(text=text, value="", is_met=None)
    return Goal(text=text, value=f"{ours:.1f} ms against {min(theirs):.1f} ms", is_met=ours <= min(theirs))

"""Formats the result of `bench peers` as a Markdown page. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rayloom_bench.markdown import NO_VALUE, number, spread_text, table
from rayloom_bench.peers.names import OURS, PEERS
from rayloom_bench.peers.report import comparison
from rayloom_bench.peers.report.goals import Goal, goals, peer_checks
from rayloom_bench.peers.report.roofline import Curve, decode_curves, prefill_curves
from rayloom_bench.peers.result import PeersResult
from rayloom_bench.spread import spread
from rayloom_bench.workload import Workload

THROUGHPUT_PLOT = "peers-throughput.svg"
ROOFLINE_PLOT = "peers-roofline.svg"
DISTURBED_PERCENT = 5
NEIGHBOUR_NOTE = (
    "Tokens per second of one stream with the lengths of W3, first alone and then while another process computes "
    "without a pause on the same cores, at the same priority. *Share*: the speed beside it divided by the speed alone, "
    "within a round."
)


def page(result: PeersResult, *, has_plots: bool) -> str:
    """The whole page: conditions, goals, throughput, ratios, latency, start and memory, answers, sweeps, commands."""
    parts = [
        "# CPU engines side by side",
        conditions(result),
        "## Goals",
        goal_table(goals(result)),
        "## Output tokens per second",
        "Each cell: median of all rounds (minimum to maximum).",
        throughput_table(result),
        *([f"![Output tokens per second by workload]({THROUGHPUT_PLOT})"] if has_plots else []),
        "## Ratios",
        "A ratio is rayloom's output tokens per second, divided by the other engine's in the same round. Each cell: "
        "median of all rounds (minimum to maximum). *Share of the limit*: an engine's tokens per second, divided by "
        "the machine's limit.",
        ratio_table(result),
        "## Latency",
        "Milliseconds, over the requests of all rounds.",
        latency_table(result),
        "## Start, memory, answers",
        "*Answers*: greedy answers that are equal to those of transformers in float32, and the mean number of tokens "
        "before the first difference or the end. *Memory*: PSS of all processes after the last workload.",
        engine_table(result),
        "## Memory after each workload",
        "PSS in MB, median of all rounds; the workloads run in this order.",
        memory_table(result),
    ]
    if any(turn.neighbour is not None for turn in result.turns):
        parts += ["## One stream beside a busy process", NEIGHBOUR_NOTE, neighbour_table(result)]
    if result.sweep_turns:
        parts += ["## Batch sizes and prompt lengths", "Tokens per second of one run of each engine."]
        parts += [*([f"![Decode and prefill beside the limit]({ROOFLINE_PLOT})"] if has_plots else [])]
        parts += [sweep_table("batch", decode_curves(result)), sweep_table("prompt tokens", prefill_curves(result))]
    checks = peer_checks(result)
    if checks:
        parts += [
            "## Peers beside earlier figures",
            "Earlier figures are of the same versions on 2 cores of an AMD EPYC with AVX-512 bf16. Goal: within 10 %.",
            goal_table(checks),
        ]
    parts += ["## Commands", commands(result)]
    if result.failures:
        parts += ["## Failures", "\n".join(f"- {each.name}: {_first_line(each.reason)}" for each in result.failures)]
    return "\n\n".join(parts) + "\n"


def conditions(result: PeersResult) -> str:
    """The machine, the versions, the rounds, and the CPU time that other processes used."""
    about = result.about
    lines = [f"{about['processor']}, {about['num_cores']} cores, {about['date']}. {about['versions']}."]
    if result.rates is not None:
        rates = result.rates
        lines.append(
            f"The machine reads {rates.read_bytes_s / 1e9:.1f} GB/s and computes {rates.fp32_flop_s / 1e9:.0f} GFLOP/s "
            f"in fp32 and {rates.bf16_flop_s / 1e9:.0f} in bf16."
        )
    lines.append(f"Rounds: {about['num_rounds']}, seed {about['seed']}, scale {about['scale']}.")
    lines.append("Workloads:")
    lines += [f"{workload.name}: {workload.description};" for workload in result.workloads]
    lines[-1] = lines[-1].removesuffix(";") + "."
    shares = [turn.others_percent for turn in (*result.turns, *result.sweep_turns)]
    if shares:
        distrust = " **DISTURBED: do not quote these figures.**" if max(shares) > DISTURBED_PERCENT else ""
        busy = f"Other processes used up to {max(shares):.0f} % of the CPU time while an engine was measured."
        lines.append(busy + distrust)
    return "\n".join(lines)


def goal_table(found: Sequence[Goal]) -> str:
    return table(("goal", "value", ""), ((each.text, each.value or NO_VALUE, each.verdict) for each in found))


def throughput_table(result: PeersResult) -> str:
    rows = [
        (
            result.engines[engine].title,
            *(
                spread_text(spread(comparison.tok_s_by_round(result, engine, workload.name).values()))
                for workload in result.workloads
            ),
        )
        for engine in _measured(result)
    ]
    limits = [comparison.limit_tok_s(result, workload) for workload in result.workloads]
    rows.append(("machine limit", *(NO_VALUE if limit is None else number(limit) for limit in limits)))
    return table(("", *_names(result.workloads)), rows)


def ratio_table(result: PeersResult) -> str:
    def row(title: str, others: Sequence[str]) -> tuple[str, ...]:
        ratios = (comparison.ratio(result, OURS, others, workload.name) for workload in result.workloads)
        return (title, *(spread_text(each, unit="x") for each in ratios))

    rows = [row(f"rayloom / {result.engines[peer].title}", [peer]) for peer in PEERS if peer in result.engines]
    rows.append(row("rayloom / best peer", [peer for peer in PEERS if peer in result.engines]))
    for engine in _measured(result):
        shares = (comparison.share_of_limit(result, engine, workload) for workload in result.workloads)
        rows.append((f"share of the limit, {result.engines[engine].title}", *(spread_text(each) for each in shares)))
    return table(("", *_names(result.workloads)), rows)


def latency_table(result: PeersResult) -> str:
    rows = []
    for workload in result.workloads:
        for engine in _measured(result):
            found = comparison.latency(result, engine, workload.name)
            if found is not None:
                values = (found.ttft_p50_ms, found.ttft_p99_ms, found.itl_p50_ms, found.itl_p99_ms)
                numbers = (NO_VALUE if value is None else number(value) for value in values)
                rows.append((workload.name, result.engines[engine].title, *numbers))
    return table(("", "", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"), rows)


def engine_table(result: PeersResult) -> str:
    rows = []
    for engine, facts in result.engines.items():
        pss = comparison.pss_bytes(result, engine)
        agreement = result.agreements.get(engine)
        rows.append(
            (
                facts.title,
                spread_text(comparison.start_s(result, engine)),
                NO_VALUE if pss is None else f"{pss.largest / 1e9:.2f}",
                NO_VALUE if agreement is None else f"{agreement.num_equal} of {agreement.num_prompts}",
                NO_VALUE if agreement is None else f"{agreement.mean_length:.1f}",
            )
        )
    return table(("", "start to first token, s", "memory, GB", "answers equal", "equal tokens, mean"), rows)


def memory_table(result: PeersResult) -> str:
    """A row for each process of this engine, and a row with the sum of each engine."""
    columns = _names(result.workloads)
    rows = []
    for engine in _measured(result):
        by_workload = [comparison.memory_bytes(result, engine, name) for name in columns]
        title = result.engines[engine].title
        if engine == OURS:
            processes = list(dict.fromkeys(name for found in by_workload for name in found))
            rows += [(f"{title}, {name}", *_megabytes(found.get(name) for found in by_workload)) for name in processes]
        rows.append((f"{title}, all", *_megabytes(sum(found.values()) or None for found in by_workload)))
    return table(("", *columns), rows)


def neighbour_table(result: PeersResult) -> str:
    """A row for each engine that was measured beside a busy process."""
    rows = []
    for engine in _measured(result):
        found = [turn.neighbour for turn in result.turns_of(engine) if turn.neighbour is not None]
        if found:
            alone = spread(each.alone_tok_s for each in found)
            beside = spread(each.beside_tok_s for each in found)
            share = comparison.neighbour_share(result, engine)
            rows.append((result.engines[engine].title, *(spread_text(each) for each in (alone, beside, share))))
    return table(("", "alone, tok/s", "beside it, tok/s", "share"), rows)


def sweep_table(x_name: str, curves: Sequence[Curve]) -> str:
    xs = sorted({x for curve in curves for x in curve.x})
    rows = []
    for x in xs:
        by_curve = (dict(zip(curve.x, curve.tok_s, strict=True)).get(x) for curve in curves)
        rows.append((str(x), *(NO_VALUE if value is None else number(value) for value in by_curve)))
    return table((x_name, *(curve.label for curve in curves)), rows)


def commands(result: PeersResult) -> str:
    lines = [str(result.about["command"]), *(facts.shown_command for facts in result.engines.values())]
    return "```text\n" + "\n".join(lines) + "\n```"


def _measured(result: PeersResult) -> tuple[str, ...]:
    """The engines with at least one turn."""
    engines = {turn.engine for turn in result.turns}
    return tuple(engine for engine in result.engines if engine in engines)


def _names(workloads: Iterable[Workload]) -> list[str]:
    return [workload.name for workload in workloads]


def _megabytes(sizes: Iterable[float | None]) -> list[str]:
    return [NO_VALUE if size is None else f"{size / 1e6:.0f}" for size in sizes]


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""

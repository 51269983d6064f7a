"""Formats the result of `bench quantised` as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rayloom_bench.markdown import NO_VALUE, number, spread_text, table
from rayloom_bench.quantised.result import LLAMA, OURS, FileResult, QuantisedResult
from rayloom_bench.report import DISTURBED_PERCENT
from rayloom_bench.spread import spread

GOALS = {"W3": 1.2, "W1": 2.0}  # workload -> least ratio of our tokens per second to llama.cpp's with the same file


def page(result: QuantisedResult) -> str:
    """The whole page."""
    warning = ""
    if result.most_disturbed_percent > DISTURBED_PERCENT:
        warning = " **DISTURBED: do not quote the speeds.**"
    parts = [
        "# Quantised weights beside llama.cpp",
        f"{result.conditions} Other processes used up to {result.most_disturbed_percent:.0f} % of the CPU time."
        f"{warning}",
        "Both servers read the same GGUF file. *rayloom int8* is this engine with `--quantization int8`, which makes "
        "the weights of the file dense and then int8 with one scale for each output. A ratio compares two servers in "
        "the same round. Each cell: median of all rounds (minimum to maximum).",
        goal_table(result),
    ]
    for each in result.files:
        parts += [f"## {each.file.choice.title}", _about(result, each), file_table(result, each)]
    parts += ["## Commands", "\n".join(f"- {name}: `{line}`" for name, line in result.commands.items())]
    if result.failures:
        lines = [f"- {each.name}: {each.reason.splitlines()[0]}" for each in result.failures]
        parts += ["## Failures", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def goal_table(result: QuantisedResult) -> str:
    """The goals with their values, for each file."""
    rows = []
    for each in result.files:
        for workload in result.workloads:
            least = GOALS.get(workload.name)
            if least is None:
                continue
            ratio = each.speed_ratio(OURS, workload.name)
            verdict = "not measured" if ratio is None else "met" if ratio.median >= least else "missed"
            text = f"{each.file.choice.title}, {workload.name}: at least {least:g}x llama.cpp"
            rows.append((text, spread_text(ratio, "x"), verdict))
    return table(("goal", "value", ""), rows)


def file_table(result: QuantisedResult, found: FileResult) -> str:
    """The speeds of all servers with one file."""
    header = ("workload", "server", "out tok/s", "x llama.cpp", "CPU ms/token", "llama.cpp's CPU time / its own")
    return table(header, _rows(result, found))


def memory_limit_tok_s(result: QuantisedResult, found: FileResult) -> float | None:
    """Tokens per second of one stream if a step took only the time to read all weights of the file."""
    return None if result.read_bytes_s is None else result.read_bytes_s / found.file.weight_bytes


def _rows(result: QuantisedResult, found: FileResult) -> Iterator[tuple[str, ...]]:
    for workload in result.workloads:
        for server in found.samples:
            if not (tok_s := found.tok_s(server, workload.name)):
                continue
            is_peer = server == LLAMA
            yield (
                workload.name,
                server,
                spread_text(spread(tok_s.values())),
                NO_VALUE if is_peer else spread_text(found.speed_ratio(server, workload.name)),
                spread_text(spread(found.cpu_ms(server, workload.name).values())),
                NO_VALUE if is_peer else spread_text(found.cpu_ratio(server, workload.name)),
            )


def _about(result: QuantisedResult, found: FileResult) -> str:
    megabytes = found.file.weight_bytes / 1e6
    text = f"A step reads {megabytes:.0f} MB of weights."
    limit = memory_limit_tok_s(result, found)
    if limit is not None and result.read_bytes_s is not None:
        text += (
            f" This machine reads {result.read_bytes_s / 1e9:.1f} GB/s, so its memory allows one stream at most "
            f"{number(limit)} tokens per second."
        )
    if found.agreement is not None:
        text += (
            f" {found.agreement.num_equal} of {found.agreement.num_prompts} greedy answers are those of llama.cpp; the "
            f"first {number(found.agreement.mean_length)} tokens are equal on average."
        )
    return text

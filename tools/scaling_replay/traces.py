"""Requests of a service, drawn from the reduced traces in `azure_2023.json`.

A reduced trace has the number of requests in each 10 s of a real hour. It also has lognormal distributions of the
prompt and output lengths, fitted to the trace. Source: Azure Public Dataset, AzureLLMInferenceTrace 2023, CC-BY 4.0
(https://github.com/Azure/AzurePublicDataset). `reduce` made the file from the original CSV files.
"""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter
from dataclasses import dataclass
from math import log, pi, sin
from pathlib import Path
from typing import Any

from rayloom_bench.fleet.trace_files import read_trace
from rayloom_bench.fleet.traffic import Lengths

FILE = Path(__file__).resolve().parent / "azure_2023.json"
BIN_S = 10
SOURCE = "Azure Public Dataset, AzureLLMInferenceTrace 2023, CC-BY 4.0, reduced"


@dataclass(frozen=True, slots=True)
class Request:
    at: float  # seconds since the beginning
    prompt: int  # tokens
    output: int  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The use of a trace: its hour with `factor` times the requests, repeated `hours` times.

    `night` is the share of the requests that is kept at the beginning and at the end. In the middle all requests are
    kept.
    """

    trace: str
    factor: int = 1
    hours: int = 1
    night: float = 1.0


def requests(shape: Shape, seed: int = 1) -> list[Request]:
    """Returns the requests by time of arrival, equal for equal seeds. Raises KeyError for an unknown trace."""
    trace: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))["traces"][shape.trace]
    draw = random.Random(seed)
    prompts, outputs = Lengths(**trace["prompt"]), Lengths(**trace["output"])
    found = []
    bins = trace["requests_per_10_s"] * shape.hours
    for index, number in enumerate(bins):
        kept = shape.night + (1 - shape.night) * sin(pi * index / len(bins))
        for _ in range(number * shape.factor):
            at = (index + draw.random()) * BIN_S
            request = Request(at, prompts.draw(draw), outputs.draw(draw))
            if kept >= 1 or draw.random() < kept:
                found.append(request)
    return sorted(found, key=lambda each: each.at)


def reduce(paths: dict[str, Path]) -> str:
    """Returns the text of `azure_2023.json`. `paths`: name of a trace -> its CSV file, compressed."""
    traces = {name: _reduced(path) for name, path in paths.items()}
    return json.dumps({"source": SOURCE, "traces": traces}, separators=(",", ":")) + "\n"


def _reduced(path: Path) -> dict[str, Any]:
    found = read_trace(path)
    bins = Counter(int(each.at_s // BIN_S) for each in found)
    return {
        "requests_per_10_s": [bins[index] for index in range(max(bins) + 1)],
        "prompt": _fitted([each.num_prompt for each in found]),
        "output": _fitted([each.num_output for each in found]),
    }


def _fitted(lengths: list[int]) -> dict[str, float]:
    logs = [log(each) for each in lengths if each > 0]
    mu, sigma = statistics.fmean(logs), statistics.pstdev(logs)
    return {"mu": round(mu, 3), "sigma": round(sigma, 3), "most": max(lengths)}

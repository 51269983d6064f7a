"""Reads production traces: CSV files of the Azure Public Dataset and JSON lines of Mooncake, plain or as .gz."""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from rayloom_bench.fleet.arrivals import Arrival, Segment
from rayloom_engine.errors import ConfigError

_MOONCAKE_BLOCK = 512  # tokens of a block of hash_ids


def read_trace(path: Path, *, speed: float = 1.0, divisor: float = 1.0) -> list[Arrival]:
    """Returns the requests in order of arrival, the first at 0 s. Raises ConfigError.

    All times between requests are divided by `speed`, all lengths by `divisor`.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        with io.StringIO(text) as lines:
            is_csv = ".csv" in path.suffixes
            arrivals = list(_azure(lines, divisor) if is_csv else _mooncake(lines, divisor))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--trace {path}: {error!r}; give a .csv with TIMESTAMP, ContextTokens and GeneratedTokens, or a .jsonl "
            "with timestamp, input_length, output_length and hash_ids"
        ) from error
    arrivals.sort(key=lambda arrival: arrival.at_s)
    first_s = arrivals[0].at_s if arrivals else 0.0
    return [
        Arrival(at_s=(each.at_s - first_s) / speed, prompt=each.prompt, num_output=each.num_output) for each in arrivals
    ]


def _azure(lines: Iterable[str], divisor: float) -> Iterator[Arrival]:
    for number, row in enumerate(csv.DictReader(lines)):
        # The time has seven decimals, and datetime reads six of them.
        time = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
        prompt = (Segment(number, _scaled(int(row["ContextTokens"]), divisor)),)
        yield Arrival(at_s=time.timestamp(), prompt=prompt, num_output=_scaled(int(row["GeneratedTokens"]), divisor))


def _mooncake(lines: Iterable[str], divisor: float) -> Iterator[Arrival]:
    own_texts = itertools.count(2**32)
    for line in lines:
        row = json.loads(line)
        num_left = _scaled(row["input_length"], divisor)
        size = _scaled(_MOONCAKE_BLOCK, divisor)
        segments = []
        # The last block may be partial. Its id is unique, so no other request shares it.
        for text in row["hash_ids"]:
            num = min(size, num_left)
            num_left -= num
            if num:
                segments.append(Segment(text, num))
        if num_left:
            segments.append(Segment(next(own_texts), num_left))
        yield Arrival(
            at_s=row["timestamp"] / 1e3, prompt=tuple(segments), num_output=_scaled(row["output_length"], divisor)
        )


def _scaled(num_tokens: int, divisor: float) -> int:
    return max(1, round(num_tokens / divisor))

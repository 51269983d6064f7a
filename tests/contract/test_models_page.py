"""The limits in docs/models.md are those of the engine."""

import re
from pathlib import Path

from rayloom_engine.models.checkpoint import limits
from rayloom_engine.models.checkpoint.gguf_file import _MAX_ELEMENTS, _MAX_HEADER_BYTES

PAGE = (Path(__file__).resolve().parents[2] / "docs/models.md").read_text()
MIB = 1 << 20


def test_the_limits_are_the_engines():
    table = PAGE.partition("## Limits")[2].partition("\n## ")[0]
    numbers = [[int(number) for number in re.findall(r"\d+", line)] for line in table.splitlines() if "|" in line]
    assert [row for row in numbers if row] == [
        [limits.MAX_LAYERS],
        [limits.MAX_HEADS],
        [limits.MAX_EXPERTS],
        [limits.MAX_SIZE],
        [limits.MAX_VOCAB],
        [limits.MAX_POSITIONS],
        [limits.MAX_PARAMETERS],
        [limits.MAX_JSON_BYTES // MIB],
        [_MAX_HEADER_BYTES // MIB, _MAX_ELEMENTS],
    ]

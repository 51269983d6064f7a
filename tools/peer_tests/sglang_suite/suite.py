"""SGLang's checks of tools, stops and JSON on our server. SGLang itself has no build for CPUs on PyPI."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from peer_tests.common.column import Column
from peer_tests.common.environment import client_python
from peer_tests.common.suite import Place, Suite
from peer_tests.common.weights import DEFAULT_MAX_TOKENS, limited_checkpoint
from peer_tests.sglang_suite.source import RECIPE, VERSION, source

NAME = "sglang"
TEST_SECONDS = 300
_TOOLS = "kits.py::test_tool_calls"
_STOPS = "kits.py::TestMatchedStop"
EXPECTED = dict.fromkeys(
    (
        *(f"{_TOOLS}[{name}]" for name in ("basic_format", "streaming", "required", "specific", "strict")),
        *(f"{_STOPS}::test_finish_{name}" for name in ("stop_str", "stop_regex_str", "stop_eos", "length")),
        "kits.py::TestJson::test_json_openai",
    ),
    "passed",
)
NOT_APPLICABLE = {
    "test_tool_calls[none]": "depends on the model: the answer has to end by itself",
    "test_tool_calls[multiturn]": "depends on the model: it has to repeat the result of a tool",
    "test_tool_calls[thinking]": "depends on the model: it has to repeat the result of a tool; sends `thinking`, a "
    "field of Anthropic's API, in a chat",
    "test_tool_calls[parallel]": "depends on the model: it has to decide for two calls",
    "test_json_generate": "SGLang's own API: /generate",
    "test_json_invalid": "SGLang's own API: /generate",
    "test_mix_json_and_other": "SGLang's own API: /generate",
}
EXCEPTIONS = {
    "test_finish_stop_regex_str": "`stop_regex` is a field of SGLang alone; it is refused here with its name",
    "test_finish_stop_eos": "wants the id of the end token as the reason; OpenAI has no such field, in vLLM it is null",
    "test_tool_calls[streaming]": "reads the deltas of all calls as those of one, and the model makes several",
}


def sglang_suite() -> Suite:
    return Suite(
        name=NAME,
        version=f"{VERSION}-recipe-{RECIPE}-max-tokens-{DEFAULT_MAX_TOKENS}",
        files=("kits.py",),
        column=_column,
        has_peer=False,
        not_applicable=NOT_APPLICABLE,
        exceptions=EXCEPTIONS,
        expected=EXPECTED,
        expected_source=f"sglang/test of SGLang {VERSION}, whose CI requires these checks of every model",
    )


def _column(server: str, files: Sequence[str], place: Place) -> Column:
    python = client_python(place.cache, log=place.log)
    inherited = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    return Column(
        python=python,
        root=Path(__file__).parent,
        files=files,
        plugins=[],
        variables=inherited
        | {
            "PEER_TESTS_SGLANG": str(source(place.cache, python, log=place.log)),
            "PEER_TESTS_ENGINE": str(Path(sys.executable).with_name("rayloom-engine")),
            "PEER_TESTS_WEIGHTS": str(limited_checkpoint(place.cache)),
        },
        results=place.results_of(server),
        test_seconds=TEST_SECONDS,
    )

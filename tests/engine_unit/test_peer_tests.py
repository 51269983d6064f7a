"""`make peer-tests`: the flags that servers get, and the comparison of results, on lines written by hand."""

from __future__ import annotations

import json

from peer_tests.comparison import Comparison, Result, compare, owed, read_results, table
from peer_tests.pytest_plugin import kept_flags, our_command, vllm_command


def line(test, outcome, message="", when="call"):
    return json.dumps({"test": test, "when": when, "outcome": outcome, "message": message})


def test_flags_of_other_models_and_hardware_are_left_out_and_the_context_is_cut_to_the_models():
    flags = ["--dtype", "half", "--max-model-len", "18192", "--enforce-eager", "--max-num-seqs=5", "--port", "1"]
    assert kept_flags(flags) == [("--max-model-len", "8192"), ("--max-num-seqs", "5"), ("--port", "1")]


def test_our_server_gets_keys_in_a_file_and_flags_by_its_own_names(tmp_path):
    flags = ["--api-key", "secret", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"]
    command = our_command("/bin/rayloom-engine", "org/model", flags, str(tmp_path))
    assert command[-4:] == ["--tool-parser", "hermes", "--api-key-file", str(tmp_path / "api-keys")]
    assert (tmp_path / "api-keys").read_text() == "secret\n"
    assert "org/model" in command and "--enable-auto-tool-choice" not in command


def test_vllm_gets_its_own_flags_and_the_same_weights():
    command = vllm_command("/weights", "org/model", ["--enable-auto-tool-choice", "--load-format", "dummy"])
    assert command == [
        *("vllm", "serve", "/weights", "--served-model-name", "org/model", "--dtype", "float32"),
        "--enable-auto-tool-choice",
    ]


def test_a_test_has_failed_if_its_teardown_has():
    lines = [line("tests/a.py::t", "passed"), line("tests/a.py::t", "failed", "boom", "teardown")]
    assert read_results(lines) == {"tests/a.py::t": Result("failed", "boom")}
    assert read_results(reversed(lines)) == {"tests/a.py::t": Result("failed", "boom")}


def test_only_what_vllm_passes_is_owed():
    ours = {"tests/a.py::one": Result("failed", "x\nassert 1 == 2"), "tests/a.py::two": Result("failed")}
    theirs = {"tests/a.py::one": Result("passed"), "tests/a.py::two": Result("failed")}
    compared = compare(ours, theirs)
    assert [each.is_owed for each in compared] == [True, False]
    assert owed(compared) == "- `a.py::one`: assert 1 == 2"
    assert table(compared).splitlines()[-1] == "| **all** | 2 | 0 | 1 | 1 |"


def test_a_test_that_our_server_never_reached_is_owed_and_one_that_cannot_apply_is_not_listed():
    theirs = {"tests/a.py::one": Result("passed"), "tests/responses/test_mcp_tools.py::two": Result("passed")}
    assert compare({}, theirs) == [Comparison("tests/a.py::one", Result("absent"), Result("passed"))]
    assert compare({}, theirs)[0].is_owed

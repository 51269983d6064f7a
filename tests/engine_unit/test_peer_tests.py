"""`make peer-tests`: the flags and paths for servers, and the comparison of results in lines written by hand."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from peer_tests.common.column import Column, forget_lost, run_column
from peer_tests.comparison import Comparison, Result, compare, listed, read_results, table, unused
from peer_tests.llama_cpp_suite import plugin as llama_cpp_plugin
from peer_tests.llama_cpp_suite.translation import our_body, our_path
from peer_tests.vllm_suite.plugin import kept_flags, our_command, vllm_command


def line(test, outcome, message="", when="call"):
    return json.dumps({"test": test, "when": when, "outcome": outcome, "message": message})


def compared(ours, theirs, not_applicable=None, exceptions=None):
    return compare(ours, theirs, not_applicable=not_applicable or {}, exceptions=exceptions or {})


def llama_cpp_server(**settings):
    defaults = {"n_ctx": 512, "n_slots": 2, "kv_unified": False, "api_key": None, "model_alias": "tinyllama-2"}
    defaults |= {"n_predict": None, "debug": False, "chat_template_file": None}
    return SimpleNamespace(**defaults | settings, server_host="127.0.0.1", server_port=8080)


def test_flags_of_other_models_and_hardware_are_left_out_and_the_context_is_cut_to_the_models():
    flags = ["--dtype", "half", "--max-model-len", "18192", "--enforce-eager", "--max-num-seqs=5", "--port", "1"]
    assert kept_flags(flags) == [("--max-model-len", "8192"), ("--max-num-seqs", "5"), ("--port", "1")]


def test_our_server_gets_keys_in_a_file_and_flags_by_its_own_names(tmp_path):
    flags = ["--api-key", "secret", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"]
    command = our_command("/bin/rayloom-engine", "/weights", "org/model", flags, str(tmp_path))
    assert command[-4:] == ["--tool-parser", "hermes", "--api-key-file", str(tmp_path / "api-keys")]
    assert (tmp_path / "api-keys").read_text() == "secret\n"
    assert "org/model" in command and "--enable-auto-tool-choice" not in command


def test_vllm_gets_its_own_flags_and_the_same_weights():
    command = vllm_command("/weights", "org/model", ["--enable-auto-tool-choice", "--load-format", "dummy"])
    assert command == [
        *("vllm", "serve", "/weights", "--served-model-name", "org/model", "--dtype", "float32", "--enforce-eager"),
        "--enable-auto-tool-choice",
    ]


def test_both_servers_get_the_name_that_the_clients_of_a_test_send(tmp_path):
    flags = ["--served-model-name", "claude-3-7-sonnet-latest"]
    ours = our_command("/bin/rayloom-engine", "/weights", "org/model", flags, str(tmp_path))
    for command in (ours, vllm_command("/weights", "org/model", flags)):
        assert command.count("--served-model-name") == 1
        assert command[command.index("--served-model-name") + 1] == "claude-3-7-sonnet-latest"


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/health", "/health"),
        ("/completions", "/v1/completions"),
        ("/completion", None),
        ("/v1/stream?conv=1", None),
        ("/props", None),
    ],
)
def test_only_paths_of_shared_apis_reach_our_server(path, ours):
    assert our_path(path) == ours


def test_the_context_of_llama_cpp_is_divided_among_its_slots():
    command = llama_cpp_plugin.our_command("/bin/rayloom-engine", "/weights", llama_cpp_server(), "/unused")
    assert command[-6:] == ["--served-model-name", "tinyllama-2", "--max-model-len", "256", "--max-num-seqs", "2"]


def test_our_server_gets_the_chat_template_of_a_llama_cpp_test_in_a_folder_of_its_own(tmp_path):
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    (tmp_path / "Qwen3-0.6B.jinja").write_text("{{ messages }}")
    server = llama_cpp_server(chat_template_file=str(tmp_path / "Qwen3-0.6B.jinja"))
    for _ in range(2):  # the second server finds the folder of the first
        command = llama_cpp_plugin.our_command("/bin/rayloom-engine", str(weights), server, str(tmp_path))
        folder = Path(command[command.index("--model") + 1])
        assert folder == tmp_path / "Qwen3-0.6B"
        assert (folder / "config.json").read_text() == "{}"
        assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (weights / "chat_template.jinja").exists()


def test_requests_of_llama_cpp_tests_get_the_name_of_the_model_and_the_lengths_of_their_server():
    server = llama_cpp_server(n_predict=8)
    assert our_body(server, "/v1/messages", {"model": "test"}) == {"model": "tinyllama-2"}
    assert our_body(server, "/v1/completions", {}) == {"model": "tinyllama-2", "max_tokens": 8}
    assert our_body(server, "/v1/completions", {"max_tokens": 3})["max_tokens"] == 3
    assert our_body(llama_cpp_server(debug=True), "/v1/chat/completions", {})["return_token_ids"] is True
    assert our_body(server, "/v1/chat/completions", "not an object") == "not an object"


def test_a_test_has_failed_if_its_teardown_has():
    lines = [line("tests/a.py::t", "passed"), line("tests/a.py::t", "failed", "boom", "teardown")]
    assert read_results(lines) == {"tests/a.py::t": Result("failed", "boom")}
    assert read_results(reversed(lines)) == {"tests/a.py::t": Result("failed", "boom")}


def test_the_last_run_of_a_test_counts_and_an_interrupted_one_has_no_result():
    failed, started, passed = (
        line("a.py::t", "failed"),
        line("a.py::t", "started", when="start"),
        line("a.py::t", "passed"),
    )
    assert read_results([started, failed, started, passed]) == {"a.py::t": Result("passed")}
    assert read_results([started, passed, started]) == {}


def test_a_test_that_lost_its_server_is_forgotten_and_one_that_got_a_wrong_answer_is_not(tmp_path):
    results = tmp_path / "peer.jsonl"
    kept = [line("a.py::wrong", "started"), line("a.py::wrong", "failed", "assert 1 == 2")]
    lost = [line("a.py::lost", "started"), line("a.py::lost", "failed", "openai.APIConnectionError: Connection error.")]
    results.write_text("\n".join([*kept, *lost]))
    assert forget_lost(results) == 1
    assert results.read_text().splitlines() == kept


def test_only_what_the_peer_passes_is_owed():
    ours = {"tests/a.py::one": Result("failed", "x\nassert 1 == 2"), "tests/a.py::two": Result("failed")}
    theirs = {"tests/a.py::one": Result("passed"), "tests/a.py::two": Result("failed")}
    both = compared(ours, theirs)
    assert [each.is_owed for each in both] == [True, False]
    assert listed(both) == "Owed: only the peer passes:\n\n- `a.py::one`: assert 1 == 2"
    assert table(both, "vllm").splitlines()[-1] == "| **all** | 2 | 0 | 1 | 1 | 0 |"


def test_an_exception_is_listed_with_its_cause_and_not_owed():
    both = compared(
        {"a.py::one": Result("failed")}, {"a.py::one": Result("passed")}, exceptions={"a.py::one": "reads its log"}
    )
    assert not both[0].is_owed
    assert listed(both) == "Exceptions, with causes:\n\n- `a.py::one`: reads its log"
    assert table(both, "vllm").splitlines()[-1] == "| **all** | 1 | 0 | 1 | 0 | 1 |"


def test_a_cause_names_no_test_whose_name_only_begins_alike():
    passed = {test: Result("passed") for test in ("a.py::thinks", "a.py::thinks_long", "a.py::thinks[1]")}
    both = compared({test: Result("failed") for test in passed}, passed, exceptions={"::thinks": "less than allowed"})
    assert [each.test for each in both if each.is_owed] == ["a.py::thinks_long"]


def test_a_test_that_was_skipped_here_alone_is_an_exception_with_the_reason_of_the_skip():
    skipped = """('/suite/plugin.py', 130, "Skipped: llama.cpp's own API: /slots")"""
    theirs = {"a.py::one": Result("passed"), "a.py::two": Result("skipped")}
    both = compared({"a.py::one": Result("skipped", skipped), "a.py::two": Result("skipped", skipped)}, theirs)
    assert [(each.is_theirs_alone, each.is_owed) for each in both] == [(True, False), (False, False)]
    assert listed(both) == "Exceptions, with causes:\n\n- `a.py::one`: llama.cpp's own API: /slots"
    assert compared({"a.py::one": Result("skipped", "('/suite/plugin.py', 1, 'Skipped')")}, theirs)[0].is_owed


def test_a_cause_without_a_test_that_only_the_peer_passes_is_reported():
    passed = Result("passed")
    both = compared({"a.py::one": Result("failed"), "a.py::two": passed}, {"a.py::one": passed, "a.py::two": passed})
    assert unused({"::one": "reads its log", "::two": "mended"}, both) == ["::two"]


def test_a_test_that_our_server_never_reached_is_owed_and_one_that_cannot_apply_is_not_listed():
    theirs = {"tests/a.py::one": Result("passed"), "tests/responses/test_mcp_tools.py::two": Result("passed")}
    both = compared({}, theirs, not_applicable={"test_mcp_tools.py": "needs a server of tools"})
    assert both == [Comparison("tests/a.py::one", Result("absent"), Result("passed"))]
    assert both[0].is_owed


def test_an_interrupted_column_continues_with_the_tests_that_have_no_result(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import os\n"
        "from peer_tests.common import recorder\n"
        "def test_right():\n    recorder.mark_served()\n"
        "def test_wrong():\n    assert 1 == 2\n"
        "def test_last():\n    if 'ENDS' in os.environ: os._exit(1)\n"
    )
    results = tmp_path / "peer.jsonl"

    def run(variables, only=None):
        column = Column(
            python=Path(sys.executable),
            root=tmp_path,
            files=["test_it.py"],
            plugins=["pytest_timeout"],
            variables=os.environ | variables | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
            results=results,
            test_seconds=60,
        )
        run_column(column, resume=True, only=only)
        return {test: result.outcome for test, result in read_results(results.read_text().splitlines()).items()}

    assert run({"ENDS": "1"}) == {"test_it.py::test_right": "passed", "test_it.py::test_wrong": "failed"}
    num_lines = len(results.read_text().splitlines())
    # This run starts no server, so the test test_last is recorded as unserved.
    others = ["test_it.py::test_wrong", "test_it.py::test_last"]
    assert run({}, only=others) == {"test_it.py::test_right": "passed", "test_it.py::test_wrong": "failed"}
    new = [json.loads(each) for each in results.read_text().splitlines()[num_lines:]]
    assert [(each["test"], each["outcome"]) for each in new] == [
        ("test_it.py::test_last", "started"),
        ("test_it.py::test_last", "unserved"),
    ]

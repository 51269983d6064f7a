"""`rayloom-engine inspect --draft-model`: the facts of a draft model, and each reason against it before a start."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from rayloom_engine.cli.commands import run
from rayloom_engine.common.process import EXIT_CONFIG
from rt_gguf import write_gguf
from rt_tiny import tiny_checkpoint, tiny_tokenizer, tiny_variant


def _inspect(folder: Path, model: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """(exit code, termination message)."""
    words = folder / "words"
    code = run(["inspect", "--model", str(model), "--termination-log", str(words), *flags])
    found: dict[str, Any] = json.loads(words.read_text())
    return code, found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tiny_checkpoint(tmp_path_factory.mktemp("model")))


def test_the_facts_of_the_draft_model_are_sums_over_its_layers(model: Path, tmp_path: Path) -> None:
    draft = tiny_tokenizer(tiny_checkpoint(tmp_path, num_hidden_layers=1))
    code, words = _inspect(tmp_path, model, "--draft-model", str(draft))
    _, alone = _inspect(tmp_path, draft)
    costs = alone["costs"]

    assert (code, words["draft"]["num_parameters"]) == (0, alone["num_parameters"])
    assert words["draft"]["costs"] == {
        "weights": {"elements": [costs["both"]["elements"][0] + costs["kinds"][0]["weights"]["elements"][0]]},
        "kv": {"elements": [costs["kinds"][0]["kv"]["elements"][0]]},
        "step": {
            "token": {"elements": [costs["step"]["token"]["elements"][0]]},
            "sequence_bytes": costs["step"]["sequence_bytes"],
        },
        "checkpoint_bytes": costs["checkpoint_bytes"],
    }


def test_the_facts_of_the_model_are_the_same_beside_a_draft_model(model: Path, tmp_path: Path) -> None:
    _, alone = _inspect(tmp_path, model)
    _, both = _inspect(tmp_path, model, "--draft-model", str(model))

    assert "draft" not in alone
    assert {name: part for name, part in both.items() if name != "draft"} == alone


def test_a_draft_model_with_another_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    draft = tiny_tokenizer(tiny_checkpoint(tmp_path))
    path = draft / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    code, words = _inspect(tmp_path, model, "--draft-model", str(draft))

    assert (code, words["error"]["reason"]) == (EXIT_CONFIG, "Unsupported")
    assert f"draft_model: {draft} has another tokenizer than the model: 2 of" in words["error"]["message"]


def test_a_draft_model_that_needs_freed_blocks_is_refused(tmp_path: Path) -> None:
    windows = tiny_variant(tmp_path / "windows", "mistral-window")
    code, words = _inspect(tmp_path, windows, "--draft-model", str(tiny_checkpoint(tmp_path / "all")))

    assert (code, words["error"]["reason"]) == (EXIT_CONFIG, "Unsupported")
    assert "attends to all positions, but the model attends to 8" in words["error"]["message"]


def test_a_missing_draft_model_is_named_as_such(model: Path, tmp_path: Path) -> None:
    code, words = _inspect(tmp_path, model, "--draft-model", str(tmp_path / "none"))

    assert (code, words["error"]["reason"]) == (EXIT_CONFIG, "NotFound")
    assert words["error"]["message"].startswith("draft_model: no model")


def test_a_draft_model_in_a_gguf_file_is_compared_when_the_engine_starts(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = tmp_path / "draft.gguf"
    write_gguf(draft, tiny_variant(tmp_path / "original", "llama"))
    code, words = _inspect(tmp_path, model, "--draft-model", str(draft))

    assert (code, words["draft"]["architecture"]) == (0, "LlamaForCausalLM")
    assert not [record for record in caplog.records if "not compared" in record.message]


def test_each_of_the_two_models_has_the_whole_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    join = threading.Thread.join

    def noted(thread: threading.Thread, timeout: float | None = None) -> None:
        waits.append(timeout)
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", noted)
    code, _ = _inspect(tmp_path, model, "--draft-model", str(model), "--timeout", "45")

    assert (code, waits) == (0, [45.0, 45.0])


def test_a_revision_of_no_draft_model_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "--model", str(model), "--draft-revision", "v2"]) == EXIT_CONFIG
    assert "--draft-revision is for a draft model; add --draft-model, or remove it" in capsys.readouterr().err

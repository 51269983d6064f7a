"""`rayloom-engine doctor` on this machine, and on configs that cannot work."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rayloom_engine.cli.commands import run
from rayloom_engine.common.process import EXIT_CONFIG


def _doctor(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = run(["doctor", "--port", "0", "--admin-port", "0", *flags])
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "executor"),
    [
        ((), "uni (one rank), tensor 1 x pipeline 1 = 1 ranks"),
        (("--pipeline-parallel-size", "3"), "mp (3 ranks on this machine), tensor 1 x pipeline 3 = 3 ranks"),
        (("--executor", "ray"), "ray (set), tensor 1 x pipeline 1 = 1 ranks"),
    ],
)
def test_it_prints_the_executor_and_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], executor: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    code, text = _doctor(capsys, *flags)
    assert code == 0, text
    assert f"executor        {executor}\n" in text
    assert "LlamaForCausalLM, 135 M parameters, 30 layers" in text


def test_every_problem_is_named_with_its_cure(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code = run(
            [
                "doctor",
                "--port",
                port,
                "--admin-port",
                "0",
                "--model",
                "file:///not/there",
                "--ray-address",
                "127.0.0.1:1",
            ]
        )
    text = capsys.readouterr().out
    assert code == EXIT_CONFIG
    assert f"problem: port: cannot listen on 127.0.0.1:{port}" in text
    assert "problem: no model 'file:///not/there'" in text
    assert "problem: ray_address: nothing answers at 127.0.0.1:1" in text


def test_a_job_is_shown_with_the_ranks_place_in_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**job, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    code, text = _doctor(capsys, "--pipeline-parallel-size", "2")
    assert code == EXIT_CONFIG
    assert "external (this is rank 1 of a job of 2)" in text
    assert "problem: executor: 'external' needs RAYLOOM_RANK_TOKEN" in text
    monkeypatch.setenv("RAYLOOM_RANK_TOKEN", "x" * 32)
    code, text = _doctor(capsys, "--pipeline-parallel-size", "2")
    assert code == 0
    assert "job             rank 1, 2 ranks on this machine, core at 127.0.0.1:29501\n" in text


def test_the_draft_model_is_checked_as_the_model_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    code, text = _doctor(capsys, "--speculation", "draft", "--draft-model", "builtin://smollm2-135m")
    assert code == 0, text
    assert "draft model     builtin://smollm2-135m: LlamaForCausalLM, 135 M parameters, 30 layers" in text
    code, text = _doctor(capsys, "--speculation", "draft", "--draft-model", str(tmp_path / "none"))
    assert code == EXIT_CONFIG
    assert f"draft model     {tmp_path / 'none'} cannot be used" in text
    assert "problem: draft_model: no model" in text

"""The command line of `rayloom-engine`: help, the model as a positional argument, and unknown flags."""

from __future__ import annotations

import argparse
import re

import pytest

from rayloom_engine import __version__
from rayloom_engine.cli import commands
from rayloom_engine.cli.arguments import add_config_arguments, config_from
from rayloom_engine.cli.commands import run
from rayloom_engine.cli.unknown_flags import _ELSEWHERE, complaints
from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ConfigError

COMMANDS = ("serve", "generate", "inspect", "doctor")


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        run([command, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def config_of(*arguments: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser, is_server=True)
    return config_from(parser.parse_args(arguments))


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        run(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    said = capsys.readouterr()
    assert all(f"    {command} " in said.out for command in COMMANDS)
    assert said.err == ""


def test_a_command_makes_no_flags_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {name: (lambda _: pytest.fail("another command")) for name in commands._COMMANDS if name != "inspect"}
    monkeypatch.setattr(commands, "_COMMANDS", {**commands._COMMANDS, **others})
    assert "--termination-log" in help_of("inspect", capsys)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["--version"])
    assert capsys.readouterr().out == f"rayloom-engine {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_defaults_in_words(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(help_of(command, capsys).split())
    assert "None" not in text and "[" not in re.sub(r"\[(MODEL\] \[flags|ORIGINS \.\.\.|NAME=PATH \.\.\.)\]", "", text)
    assert text.startswith(f"usage: rayloom-engine {command} [MODEL] [flags]")


def test_every_setting_has_its_default_and_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("serve", capsys)
    paragraphs = re.split(r"\n  (?=--)", text)
    for name in set(EngineConfig.model_fields) - {"version"}:
        (paragraph,) = [part for part in paragraphs if re.match(rf"--{name.replace('_', '-')}[ ,\n]", part)]
        assert "Default: " in " ".join(paragraph.split()), name
    groups = re.findall(r"\n\n([A-Za-z][^\n]*):\n", text)
    assert groups == [
        "positional arguments",
        "options",
        "model",
        "LoRA adapters",
        "ranks: how many, and where they run",
        "loss of ranks",
        "steps and KV cache",
        "ports, keys and limits",
        "life of the processes",
    ]
    assert (
        "Longest prompt + output in tokens. Default: the limit of the model's config, or the longest that fits."
        in " ".join(text.split())
    )


@pytest.mark.parametrize(
    "arguments", [["x"], ["--model", "x"], ["x", "--model", "x"], ["--port", "0", "x"], ["x", "--port=0"]]
)
def test_the_model_needs_no_flag(arguments: list[str]) -> None:
    assert config_of(*arguments).model == "x"


def test_without_a_model_there_is_the_built_in_one() -> None:
    assert config_of().model == "builtin://smollm2-135m"


@pytest.mark.parametrize("command", COMMANDS)
def test_two_models_are_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "a", "--model", "b"]) == 78
    assert capsys.readouterr().err == "rayloom-engine: model: given as 'a' and as --model 'b'; give one of them\n"


def test_a_model_wins_over_the_document(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model": "a", "port": 0}')
    assert config_of("--config", f"{tmp_path}/config.json").model == "a"
    assert config_of("b", "--config", f"{tmp_path}/config.json").model == "b"
    with pytest.raises(ConfigError, match="give one of them"):
        config_of("b", "--model", "c", "--config", f"{tmp_path}/config.json")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu-memory-utilization", "0.9"], "--gpu-memory-utilization: there is no such flag; use --kv-cache-memory"),
        (["--gpu-memory-utilization=0.9"], "--gpu-memory-utilization: there is no such flag; use --kv-cache-memory"),
        (["--api-key", "secret"], "--api-key: there is no such flag; use --api-key-file FILE or the variable RAYLOOM_"),
        (["m", "-tp", "2"], "-tp: there is no such flag; use --tensor-parallel-size"),
        (
            ["--max-model-len", "auto"],
            "'auto' is not a whole number; without --max-model-len: the limit of the model's config",
        ),
        (
            ["--quantization", "awq"],
            "--quantization: invalid choice: 'awq' (choose from auto, none, int8); auto reads AWQ, GPTQ, fp8 and",
        ),
        (["--enable-lora"], "--enable-lora: there is no such flag; use --lora NAME=PATH, or --allow-runtime-lora-"),
        (["--max-num-seqs", "auto"], "'auto' is not a whole number; without --max-num-seqs: 64\n"),
        (["--hang-seconds", "soon"], "'soon' is not a number\n"),
        (["--max-num-seq", "5"], "--max-num-seq: there is no such flag; did you mean --max-num-seqs?"),
        (["--no-such-thing", "-1"], "--no-such-thing: there is no such flag; see --help"),
        (["a", "b"], "unexpected b; write each value after its flag, and name the model only once"),
    ],
)
def test_the_error_of_an_unusable_command_line_has_the_cure(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(["serve", *arguments], capsys)
    assert said in error
    assert "secret" not in error


def test_each_unknown_flag_has_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    error = refusal(["serve", "--seed", "1", "--trust-remote-code", "--seed", "2"], capsys)
    assert [line.split(": ")[1] for line in error.splitlines()] == ["--seed", "--trust-remote-code"]


def test_a_flag_is_not_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    # If flags could be abbreviated, --api-key would mean --api-key-file. The engine would then read a key as the name
    # of a file.
    assert "there is no such flag" in refusal(["serve", "--pipeline", "2"], capsys)


def test_adapters_are_for_serving_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--adapters", "--lora", "--lora-modules"):
        assert config_of(flag, "a=/a", "b=/b").adapters == ("a=/a", "b=/b")
        assert f"{flag}: there is no such flag" in refusal(["generate", flag, "a=/a"], capsys)


def test_no_advice_is_about_a_flag_that_there_is() -> None:
    flags = {f"--{name.replace('_', '-')}" for name in EngineConfig.model_fields} | {"--lora", "--lora-modules"}
    assert flags.isdisjoint(_ELSEWHERE)
    named = set(re.findall(r"--[a-z-]+", " ".join(_ELSEWHERE.values())))
    assert named <= flags
    assert complaints(["--swap-space", "4"], flags)[0].startswith("--swap-space: there is no such flag; use --kv-host-")

"""The EngineConfig document: accepted values, and the message for each mistake."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from rayloom_engine.cli.arguments import add_config_arguments, config_from
from rayloom_engine.config import EngineConfig, load_config, parse_config
from rayloom_engine.errors import ConfigError


def test_an_empty_document_serves_the_embedded_model() -> None:
    config = parse_config({})
    assert config.model == "builtin://smollm2-135m"
    assert config.api_model_name == "smollm2-135m"


@pytest.mark.parametrize(
    ("model", "name"),
    [("hf://Qwen/Qwen3-8B", "Qwen3-8B"), ("/models/tiny/", "tiny"), ("/models/x.gguf", "x"), ("org/name", "name")],
)
def test_the_api_name_is_the_last_part_of_the_model(model: str, name: str) -> None:
    assert parse_config({"model": model}).api_model_name == name


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"dtype": "int3"}, "dtype: Input should be 'auto', 'bfloat16', 'float16' or 'float32', given 'int3'"),
        ({"max_model_len": 1}, "max_model_len: .*greater than or equal to 2, given 1"),
        ({"max_model_len": "8k"}, "max_model_len: .*valid integer, given '8k'"),
        ({"modle": "x"}, "modle: .*given 'x' .remove it, or check its spelling"),
        ({"port": 70000}, "port: .*65535, given 70000"),
        ({"model": " x"}, "remove the blanks"),
        ({"version": "v2"}, "version: .*'v1'"),
        (
            {"adapters": ["foo"]},
            "adapters: 'foo' has no name or no path; write NAME=PATH, such as sql=/adapters/sql, given",
        ),
        ([], "EngineConfig: "),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: .*greater than or equal to 1, given 0"),
        (
            {"executor": "uni", "tensor_parallel_size": 2, "pipeline_parallel_size": 3},
            "'uni' has one rank, but tensor_parallel_size 2 x pipeline_parallel_size 3 needs 6; use mp, ray or auto",
        ),
        ({"heartbeat_seconds": 3, "hang_seconds": 5}, "3 is more than half of hang_seconds 5; lower it"),
        ({"kv_host_memory_bytes": -1}, "kv_host_memory_bytes: .*greater than or equal to 0, given -1"),
        (
            {"kv_host_memory_bytes": 4096, "enable_prefix_caching": False},
            "kv_host_memory_bytes: 4096 bytes for copies of cached blocks, but enable_prefix_caching is false; remove",
        ),
        ({"ngram_min": 6}, "ngram_min: 6 is more than ngram_max 5; lower it, or raise ngram_max"),
        ({"speculation": "draft"}, "draft_model: speculation is 'draft', so a draft model is needed"),
        ({"draft_model": "m"}, "draft_model: it has no effect, because speculation is 'off'; set speculation to draft"),
        ({"draft_quantization": "int8"}, "draft_quantization: it is for a draft model, and speculation is 'off'"),
        ({"draft_revision": "v2"}, "draft_revision: it is for a draft model, and speculation is 'off'; remove it, or"),
        ({"speculation": "draft", "draft_model": " m"}, "draft_model: remove the blanks around the model's name"),
        ({"ray_resources_per_rank": {}}, "ray_resources_per_rank: .*at least 1 item"),
        ({"ray_resources_per_rank": {"CPU": 0}}, "ray_resources_per_rank.CPU: .*equal to 0.0001, given 0"),
        ({"ray_resources_per_rank": {"CPU": 1, "a": 0.00015}}, "steps of 0.0001; for a use 0.000[12], given"),
        ({"ray_resources_per_rank": {"CPU": float("inf")}}, "ray_resources_per_rank.CPU: .*finite number"),
        ({"ray_resources_per_rank": {"CPU": 1}, "device": "cuda"}, "device 'cuda' needs a GPU"),
        ({"ranks_per_gpu": 0}, "ranks_per_gpu: .*greater than or equal to 1, given 0"),
        (
            {"ranks_per_gpu": 2, "tensor_parallel_size": 2, "device": "cpu"},
            "ranks_per_gpu: 2 is for ranks on GPUs, and device is 'cpu'; remove one of the two",
        ),
        ({"ranks_per_gpu": 2}, "ranks_per_gpu: 2, but there is one rank; remove it, or raise tensor_"),
        (
            {"ranks_per_gpu": 3, "tensor_parallel_size": 2, "pipeline_parallel_size": 3},
            "ranks_per_gpu: 3: the 6 ranks of tensor_parallel_size 2 x pipeline_parallel_size 3 cannot share GPUs "
            "evenly, with one stage or whole stages on each; use 1, 2 or 6",
        ),
        ({"ranks_per_gpu": 4, "pipeline_parallel_size": 2}, "cannot share GPUs evenly, .*; use 1 or 2"),
        (
            {"ranks_per_gpu": 2, "tensor_parallel_size": 2, "ray_resources_per_rank": {"CPU": 1, "GPU": 1}},
            "ray_resources_per_rank: with GPU 1, Ray does not put 2 ranks on a GPU, as ranks_per_gpu demands; use at "
            "most 0.5 and more than 1/3, or leave ray_resources_per_rank out",
        ),
        (
            {"ranks_per_gpu": 2, "tensor_parallel_size": 4, "ray_resources_per_rank": {"GPU": 0.25}},
            "with GPU 0.25, Ray does not put 2 ranks on a GPU, .*; use at most 0.5 and more than 1/3",
        ),
        (
            {"ranks_per_gpu": 2, "tensor_parallel_size": 2, "ray_resources_per_rank": {"GPU": 0.5001}},
            "with GPU 0.5001, Ray does not put 2 ranks on a GPU",
        ),
        (
            {"ranks_per_gpu": 2, "tensor_parallel_size": 2, "ray_resources_per_rank": {"GPU": 0.3333}},
            "with GPU 0.3333, Ray does not put 2 ranks on a GPU",
        ),
        (
            {"ranks_per_gpu": 2, "tensor_parallel_size": 2, "ray_resources_per_rank": {"CPU": 1}},
            'ray_resources_per_rank: ranks_per_gpu 2 needs a part of a GPU for each rank; add "GPU": 0.5',
        ),
        (
            {"tensor_parallel_size": 2, "ray_resources_per_rank": {"GPU": 0.5}},
            "with GPU 0.5, ranks could share a GPU, and ranks_per_gpu is 1; use 1, or set ranks_per_gpu to the number",
        ),
        ({"ray_placement_strategy": "spread"}, "'STRICT_SPREAD' or 'STRICT_PACK', given 'spread'"),
    ],
)
def test_a_mistake_is_named_with_the_given_value(document: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config(document)


@pytest.mark.parametrize(
    "document",
    [
        {"ranks_per_gpu": 2, "tensor_parallel_size": 4, "ray_resources_per_rank": {"GPU": 0.3334}},
        {"ranks_per_gpu": 3, "tensor_parallel_size": 3, "ray_resources_per_rank": {"GPU": 0.3333}},
        {"tensor_parallel_size": 2, "ray_resources_per_rank": {"GPU": 2}},
        {"tensor_parallel_size": 2, "ray_resources_per_rank": {"CPU": 1}},
        {"ray_resources_per_rank": {"GPU": 0.5}},  # of one rank, which shares with no other rank of this engine
        {"tensor_parallel_size": 2, "ray_resources_per_rank": {"GPU": 0.5}, "device": "cpu"},
    ],
)
def test_a_rank_may_take_a_part_of_a_gpu_that_gives_the_gpu_its_number_of_ranks(document: dict[str, object]) -> None:
    assert parse_config(document).ray_resources_per_rank == document["ray_resources_per_rank"]


def test_the_error_of_an_unusable_file_has_the_cause(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the config file"):
        load_config(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_config(tmp_path / "broken.json")


def _flags(*arguments: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser, is_server=True)
    return config_from(parser.parse_args(arguments))


def test_every_field_is_a_flag_and_flags_win_over_the_document(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"port": 1234, "dtype": "float32"}))
    config = _flags("--config", str(path), "--port", "99", "--no-enable-prefix-caching", "--drain-seconds", "1.5")
    assert (config.port, config.dtype, config.enable_prefix_caching, config.drain_seconds) == (
        99,
        "float32",
        False,
        1.5,
    )
    assert _flags("--cors-allowed-origins", "http://a", "http://b").cors_allowed_origins == ("http://a", "http://b")
    resources = '{"CPU": 1, "a100": 0.01}'
    assert _flags("--ray-resources-per-rank", resources).ray_resources_per_rank == {"CPU": 1, "a100": 0.01}
    for name in set(EngineConfig.model_fields) - {"version"}:
        parser = argparse.ArgumentParser()
        add_config_arguments(parser, is_server=True)
        assert f"--{name.replace('_', '-')}" in parser.format_help()


def test_a_flag_that_is_no_json_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _flags("--ray-runtime-env", "{env}")
    assert "argument --ray-runtime-env: '{env}' is not JSON" in capsys.readouterr().err

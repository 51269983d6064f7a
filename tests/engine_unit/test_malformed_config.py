"""A malformed config.json ends the command with exit 78 and one sentence that names the file and the field.

Each case breaks one file of a sound model in one way. The test calls the command's function in this process, so an
uncaught exception fails the test. A few cases also run the real process. Weights and tokenizers are in
test_malformed_weights.py, GGUF files in test_malformed_gguf.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayloom_engine.errors import ModelError
from rayloom_engine.models.inspection import facts, inspect_model
from rayloom_engine.models.shape import read_shape
from rt_malformed import (
    DEEP,
    LLAMA,
    QWEN3,
    Raw,
    assert_refused,
    config_text,
    generate,
    inspect,
    own_surroundings,
    put,
    sound_folder,
)

NESTED = Raw("[" * 400 + "]" * 400)  # shallow enough to be parsed, too deep to be shown
HUGE = Raw("1" + "0" * 400)
LAYERS_ONE = {"num_hidden_layers": 1, **QWEN3}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# content of config.json -> text of the message beside the file's name
CONFIG_FILES: dict[str, tuple[str | bytes | None, str]] = {
    "empty": ("", "is not JSON"),
    "NUL bytes": (b"\0" * 64, "is not JSON"),
    "not UTF-8": (b'{"hidden_size": "\xff"}', "is not JSON"),
    "UTF-16": (config_text().encode("utf-16"), "is not JSON"),
    "cut off": (config_text()[:40], "is not JSON"),
    "a list": ("[]", "must hold a JSON object"),
    "a number": ("1", "must hold a JSON object"),
    "null": ("null", "must hold a JSON object"),
    "a deep list": (DEEP, "nested too deeply"),
    "a deep field": (config_text(x=Raw(DEEP)), "nested too deeply"),
    "a number of 5,000 digits": (config_text(hidden_size=Raw("1" * 5000)), "is not JSON"),
    "missing": (None, "does not exist"),
}

# changed fields -> the field, and text of the message
CONFIG_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{field} {value.text if isinstance(value, Raw) else value!r:.30}": ({field: value}, f"{field} {said}")
        for field, limit in (
            ("num_hidden_layers", 1000),
            ("hidden_size", 4194304),
            ("intermediate_size", 4194304),
            ("num_attention_heads", 4096),
            ("num_key_value_heads", 4096),
            ("head_dim", 4194304),
            ("vocab_size", 16777216),
            ("max_position_embeddings", 1073741824),
        )
        for value, said in (
            (0, "must be a whole number >= 1, given 0"),
            (limit + 1, f"{limit + 1} is not supported; works: 1 to {limit}"),
            (10**12, f"{10**12} is not supported; works: 1 to {limit}"),
            (HUGE, "1000"),
            ("8", "must be a whole number >= 1, given '8'"),
            ([[8]], "must be a whole number >= 1, given [[8]]"),
            (NESTED, "must be a whole number >= 1, given [[[...]]]"),
        )
    },
    "1e9 layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 is not supported; works: 1 to 1000"),
    "1e14 layers as a float": ({"num_hidden_layers": 1e14}, "num_hidden_layers 100000000000000 is not supported"),
    "half a layer": ({"num_hidden_layers": 1.5}, "num_hidden_layers must be a whole number"),
    "endless layers": ({"num_hidden_layers": Raw("1e999")}, "num_hidden_layers must be a whole number"),
    "true as a size": ({"hidden_size": True}, "hidden_size must be a whole number"),
    "no size": ({"hidden_size": ...}, "hidden_size is missing"),
    "fewer columns than heads": ({"hidden_size": 1}, "hidden_size 1 is less than num_attention_heads 2"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "is not a multiple of num_key_value_heads 3"),
    "an odd head": ({"head_dim": 3}, "head_dim 3 is odd"),
    "every size at its limit": (
        {"num_hidden_layers": 1000, "hidden_size": 1 << 22, "intermediate_size": 1 << 22, "vocab_size": 1 << 24},
        "parameters; works: up to 1125899906842624",
    ),
    "an epsilon of 10^400": ({"rms_norm_eps": HUGE}, "rms_norm_eps 1000"),
    "an epsilon of text": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
    "an epsilon that is no number": ({"rms_norm_eps": Raw("NaN")}, "rms_norm_eps must be a number"),
    "an endless epsilon": ({"rms_norm_eps": Raw("1e999")}, "rms_norm_eps inf is not supported"),
    "a theta of 10^400": ({"rope_theta": HUGE}, "rope_theta 1000"),
    "a negative theta": ({"rope_theta": -1}, "rope_theta must be a number > 0"),
    "a theta of lists": ({"rope_theta": [[]]}, "rope_theta must be a number > 0"),
    "scaling as text": ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
    "scaling nested": ({"rope_scaling": NESTED}, "rope_scaling must be an object"),
    "a list as kind of rope": ({"rope_scaling": {"rope_type": ["linear"]}}, "rope type ['linear']"),
    "a factor of 10^400": ({"rope_scaling": Raw(f'{{"type": "linear", "factor": {HUGE.text}}}')}, "factor 1000"),
    "a factor of text": ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a number"),
    "equal frequencies": ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.0}}, "low_freq_factor 4 must be less"),
    "a trained context of lists": (
        {"rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": [[]]}},
        "original_max_position_embeddings must be a whole number",
    ),
    "a share of text": ({"partial_rotary_factor": "half"}, "partial_rotary_factor must be a number"),
    "an architecture of lists": ({"architectures": [[["x"]]]}, "architecture [['x']] is not supported"),
    "a nested architecture": ({"architectures": NESTED}, "architecture [[[...]]] is not supported"),
    "an architecture with a control character": ({"architectures": ["\x1b[2J"]}, r"architecture '\x1b[2J'"),
    "half a character": ({"architectures": ["\ud800"]}, r"architecture '\ud800' is not supported"),
    "an architecture of 1 MB": ({"architectures": ["x" * 1_000_000]}, "xxx...xxx"),
    "a number as architecture": ({"architectures": [7]}, "architecture 7 is not supported"),
    "a list as kind of model": ({"architectures": ..., "model_type": ["llama"]}, "model_type ['llama']"),
    "quantisation as text": ({"quantization_config": "awq"}, "quantization_config must be an object"),
    "quantisation as a list": ({"quantization_config": ["awq"]}, "quantization_config must be an object"),
    "quantisation as a number": ({"quantization_config": 4}, "quantization_config must be an object"),
    "a nested method": ({"quantization_config": {"quant_method": [["awq"]]}}, "quant_method must be a text"),
    "a list as activation": ({"hidden_act": ["silu"]}, "hidden_act must be a text"),
    "nested kinds of layers": ({**LAYERS_ONE, "layer_types": [["full_attention"]]}, "layer_types must name 1 layers"),
    "kinds of layers as an object": ({**LAYERS_ONE, "layer_types": {"full_attention": 1}}, "layer_types must name 1"),
    "too many kinds of layers": ({**LAYERS_ONE, "layer_types": ["full_attention"] * 9}, "layer_types must name 1"),
    "a window of 0": ({**LAYERS_ONE, "sliding_window": 0}, "sliding_window must be a whole number"),
    "a window of 2^40": ({**LAYERS_ONE, "sliding_window": 1 << 40}, "sliding_window 1099511627776 is not supported"),
    "a switch of text": ({**LAYERS_ONE, "use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
    "a tied 1": ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
    "a bias of text": ({"attention_bias": "no"}, "attention_bias must be true or false"),
    "a list as type": ({"torch_dtype": ["float32"]}, "dtype ['float32'] is not supported"),
    "an object as type": ({"torch_dtype": {"a": 1}}, "dtype {'a': 1} is not supported"),
    "a nested end": ({"eos_token_id": [[1]]}, "eos_token_id must be a token id"),
    "a true end": ({"eos_token_id": True}, "eos_token_id must be a token id"),
    "2,000 ends": ({"eos_token_id": [1] * 2000}, "eos_token_id lists 2000 ids"),
}

# content of generation_config.json -> text of the message
GENERATION_FILES: dict[str, tuple[str | bytes, str]] = {
    "a deep list": (DEEP, "nested too deeply"),
    "a list": ("[]", "must hold a JSON object"),
    "not UTF-8": (b"\xff", "is not JSON"),
    "an end of text": ('{"eos_token_id": "</s>"}', "eos_token_id must be a token id"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sound_folder(tmp_path / "model")


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with own_surroundings(tmp_path, monkeypatch):
        yield


@pytest.mark.parametrize("case", CONFIG_FILES)
def test_a_malformed_config_is_refused(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, said = CONFIG_FILES[case]
    put(folder / "config.json", content)
    assert_refused(capsys, inspect(folder), f"{folder}/config.json", said)


@pytest.mark.parametrize("case", CONFIG_FIELDS)
def test_a_malformed_field_is_refused(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, said = CONFIG_FIELDS[case]
    put(folder / "config.json", config_text(**changes))
    assert_refused(capsys, inspect(folder), f"{folder}/config.json: ", said)


@pytest.mark.parametrize("case", GENERATION_FILES)
def test_a_malformed_generation_config_is_refused(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, said = GENERATION_FILES[case]
    put(folder / "generation_config.json", content)
    assert_refused(capsys, inspect(folder), f"{folder}/generation_config.json", said)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("x" * 5000, "cannot be looked up: File name too long"),
        ("/tmp/" + "x" * 5000 + ".gguf", "cannot be looked up: File name too long"),
        ("~nobody-of-this-name/model", "cannot be looked up"),
        ("a\0b", r"no model 'a\x00b'"),
        ("builtin://\x1b[2J", r"'\x1b[2J'"),
        ("hf://a/b/c/d", "hf://a/b/c/d is not a hub id"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused(model: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, inspect(model), said)
    assert_refused(capsys, generate(model), said)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "too large"])
def test_something_else_than_a_file_is_refused(
    name: str, kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
        os.truncate(path, (64 << 20) + 1)
    said = {
        "folder": "is not a file",
        "pipe": "is not a file",
        "too large": "has 67108865 bytes; a JSON file of a model may have 67108864",
    }
    assert_refused(capsys, generate(folder), str(path), said[kind])


@pytest.mark.parametrize(
    "content",
    [
        config_text(num_hidden_layers=10**9),
        config_text(num_hidden_layers=10**7),
        config_text(vocab_size=10**12, num_attention_heads=10**12, num_key_value_heads=10**12),
    ],
)
def test_a_size_costs_nothing_before_it_is_refused(content: str, folder: Path) -> None:
    put(folder / "config.json", content)
    before, began = psutil.Process().memory_info().rss, time.thread_time()
    with pytest.raises(ModelError):
        read_shape(folder)
    assert time.thread_time() - began < 1.0
    assert psutil.Process().memory_info().rss - before < 64 << 20


# `serve` starts processes of its own, whose message must be the same.
THROUGH_PROCESSES = {
    "inspect, deep": (["inspect"], "config.json", DEEP, "nested too deeply"),
    "inspect, 10^400": (["inspect"], "config.json", config_text(rope_theta=HUGE), "rope_theta 1000"),
    "serve, 1e9 layers": (
        ["serve", "--port", "0", "--admin-port", "0"],
        "config.json",
        config_text(num_hidden_layers=10**9),
        "num_hidden_layers 1000000000 is not supported",
    ),
    "serve, a way out": (
        ["serve", "--port", "0", "--admin-port", "0"],
        "model.safetensors.index.json",
        '{"weight_map": {"a": "../b.safetensors"}}',
        "weight_map says that a is in '../b.safetensors'",
    ),
}


@pytest.mark.parametrize("case", THROUGH_PROCESSES)
def test_the_real_process_prints_it_too(case: str, folder: Path) -> None:
    command, name, content, said = THROUGH_PROCESSES[case]
    put(folder / name, content)
    done = subprocess.run(
        [sys.executable, "-m", "rayloom_engine", *command, "--model", str(folder)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 78, done.stderr
    assert "Traceback" not in done.stderr
    assert name in done.stderr and said in done.stderr


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["silu", "float32"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    *LLAMA,
    "head_dim",
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "rms_norm_eps",
    "hidden_act",
    "quantization_config",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "eos_token_id",
    "model_type",
    "partial_rotary_factor",
]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, min_size=1, max_size=4),
    architecture=st.sampled_from(["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"]),
)
def test_any_value_gives_facts_or_a_sentence(changes: dict[str, Any], architecture: str, folder: Path) -> None:
    put(folder / "config.json", config_text(**{"architectures": [architecture], **changes}))
    try:
        found, shape = inspect_model(str(folder), None)
    except ModelError as error:
        assert str(error).startswith(f"{folder}/config.json")
        assert len(str(error)) < 1000
    else:
        assert len(facts(found, shape).text()) < 4096

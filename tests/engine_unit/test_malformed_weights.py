"""Malformed weights, indexes and tokenizers end the command with exit 78 and one sentence that names the file.

Two things are not covered: the values of weights, because all bytes are valid numbers; and the code of a chat template,
because it runs only for requests.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayloom_engine.cli.commands import run
from rayloom_engine.errors import RequestError
from rayloom_engine.text.chat_template import ChatTemplate
from rt_malformed import DEEP, assert_refused, generate, inspect, own_surroundings, put, sound_folder

# content of model.safetensors.index.json -> text of the message
INDEX_FILES: dict[str, tuple[str | bytes, str]] = {
    "a deep list": (DEEP, "nested too deeply"),
    "a list": ("[]", "must hold a JSON object"),
    "empty": ("", "is not JSON"),
    "no map": ("{}", "weight_map must be an object"),
    "a map of nothing": ('{"weight_map": {}}', "weight_map must be an object"),
    "a list as map": ('{"weight_map": ["model.safetensors"]}', "weight_map must be an object"),
    **{
        f"{name!r:.40} as a file's name": (
            json.dumps({"weight_map": {"model.norm.weight": name}}),
            "weight_map says that model.norm.weight is in",
        )
        for name in (
            ["model.safetensors"],
            {"file": "model.safetensors"},
            7,
            None,
            "",
            "..",
            "model.bin",
            "/etc/passwd",
            "/etc/passwd.safetensors",
            "../outside.safetensors",
            "sub/model.safetensors",
            "sub/../../outside.safetensors",
            "..\\outside.safetensors",
            "model\0.safetensors",
            "x" * 300 + ".safetensors",
        )
    },
    "a file that is not there": ('{"weight_map": {"a": "b.safetensors"}}', "names files that are not there"),
}

LYING_HEADER = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [8], "data_offsets": [0, 1 << 40]}}).encode()
WEIGHT_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a usable safetensors file"),
    "a header of 2^63 bytes": (struct.pack("<Q", 1 << 63), "is not a usable safetensors file"),
    "a header that is not JSON": (struct.pack("<Q", 8) + b"not JSON", "is not a usable safetensors file"),
    "offsets past the end": (struct.pack("<Q", len(LYING_HEADER)) + LYING_HEADER, "is not a usable safetensors file"),
}

TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
CONTRADICTORY = {**TEMPLATE, "single": [{"SpecialToken": {"id": "x", "type_id": 0}}]}
MODEL = '"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}'
# file, its content, text of the message
TEXT_FILES: dict[str, tuple[str, str | bytes, str]] = {
    "an empty tokenizer": ("tokenizer.json", "", "cannot be used"),
    "a tokenizer that is a list": ("tokenizer.json", "[]", "cannot be used"),
    "a deep tokenizer": ("tokenizer.json", '{"model":' * 5000, "cannot be used"),
    "a tokenizer that is not UTF-8": ("tokenizer.json", b"\xff", "cannot be used"),
    "a negative id": (
        "tokenizer.json",
        '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        "cannot be used",
    ),
    "a token that is named and not there": (
        "tokenizer.json",
        f'{{"version": "1.0", "post_processor": {json.dumps(CONTRADICTORY)}, {MODEL}}}',
        "cannot be used",
    ),
    "deep settings": ("tokenizer_config.json", DEEP, "is not JSON"),
    "settings that are a list": ("tokenizer_config.json", "[]", "must hold an object"),
    "a list as special token": ("tokenizer_config.json", '{"bos_token": [1]}', "bos_token is [1]"),
    "a number as template": ("tokenizer_config.json", '{"chat_template": 7}', "chat_template is int"),
    "a template without an end": ("tokenizer_config.json", '{"chat_template": "{% if"}', "cannot be compiled"),
    "a template that is not UTF-8": ("chat_template.jinja", b"\xff", "cannot be read as UTF-8"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sound_folder(tmp_path / "model")


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with own_surroundings(tmp_path, monkeypatch):
        yield


def test_the_sound_model_is_served(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(inspect(folder)) == 0
    assert run([*generate(folder), "--max-tokens", "1", "--num-kv-blocks", "4"]) == 0
    assert run(inspect("builtin://smollm2-135m")) == 0


@pytest.mark.parametrize("case", INDEX_FILES)
def test_a_malformed_index_is_refused(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, said = INDEX_FILES[case]
    (folder.parent / "outside.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    put(folder / "model.safetensors.index.json", content)
    assert_refused(capsys, generate(folder), "model.safetensors.index.json", said)


@pytest.mark.parametrize("case", WEIGHT_FILES)
def test_malformed_weights_are_refused(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, said = WEIGHT_FILES[case]
    put(folder / "model.safetensors", content)
    assert_refused(capsys, generate(folder), f"{folder}/model.safetensors", said)


@pytest.mark.parametrize("case", TEXT_FILES)
def test_a_malformed_tokenizer_is_refused(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, content, said = TEXT_FILES[case]
    put(folder / name, content)
    assert_refused(capsys, [*generate(folder), "--num-kv-blocks", "4"], said)


def test_files_of_a_hub_cache_may_be_links(folder: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to("../blob")
    index = {"weight_map": {"model.norm.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run([*generate(folder), "--max-tokens", "1", "--num-kv-blocks", "4"]) == 0


@pytest.mark.parametrize("statement", ["include", "extends", "import"])
def test_a_template_reads_no_other_file(statement: str, folder: Path) -> None:
    (folder / "other.jinja").write_text("other")
    name = "{% import 'other.jinja' as other %}" if statement == "import" else f"{{% {statement} 'other.jinja' %}}"
    template = ChatTemplate(name, {})
    with pytest.raises(RequestError, match="no loader"):
        template.render([{"role": "user", "content": "a"}])

"""Settings that a request omits come from the model's generation_config.json, except if the server turns this off.

Covers the API and `LLM`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayloom_engine import LLM, SamplingParams
from rayloom_engine.errors import ModelError
from rayloom_engine.front.openai.fields.parsing import parse_request
from rayloom_engine.front.openai.fields.wire import ChatRequest, CompletionRequest
from rayloom_engine.sampling_defaults import NO_DEFAULTS, SamplingDefaults, read_sampling_defaults
from rt_byte_model import byte_model
from rt_front import FrontUnderTest, running_front
from rt_tiny import tiny_checkpoint, tiny_tokenizer

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [2, 3], "max_new_tokens": 40}


def write(folder: Path, **document: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(document))
    return folder


def test_settings_are_read_and_others_ignored(tmp_path: Path) -> None:
    defaults = read_sampling_defaults(write(tmp_path, **QWEN, min_p=None, num_beams=4))
    assert defaults.settings == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert defaults.max_tokens == 40
    assert defaults.words() == "temperature 0.6, top_p 0.95, top_k 20, max_new_tokens 40"


def test_a_folder_may_have_no_file(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == NO_DEFAULTS
    assert NO_DEFAULTS.words() == ""


@pytest.mark.parametrize("value", [-1, "warm", True, [0.5], 1e400])
def test_an_unusable_value_is_refused_with_the_cure(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ModelError, match=r"temperature must be .*--generation-config none"):
        read_sampling_defaults(write(tmp_path, temperature=value))


@pytest.mark.parametrize("text", ["[]", "{", "\xff"])
def test_a_broken_file_is_refused_with_the_cure(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match="--generation-config none"):
        read_sampling_defaults(tmp_path)


def test_fields_of_a_request_come_before_the_models_settings() -> None:
    defaults = SamplingDefaults(settings={"temperature": 0.6, "top_p": 0.95})
    wire = parse_request(CompletionRequest, {"prompt": "Hi", "temperature": 0, "top_p": None})
    params = wire.sampling(defaults)
    assert (params.temperature, params.top_p, params.max_tokens) == (0, 0.95, 16)
    chat = parse_request(ChatRequest, {"messages": [], "top_p": 0.5}).sampling(defaults)
    assert (chat.temperature, chat.top_p, chat.max_tokens) == (0.6, 0.5, None)


@pytest.mark.parametrize(
    ("given", "prompt_len", "most", "expected"),
    [
        ({"max_tokens": 90}, 10, None, 90),  # the request's value
        ({"max_tokens": None}, 10, None, 40),
        ({"max_tokens": None}, 75, None, 25),  # the rest of the context
        ({"max_tokens": None}, 10, 7, 7),  # the server's limit
        ({"max_tokens": None, "min_tokens": 50}, 10, None, 50),
        ({"max_tokens": None}, 100, None, None),  # the context is full: the request is refused later
    ],
)
def test_the_default_length_never_makes_a_request_too_long(
    given: dict[str, Any], prompt_len: int, most: int | None, expected: int | None
) -> None:
    params = SamplingDefaults(max_tokens=40).with_length(SamplingParams(**given), [[1] * prompt_len], 100, most)
    assert params.max_tokens == expected


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, FrontUnderTest]]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("auto", "none")}
    for folder in folders.values():
        write(byte_model(folder / "model"), temperature=0.5, top_k=3, max_new_tokens=9)
    with (
        running_front(folders["auto"]) as auto,
        running_front(folders["none"], generation_config="none") as none,
    ):
        yield {"auto": auto, "none": none}


@pytest.mark.parametrize(("setting", "expected"), [("auto", (0.5, 3, 9)), ("none", (1.0, 0, 491))])
def test_the_api_obeys_the_file_unless_it_is_turned_off(
    fronts: dict[str, FrontUnderTest], setting: str, expected: tuple[float, int, int]
) -> None:
    front = fronts[setting]
    front.do(front.core.reset)
    assert front.chat().status_code == 200
    assert front.complete(temperature=0.25).status_code == 200
    chat, completion = front.do(lambda: [submit.params for submit in front.core.submits])
    assert front.do(lambda: len(front.core.submits[0].prompt_ids)) == 21  # the rest of a context of 512
    assert (chat.temperature, chat.top_k, chat.max_tokens) == expected
    assert (completion.temperature, completion.top_k, completion.max_tokens) == (0.25, expected[1], 16)


def test_llm_uses_the_file_when_it_gets_no_params(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    tiny_tokenizer(folder)
    write(folder, temperature=0.0, max_new_tokens=5)
    settings = {"dtype": "float32", "num_kv_blocks": 50, "threads": 1}
    with LLM(str(folder), **settings) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=5)
        (default,) = llm.generate([[5, 17, 33]], use_tqdm=False)
        (greedy,) = llm.generate([[5, 17, 33]], SamplingParams(temperature=0.0, max_tokens=5), use_tqdm=False)
        assert default.outputs[0].token_ids == greedy.outputs[0].token_ids
    with LLM(str(folder), generation_config="none", **settings) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()

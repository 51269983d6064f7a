"""GGUF conversion: tiny checkpoints are written as GGUF, converted back, and compared through transformers.

tests/engine_real tests the embedded model's file.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rayloom_engine.errors import ModelError
from rayloom_engine.models.checkpoint.config_json import ConfigJson
from rayloom_engine.models.checkpoint.gguf_config import hugging_face_config
from rayloom_engine.models.checkpoint.gguf_convert import convert_gguf
from rayloom_engine.models.shape import read_shape
from rt_gguf import write_gguf
from rt_tiny import VOCAB_SIZE, TinySequence, advance, load_tiny, make_cache, tiny_variant, transformers_logits

TOKEN_IDS = random.Random(0).choices(range(VOCAB_SIZE), k=20)


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "mistral-window", "qwen2", "qwen3"])
def test_a_converted_file_has_the_logits_of_the_original(variant: str, tmp_path: Path) -> None:
    checkpoint = tiny_variant(tmp_path / "original", variant)
    write_gguf(tmp_path / "model.gguf", checkpoint)
    (tmp_path / "converted").mkdir()
    convert_gguf(tmp_path / "model.gguf", tmp_path / "converted")
    expected = transformers_logits(checkpoint, TOKEN_IDS)
    torch.testing.assert_close(transformers_logits(tmp_path / "converted", TOKEN_IDS), expected, atol=1e-5, rtol=0)
    model = load_tiny(tmp_path / "converted")
    sequence = TinySequence(TOKEN_IDS, block_table=[1, 2, 3, 4, 5])
    (logits,) = advance(model, make_cache(model.shape), [(sequence, len(TOKEN_IDS))])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    original, converted = read_shape(checkpoint), read_shape(tmp_path / "converted")
    assert converted.rope == original.rope
    assert (converted.layer_windows, converted.rms_norm_eps) == (original.layer_windows, original.rms_norm_eps)
    assert converted.eos_token_ids == (2, 3)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "BF16"])
def test_quantised_weights_become_bfloat16(kind: str, tmp_path: Path) -> None:
    checkpoint = tiny_variant(tmp_path / "original", "llama")
    tensors = write_gguf(tmp_path / "m.gguf", checkpoint, kind=gguf.GGMLQuantizationType[kind])
    (tmp_path / "converted").mkdir()
    told: list[tuple[str, int, int, str]] = []
    convert_gguf(tmp_path / "m.gguf", tmp_path / "converted", lambda *now: told.append(now))
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    assert converted.keys() == tensors.keys()
    for name, values in tensors.items():
        torch.testing.assert_close(converted[name], torch.from_numpy(values).bfloat16(), atol=0, rtol=0)
    num_bytes = sum(tensor.nbytes for tensor in converted.values())
    assert told[0] == ("convert", 0, num_bytes, "bytes") and told[-1] == ("convert", num_bytes, num_bytes, "bytes")


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    checkpoint = tiny_variant(tmp_path / "original", "llama")
    # The head size is 16, and theta is 10000. Within 8192 positions, pairs 0 to 4 turn more than 4 times, pair 5 turns
    # four times, and pair 7 turns less than once.
    turns = 8192 * 10000.0 ** (-np.arange(8) / 8) / (2 * np.pi)
    blend = np.clip((turns - 1) / 3, 0, 1)
    divisors = 1 / ((1 - blend) / 32 + blend)
    write_gguf(tmp_path / "m.gguf", checkpoint, rope_divisors=divisors)
    (tmp_path / "converted").mkdir()
    convert_gguf(tmp_path / "m.gguf", tmp_path / "converted")
    rope = read_shape(tmp_path / "converted").rope
    assert (rope.kind, rope.factor, rope.low_freq_factor, rope.high_freq_factor) == ("llama3", 32.0, 1.0, 4.0)

    write_gguf(tmp_path / "odd.gguf", checkpoint, rope_divisors=divisors + 0.5)
    with pytest.raises(ModelError, match="not Llama 3's scaling"):
        convert_gguf(tmp_path / "odd.gguf", tmp_path / "converted")


@pytest.mark.parametrize(
    ("scaling", "kind", "factor"),
    [
        ({}, "default", None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "linear", 4.0),
        ({"rope.scaling.factor": 4.0}, "linear", 4.0),
        ({"rope.scale_linear": 4.0}, "linear", 4.0),  # the former name
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, "default", None),
        ({"rope.scaling.factor": 0.0}, "default", None),
        ({"rope.scaling.factor": 1.0}, "default", None),
    ],
)
def test_the_factor_of_a_rotary_embedding_is_read_as_in_llama_cpp(
    scaling: dict[str, object], kind: str, factor: float | None
) -> None:
    rope = config_of_fields(scaling)["rope_parameters"]
    assert (rope["rope_type"], rope.get("factor")) == (kind, factor)


def test_scaling_beside_the_divisors_of_llama3_is_refused() -> None:
    with pytest.raises(ModelError, match=r"scaling\.type 'linear' with rope_freqs\.weight is not supported"):
        config_of_fields({"rope.scaling.factor": 4.0}, np.ones(8, dtype=np.float32))
    with pytest.raises(ModelError, match=r"llama\.rope\.scaling\.factor is missing"):
        config_of_fields({"rope.scaling.type": "linear"})


def test_a_factor_of_1_beside_the_divisors_of_llama3_changes_nothing() -> None:
    turns = 8192 * 10000.0 ** (-np.arange(8) / 8) / (2 * np.pi)
    blend = np.clip((turns - 1) / 3, 0, 1)
    rope = config_of_fields({"rope.scale_linear": 1.0}, 1 / ((1 - blend) / 32 + blend))["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("llama3", 32.0)


def config_of_fields(scaling: dict[str, object], divisors: np.ndarray | None = None) -> dict[str, Any]:
    sizes = {"embedding_length": 32, "feed_forward_length": 64, "block_count": 1, "context_length": 64}
    attention = {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    fields = {f"llama.{name}": value for name, value in {**sizes, **attention, **scaling}.items()}
    values = ConfigJson(path=Path("m.gguf"), values={"general.architecture": "llama", **fields})
    return hugging_face_config(values, ["output.weight"], 256, "float32", divisors)


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("smollm", "ab 12", ["ab", "Ġ", "1", "2"]),
        ("gpt-2", "ab<turn>12", ["ab", "<turn>", "1", "2"]),
        ("llama-bpe", "ab 12", ["<bos>", "ab", "Ġ", "1", "2"]),
        ("qwen2", "ab 12<eos>", ["ab", "Ġ", "1", "2", "<eos>"]),
    ],
)
def test_tokenizers_are_rebuilt(pre: str, text: str, tokens: list[str], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "m.gguf", tiny_variant(tmp_path / "original", "llama"), pre=pre)
    (tmp_path / "converted").mkdir()
    convert_gguf(tmp_path / "m.gguf", tmp_path / "converted")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "converted")
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == tokens
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<bos>", "<eos>", "<pad>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


def test_a_tokenizer_beside_the_file_is_taken(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_variant(tmp_path / "original", "llama"), tokenizer_model="llama")
    (tmp_path / "converted").mkdir()
    with pytest.raises(ModelError, match=r"'llama' .* Put the model's tokenizer\.json beside the file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "converted")
    (tmp_path / "tokenizer.json").write_text('{"model": "its own"}')
    convert_gguf(tmp_path / "m.gguf", tmp_path / "converted")
    assert json.loads((tmp_path / "converted" / "tokenizer.json").read_text()) == {"model": "its own"}
    assert json.loads((tmp_path / "converted" / "tokenizer_config.json").read_text())["eos_token"] == "<eos>"


def test_files_that_cannot_be_converted_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = tiny_variant(tmp_path / "original", "llama")
    path = tmp_path / "m.gguf"
    write_gguf(path, checkpoint, architecture="gemma2")
    with pytest.raises(ModelError, match="architecture 'gemma2' is not supported; works: llama, qwen2, qwen3"):
        convert_gguf(path, tmp_path)
    write_gguf(path, checkpoint, extra_tensors=("blk.0.ffn_gate_inp.weight",))
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_gate_inp\.weight belongs to no layer"):
        convert_gguf(path, tmp_path)
    write_gguf(path, checkpoint, without=("token_embd.weight",))
    with pytest.raises(ModelError, match=r"lacks the tensor token_embd\.weight"):
        convert_gguf(path, tmp_path)
    whole = path.read_bytes()
    for broken in (b"", b"GGUF", b"not a model at all", whole[: len(whole) // 2]):
        path.write_bytes(broken)
        with pytest.raises(ModelError, match="is not a usable GGUF file"):
            convert_gguf(path, tmp_path)

"""A malformed GGUF file ends the command with exit 78 and one sentence that names the file and the entry."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayloom_engine.errors import ModelError
from rayloom_engine.models.inspection import inspect_model
from rt_malformed import (
    FLOAT32,
    STRING,
    UINT32,
    array,
    assert_refused,
    entry,
    f32,
    generate,
    gguf_file,
    inspect,
    own_surroundings,
    put,
    string,
    strings,
    tensor,
    text,
    u32,
)

# a GGUF file -> message of `inspect`
GGUF_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "a magic alone": (b"GGUF", "it ends within version"),
    "another magic": (gguf_file(magic=b"GGML"), "does not begin with GGUF"),
    "version 99": (gguf_file(version=struct.pack("<I", 99)), "version 99; works: 2 and 3"),
    "big-endian": (gguf_file(version=struct.pack(">I", 3)), "little-endian"),
    "cut within the metadata": (gguf_file(cut=lambda data: data[:240]), "it ends within"),
    "cut within the weights": (gguf_file(cut=lambda data: data[:-800]), "the tensor 'token_embd.weight' ends at byte"),
    "2^60 entries": (gguf_file(num_entries=1 << 60), "it claims 1152921504606846976 metadata entries"),
    "2^60 tensors": (gguf_file(num_tensors=1 << 60), "it claims 1152921504606846976 tensors"),
    "1e9 numbers in 60 bytes": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array("a", UINT32, 10**9, b"\0" * 8),
        "its arrays have more than 8388608 elements, with 'a'",
    ),
    "2^60 texts in 60 bytes": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array("a", STRING, 1 << 60, b"\0" * 8),
        "its arrays have more than 8388608 elements, with 'a'",
    ),
    "8e6 texts in 60 bytes": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array("a", STRING, 8_000_000, b"\0" * 8),
        "it claims 8000000 strings of 'a'",
    ),
    "an array of arrays": (
        gguf_file({"x": array("x", 9, 1, struct.pack("<IQ", 9, 1) * 4)}),
        "'x' is an array of arrays",
    ),
    "a text of 2^60 bytes": (gguf_file({"x": entry("x", STRING, struct.pack("<Q", 1 << 60))}), "it ends within x"),
    "a text that is not UTF-8": (gguf_file({"x": string("x", b"\xff")}), "'x' is not UTF-8"),
    "a name that is not UTF-8": (gguf_file({"x": string(b"\xff", "x")}), "is not UTF-8"),
    "a value of an unknown type": (gguf_file({"x": entry("x", 77, b"\0" * 8)}), "'x' has the unknown type 77"),
    "an entry twice": (gguf_file({"x": u32("llama.block_count", 1)}), "'llama.block_count' is there twice"),
    "an alignment of 0": (gguf_file({"x": u32("general.alignment", 0)}), "general.alignment 0 is not a power of two"),
    "an alignment of 3": (gguf_file({"x": u32("general.alignment", 3)}), "general.alignment 3 is not a power of two"),
    "no heads": (gguf_file({"llama.attention.head_count": u32("llama.attention.head_count", 0)}), "head_count must be"),
    "heads of text": (
        gguf_file({"llama.attention.head_count": string("llama.attention.head_count", "2")}),
        "given '2'",
    ),
    "heads of each layer": (
        gguf_file({"llama.attention.head_count": array("llama.attention.head_count", UINT32, 1, b"\2\0\0\0")}),
        "differs from layer to layer",
    ),
    "2^32 - 1 layers": (
        gguf_file({"llama.block_count": u32("llama.block_count", 2**32 - 1)}),
        "llama.block_count 4294967295 is not supported; works: 1 to 1000",
    ),
    "no number of layers": (gguf_file({"llama.block_count": None}), "llama.block_count is missing"),
    "no width": (gguf_file({"llama.embedding_length": u32("llama.embedding_length", 0)}), "embedding_length must be"),
    "fewer columns than heads": (
        gguf_file({"llama.embedding_length": u32("llama.embedding_length", 1)}),
        "llama.embedding_length 1 is less than llama.attention.head_count 2",
    ),
    "an odd head": (gguf_file({"x": u32("llama.attention.key_length", 3)}), "the head size 3 is odd"),
    "a context of 2^31": (
        gguf_file({"llama.context_length": u32("llama.context_length", 1 << 31)}),
        "llama.context_length 2147483648 is not supported",
    ),
    "an architecture of numbers": (
        gguf_file({"general.architecture": u32("general.architecture", 1)}),
        "architecture 1",
    ),
    "an epsilon that is no number": (
        gguf_file(
            {"llama.attention.layer_norm_rms_epsilon": f32("llama.attention.layer_norm_rms_epsilon", float("nan"))}
        ),
        "layer_norm_rms_epsilon must be a number > 0",
    ),
    "an endless theta": (gguf_file({"x": f32("llama.rope.freq_base", float("inf"))}), "llama.rope.freq_base inf"),
    "a number as scaling": (gguf_file({"x": u32("llama.rope.scaling.type", 1)}), "scaling.type must be a text"),
    "one part of three": (gguf_file({"x": u32("split.count", 3)}), "one part of several"),
    "an end of text": (gguf_file({"x": string("tokenizer.ggml.eos_token_id", "2")}), "eos_token_id must be a whole"),
    "a tensor without sizes": (gguf_file(tensors={"x": tensor("x", ())}), "the tensor 'x' has 0 dimensions"),
    "a tensor of 3 dimensions": (gguf_file(tensors={"x": tensor("x", (1, 1, 1))}), "the tensor 'x' has 3 dimensions"),
    "a tensor of 2^32 - 1 dimensions": (
        gguf_file(tensors={"x": text("x") + struct.pack("<I", 2**32 - 1)}),
        "the tensor 'x' has 4294967295 dimensions",
    ),
    "a size of 0": (gguf_file(tensors={"x": tensor("x", (8, 0))}), "the tensor 'x' has the sizes [8, 0]"),
    "a size of 2^63": (gguf_file(tensors={"x": tensor("x", (8, 1 << 63))}), "the tensor 'x' ends at byte"),
    "a tensor of an unknown type": (gguf_file(tensors={"x": tensor("x", (8,), kind=999)}), "has the unknown type 999"),
    "half a block": (gguf_file(tensors={"x": tensor("x", (8,), kind=2)}), "Q4_0 needs a multiple of 32"),
    "a tensor beyond the end": (gguf_file(tensors={"x": tensor("x", (8,), offset=1 << 62)}), "the tensor 'x' ends at"),
    "a tensor twice": (gguf_file(tensors={"x": tensor("token_embd.weight", (8, 12))}), "is there twice"),
    "a tensor's name that is not UTF-8": (gguf_file(tensors={"x": tensor(b"\xff", (8,))}), "is not UTF-8"),
    "an embedding of one dimension": (
        gguf_file(tensors={"token_embd.weight": tensor("token_embd.weight", (8,))}),
        "token_embd.weight must have 2 dimensions",
    ),
    "no embedding": (gguf_file(tensors={"token_embd.weight": None}), "lacks the tensor token_embd.weight"),
    "divisors of zeros": (gguf_file(tensors={"x": tensor("rope_freqs.weight", (2,))}), "is not Llama 3's scaling"),
    "a matrix of divisors": (gguf_file(tensors={"x": tensor("rope_freqs.weight", (2, 2))}), "must be a vector"),
}
# a GGUF file -> message of the conversion
CONVERTED_FILES: dict[str, tuple[bytes, str]] = {
    "no tokens": (gguf_file({"tokenizer.ggml.tokens": None}), "tokenizer.ggml.tokens is missing"),
    "tokens of numbers": (
        gguf_file({"tokenizer.ggml.tokens": array("tokenizer.ggml.tokens", FLOAT32, 2, b"\0" * 8)}),
        "tokenizer.ggml.tokens must be a list of texts",
    ),
    "no merges": (gguf_file({"tokenizer.ggml.merges": None}), "tokenizer.ggml.merges is missing"),
    "a merge of one": (gguf_file({"tokenizer.ggml.merges": strings("tokenizer.ggml.merges", ["ab"])}), "given 'ab'"),
    "a merge of strangers": (
        gguf_file({"tokenizer.ggml.merges": strings("tokenizer.ggml.merges", ["x y"])}),
        "tokenizer.ggml.merges do not go with tokenizer.ggml.tokens",
    ),
    "a number as split": (gguf_file({"x": u32("tokenizer.ggml.pre", 1)}), "tokenizer.ggml.pre must be a text"),
    "a number as template": (gguf_file({"x": u32("tokenizer.chat_template", 1)}), "chat_template must be a text"),
    "a tensor of no layer": (gguf_file(tensors={"x": tensor("blk.0.\x1b[2J.weight", (8,))}), r"\x1b[2J"),
    "rows that make no heads": (
        gguf_file(tensors={"blk.0.attn_q.weight": tensor("blk.0.attn_q.weight", (8, 6))}),
        "blk.0.attn_q.weight has 6 rows, which are no whole heads of 4",
    ),
    "integers as weights": (
        gguf_file(tensors={"blk.0.attn_q.weight": tensor("blk.0.attn_q.weight", (8, 8), kind=26)}),
        "has type I32, which cannot be dequantised",
    ),
}


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with own_surroundings(tmp_path, monkeypatch):
        yield


@pytest.mark.parametrize("case", GGUF_FILES)
def test_a_malformed_gguf_file_is_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, said = GGUF_FILES[case]
    path = tmp_path / "model.gguf"
    put(path, content)
    assert_refused(capsys, inspect(path), f"{path}", said)


@pytest.mark.parametrize("case", CONVERTED_FILES)
def test_a_gguf_file_that_cannot_be_converted_is_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, said = CONVERTED_FILES[case]
    path = tmp_path / "model.gguf"
    put(path, content)
    assert_refused(capsys, generate(path), f"{path}: ", said)
    assert list((tmp_path / "cache" / "models").glob("[!.]*")) == []


@pytest.mark.parametrize("case", ["2^60 texts in 60 bytes", "1e9 numbers in 60 bytes", "2^60 entries", "2^60 tensors"])
def test_a_count_costs_nothing_before_it_is_refused(case: str, tmp_path: Path) -> None:
    put(tmp_path / "model.gguf", GGUF_FILES[case][0])
    began = time.thread_time()
    with pytest.raises(ModelError):
        inspect_model(str(tmp_path / "model.gguf"), None)
    assert time.thread_time() - began < 1.0


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes_of_a_gguf_header_give_facts_or_a_sentence(data: st.DataObject, tmp_path: Path) -> None:
    content = bytearray(gguf_file())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content) - 1024))
        content[start : start + 8] = data.draw(st.binary(min_size=1, max_size=12))
    put(tmp_path / "model.gguf", bytes(content))
    try:
        inspect_model(str(tmp_path / "model.gguf"), None)
    except ModelError as error:
        assert str(error).startswith(str(tmp_path / "model.gguf"))

"""Fingerprints: engines that continue a sequence exactly or up to rounding, and models that differ."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine import build
from rayloom_engine.build import FoundModel
from rayloom_engine.config import parse_config
from rayloom_engine.cpu_library.finding import find_library
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.models.checkpoint.source import cache_folder
from rayloom_engine.models.content_hash import content_hash
from rayloom_engine.protocol.fingerprint import Fingerprint, continuation, differences
from rayloom_engine.protocol.text_files import text_files
from rayloom_engine.worker.start import find_model
from rt_fake_core import FINGERPRINT
from rt_library import ISAS
from rt_stages import load_stages, stage_config
from rt_tiny import tiny_checkpoint, tiny_tokenizer


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_model_len", 512, "exact"),
        ("arithmetic", "C library 12ab, avx2", "rounding"),
        ("arithmetic", "C library cd34, avx512", "rounding"),
        ("arithmetic", "C library, avx512", "rounding"),  # an engine of an earlier version, whose build is unknown
        ("dtype", "float32", "rounding"),
        ("compute_dtype", "float32", "rounding"),
        ("quantization", "int8", "rounding"),
        ("tensor_parallel_size", 1, "rounding"),
        ("engine_version", "1.1", "rounding"),
        ("content_hash", "decaf", "other model"),
        ("tokenizer_hash", "u", "other model"),
        ("architecture", "Qwen3ForCausalLM", "other model"),
        ("rope_context", 8192, "other model"),
    ],
)
def test_each_field_has_its_weight(field: str, value: object, expected: str) -> None:
    other = msgspec.structs.replace(FINGERPRINT, **{field: value})
    assert continuation(FINGERPRINT, FINGERPRINT) == "exact"
    assert continuation(FINGERPRINT, other) == continuation(other, FINGERPRINT) == expected


@given(st.fixed_dictionaries({}, optional={"dtype": st.just("float16"), "rope_context": st.just(8192)}))
def test_the_worst_difference_decides(changes: dict[str, str | int]) -> None:
    other = msgspec.structs.replace(FINGERPRINT, **changes)
    expected = "other model" if "rope_context" in changes else "rounding" if changes else "exact"
    assert continuation(FINGERPRINT, other) == expected


def test_an_engine_without_a_fingerprint_continues_up_to_rounding() -> None:
    assert continuation(None, FINGERPRINT) == continuation(FINGERPRINT, None) == "rounding"


@pytest.mark.skipif(not ISAS, reason="there is no C library")
def test_engines_with_differently_built_libraries_continue_up_to_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the library has the same build. Another compiler would write other bytes, as the third file has."""
    config = parse_config({"model": str(tiny_checkpoint(tmp_path)), "front_port": 8002, "front_key_file": "/key"})
    tiny_tokenizer(tmp_path)
    found = FoundModel(*find_model(config, no_progress))
    path = find_library(cache_folder(os.environ), os.environ).path
    assert path is not None
    fingerprints = []
    for name, more in (("first", b""), ("copy", b""), ("other", b"\0")):
        library = tmp_path / f"{name}.so"
        library.write_bytes(path.read_bytes() + more)
        monkeypatch.setenv("RAYLOOM_CPU_LIBRARY", str(library))
        (rank,) = load_stages(stage_config(tmp_path))
        served = build.served_model(config, found, rank, weight_bytes=4, max_model_len=40)
        fingerprints.append(served.fingerprint)
    first, copy, other = fingerprints
    assert (continuation(first, copy), continuation(first, other)) == ("exact", "rounding")


@pytest.mark.parametrize("front_port", [None, 8002])
def test_files_are_hashed_only_for_gateways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, front_port: int | None
) -> None:
    config = parse_config({"model": str(tiny_checkpoint(tmp_path)), "front_port": front_port, "front_key_file": "/key"})
    tiny_tokenizer(tmp_path)
    found = FoundModel(*find_model(config, no_progress))
    read: list[Path] = []
    monkeypatch.setattr(build, "text_files", lambda folder: read.append(folder) or text_files(folder))
    monkeypatch.setattr(build, "content_hash", lambda folder: read.append(folder) or content_hash(folder))
    model = build.served_model(config, found, FINGERPRINT, weight_bytes=4, max_model_len=40)
    if front_port is None:
        assert (model.fingerprint, model.text_files, read) == (None, (), [])
    else:
        assert model.fingerprint is not None
        assert "tokenizer.json" in [file.name for file in model.text_files]
        assert read == [tmp_path, tmp_path]


def test_an_engine_of_a_version_with_other_fields_is_compared_by_the_common_ones() -> None:
    """Engines of an earlier version send an `adapter`, which is always empty."""
    sent = msgspec.msgpack.encode(msgspec.to_builtins(FINGERPRINT) | {"adapter": ""})
    assert msgspec.msgpack.decode(sent, type=Fingerprint) == FINGERPRINT


def test_differences_are_named_with_both_values() -> None:
    other = msgspec.structs.replace(FINGERPRINT, dtype="float32", max_model_len=1)
    assert differences(FINGERPRINT, other) == "dtype bfloat16 -> float32"


def test_a_fine_tuned_model_of_the_same_size_has_another_hash(tmp_path: Path) -> None:
    hashes = set()
    for name, byte in (("base", b"\x00"), ("tuned", b"\x01"), ("copy", b"\x00")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"same header" + byte * 100_000)
        hashes.add(content_hash(folder))
    assert len(hashes) == 2

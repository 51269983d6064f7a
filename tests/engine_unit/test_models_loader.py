"""Loading of checkpoints: sharded checkpoints, rounding, and every defect of the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayloom_engine.errors import ModelError
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.model import RankModel
from rayloom_engine.models.shape import read_shape
from rt_tiny import (
    TinySequence,
    advance,
    cpu_kernels,
    load_tiny,
    make_cache,
    tiny_checkpoint,
    tiny_variant,
    transformers_logits,
)

TOKEN_IDS = [5, 200, 17, 3, 3, 90, 41]


def prompt_logits(model: RankModel) -> torch.Tensor:
    sequence = TinySequence(TOKEN_IDS, block_table=[3, 1])
    return advance(model, make_cache(model.shape), [(sequence, len(TOKEN_IDS))])[0]


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replaces tensors in the folder's file; None removes a tensor."""
    tensors: dict[str, torch.Tensor | None] = {**load_file(folder / "model.safetensors"), **change}
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_shards_are_put_together(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    torch.testing.assert_close(
        prompt_logits(load_tiny(folder)), transformers_logits(folder, TOKEN_IDS), atol=1e-4, rtol=0
    )


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "llama-tied")
    shape = read_shape(folder)
    reports: list[tuple[str, int, int, str]] = []
    loaded = load_model(folder, shape, cpu_kernels(), dtype=torch.bfloat16, progress=lambda *now: reports.append(now))
    total = shape.weight_bytes(2)
    assert reports[0] == ("load", 0, total, "bytes") and reports[-1] == ("load", total, total, "bytes")
    assert [done for _, done, _, _ in reports] == sorted({done for _, done, _, _ in reports})
    assert loaded.model.weight_bytes == shape.weight_bytes(4)


def test_weights_are_rounded_before_they_are_widened(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path / "exact", "llama")
    model = load_model(folder, read_shape(folder), cpu_kernels(), dtype=torch.bfloat16).model
    rounded = tiny_variant(tmp_path / "rounded", "llama")
    rewrite(rounded, {name: t.bfloat16().float() for name, t in load_file(rounded / "model.safetensors").items()})
    expected = transformers_logits(rounded, TOKEN_IDS)
    assert (expected - transformers_logits(folder, TOKEN_IDS)).abs().max() > 1e-3
    torch.testing.assert_close(prompt_logits(model), expected, atol=1e-4, rtol=0)


def test_a_bfloat16_file_is_widened_exactly(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "qwen2")
    rewrite(folder, {name: t.bfloat16() for name, t in load_file(folder / "model.safetensors").items()})
    torch.testing.assert_close(
        prompt_logits(load_tiny(folder)), transformers_logits(folder, TOKEN_IDS), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_can_be_held_and_computed_in_a_short_type(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "qwen3")
    shape = read_shape(folder)
    model = load_model(folder, shape, cpu_kernels(dtype), dtype=dtype).model
    assert model.weight_bytes == shape.weight_bytes(2)
    cache = make_cache(shape)
    cache.pages[:] = [pages.to(dtype) for pages in cache.pages]
    logits = torch.cat(
        [
            advance(model, cache, [(sequence, count)])[0]
            for sequence in [TinySequence(TOKEN_IDS, block_table=[3, 1])]
            for count in (5, 1, 1)
        ]
    )
    assert logits.dtype is torch.float32
    expected = transformers_logits(folder, TOKEN_IDS)
    assert (logits - expected).abs().mean() < 0.05 * expected.std()


def test_tensors_that_follow_from_others_are_passed_over(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "llama-tied")
    expected = prompt_logits(load_tiny(folder))
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    rewrite(folder, {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert torch.equal(prompt_logits(load_tiny(folder)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_tied_head_may_be_rounded_to_a_shorter_type(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "llama-tied")
    expected = prompt_logits(load_tiny(folder))
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].to(dtype)
    rewrite(folder, {"lm_head.weight": head})
    assert torch.equal(prompt_logits(load_tiny(folder)), expected)
    head[-1, -1] += 1
    rewrite(folder, {"lm_head.weight": head})
    with pytest.raises(ModelError, match=r"lm_head\.weight is not the same as"):
        load_tiny(folder)


def test_a_head_with_values_of_its_own_is_refused_if_it_is_tied(tmp_path: Path) -> None:
    """transformers would not tie such a head."""
    folder = tiny_variant(tmp_path, "llama-tied")
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    rewrite(folder, {"lm_head.weight": head})
    sentence = (
        r"tie_word_embeddings is true, and lm_head\.weight is not the same as .*; set tie_word_embeddings to false"
    )
    with pytest.raises(ModelError, match=sentence):
        load_tiny(folder)
    rewrite(folder, {"lm_head.weight": head.double()})
    with pytest.raises(ModelError, match=r"left over: lm_head\.weight"):
        load_tiny(folder)
    rewrite(folder, {"lm_head.weight": head})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    torch.testing.assert_close(
        prompt_logits(load_tiny(folder)), transformers_logits(folder, TOKEN_IDS), atol=1e-4, rtol=0
    )


def test_tensors_that_do_not_fit_are_named_before_any_is_read(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "llama")
    rewrite(
        folder,
        {
            "model.norm.weight": None,
            "model.layers.1.mlp.up_proj.weight": torch.zeros(95, 64),
            "model.layers.0.self_attn.k_proj.weight": torch.zeros(32, 64, dtype=torch.int8),
            "model.layers.7.extra.weight": torch.zeros(1),
        },
    )
    reports: list[int] = []
    with pytest.raises(ModelError) as caught:
        load_model(
            folder,
            read_shape(folder),
            cpu_kernels(),
            dtype=torch.float32,
            progress=lambda phase, done, total, unit: reports.append(done),
        )
    for part in (
        "missing: model.norm.weight",
        "left over: model.layers.7.extra.weight",
        "model.layers.1.mlp.up_proj.weight is [95, 64], should be [96, 64]",
        "model.layers.0.self_attn.k_proj.weight has type I8, works: BF16, F16, F32",
    ):
        assert part in str(caught.value)
    assert reports == []


def test_long_lists_of_names_are_cut(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ModelError, match=r"missing: model\.layers\.2\.input_layernorm\.weight, .* and 13 more$"):
        load_tiny(folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has neither model.safetensors nor model.safetensors.index.json"),
        ({"pytorch_model.bin": b"x"}, r"pytorch_model\.bin must be converted to safetensors"),
        ({"model.safetensors": b"short"}, "is not a usable safetensors file"),
        ({"model.safetensors.index.json": b'{"weight_map": {}}'}, "weight_map must be an object"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "model-1.safetensors"}}'},
            r"names files that are not there: model-1\.safetensors",
        ),
    ],
)
def test_folders_without_usable_weights_are_refused(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    shape = read_shape(tiny_variant(tmp_path / "good", "llama"))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, shape, cpu_kernels(), dtype=torch.float32)

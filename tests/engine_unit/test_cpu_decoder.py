"""The decoder on the C library has the results of the plain decoder, for every architecture and instruction set.

This file tests one rank, and test_cpu_decoder_parts.py tests several ranks. test_cpu_decoder_batches.py tests that
results do not depend on the batch.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from rayloom_engine.cpu_library.library import linear_of
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.kv.library_pages import LibraryPages
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.model import RankModel
from rayloom_engine.models.shape import read_shape
from rt_library import (
    ISAS,
    LibraryModel,
    library_cache,
    load_on_library,
    open_library,
    to_numpy,
    to_torch,
    type_name,
)
from rt_tiny import (
    VARIANTS,
    VOCAB_SIZE,
    WIDE_NORMS,
    TinySequence,
    advance,
    cpu_kernels,
    make_cache,
    tiny_checkpoint,
    tiny_variant,
)

NUM_TOKENS = 100
TOKEN_IDS = random.Random(1).choices(range(VOCAB_SIZE), k=NUM_TOKENS)
# In float32 only the order of additions differs. Logits of the tiny models are about 1 to 4.
FLOAT32_TOLERANCE = 1e-4


def logits_of(
    model: RankModel | LibraryModel, cache: KvPages | LibraryPages, cuts: tuple[int, ...] = (NUM_TOKENS,)
) -> torch.Tensor:
    """The logits [T, V] of a sequence that is computed in these pieces."""
    blocks = list(range(cache.num_blocks - 1, -1, -1))
    sequence = TinySequence(TOKEN_IDS, blocks[: -(-NUM_TOKENS // cache.block_size)])
    return torch.cat([advance(model, cache, [(sequence, count)])[0] for count in cuts])


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, in units of the logits' standard deviation."""
    return float((ours - expected).square().mean().sqrt() / expected.std())


@pytest.fixture(scope="module", params=[*VARIANTS, *WIDE_NORMS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_variant(tmp_path_factory.mktemp(str(request.param)), str(request.param))


@pytest.mark.parametrize("isa", ISAS)
def test_float32_logits_are_those_of_the_reference_kernels(folder: Path, isa: str) -> None:
    shape = read_shape(folder)
    reference = load_model(folder, shape, cpu_kernels(backend="reference"), dtype=torch.float32).model
    expected = logits_of(reference, make_cache(shape))
    model = load_on_library(folder, isa, torch.float32)
    assert (model.weight_bytes, model.kv_layout) == (reference.weight_bytes, reference.kv_layout)
    for cuts in ((NUM_TOKENS,), (61, 1, 1, 37)):
        ours = logits_of(model, library_cache(model, 9), cuts)
        torch.testing.assert_close(ours, expected, atol=FLOAT32_TOLERANCE, rtol=0)


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_logits_are_nearer_to_float32_than_those_of_torch(folder: Path, isa: str) -> None:
    # All three models have the same weights, rounded to bfloat16. Torch also rounds the residual stream.
    shape = read_shape(folder)
    wide = load_model(folder, shape, cpu_kernels(), dtype=torch.bfloat16).model
    expected = logits_of(wide, make_cache(shape))
    narrow = load_model(folder, shape, cpu_kernels(torch.bfloat16, "plain"), dtype=torch.bfloat16).model
    pages = KvPages.allocate(
        narrow.kv_layout, num_blocks=64, block_size=4, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    of_torch = relative_error(logits_of(narrow, pages), expected)
    model = load_on_library(folder, isa, torch.bfloat16)
    ours = relative_error(logits_of(model, library_cache(model, 9)), expected)
    # A bfloat16 has 8 significant bits: a rounded activation differs by 0.1 to 0.2 %, and each layer rounds six times.
    # If the second and third expert of a token are about equally likely, rounding may select the third instead of the
    # second.
    assert 0.0 < ours < (0.03 if shape.experts is None else 0.06)
    assert ours < of_torch


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 256])
def test_head_sizes_and_groups_of_query_heads(head_dim: int, dtype: torch.dtype, isa: str, tmp_path: Path) -> None:
    sizes = {"head_dim": head_dim, "num_attention_heads": 6, "num_key_value_heads": 1}
    folder = tiny_checkpoint(tmp_path, hidden_size=96, num_hidden_layers=1, vocab_size=250, **sizes)
    shape = read_shape(folder)
    token_ids = [token_id % 250 for token_id in TOKEN_IDS]
    plain = load_model(folder, shape, cpu_kernels(), dtype=dtype).model
    (expected,) = advance(plain, make_cache(shape), [(TinySequence(token_ids, range(25)), NUM_TOKENS)])
    model = load_on_library(folder, isa, dtype)
    (ours,) = advance(model, library_cache(model, 7), [(TinySequence(token_ids, range(7)), NUM_TOKENS)])
    assert ours.shape == (NUM_TOKENS, 250)
    assert relative_error(ours, expected) < (1e-5 if dtype is torch.float32 else 0.02)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "damaged", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_in_a_weight_reaches_the_logits(dtype: torch.dtype, damaged: str, isa: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_variant(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    weights[damaged].view(-1)[5] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = load_on_library(folder, isa, dtype)
    sequence = TinySequence([7, 0, 8, 9], [0])  # the NaN of the embedding is in the row of token 0
    (logits,) = advance(model, library_cache(model, 1), [(sequence, 4)])
    assert logits[1:].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("position", [0, 100, 256, 511])
def test_a_key_that_is_not_finite_reaches_the_logits_of_its_token_and_of_all_later_ones(
    position: int, isa: str, tmp_path: Path
) -> None:
    # Position 256 is a special case. In its segment the token sees only its own key, but its tile also reads later
    # blocks.
    from safetensors.torch import load_file, save_file

    shape = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1}
    folder = tiny_checkpoint(tmp_path, max_position_embeddings=1024, **shape)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 0.0
    weights["model.embed_tokens.weight"][9, 0] = 1.0
    weights["model.layers.0.self_attn.k_proj.weight"][:, 0] = 3e38
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = load_on_library(folder, isa, torch.float32)
    token_ids = [9 if place == position else place % 8 for place in range(600)]
    (logits,) = advance(model, library_cache(model, 38), [(TinySequence(token_ids, range(38)), 600)])
    assert logits.isnan().any(dim=1).tolist() == [place >= position for place in range(600)]


@pytest.mark.parametrize("isa", ISAS)
def test_progress_counts_the_halves_of_layers(isa: str, tmp_path: Path) -> None:
    model = load_on_library(tiny_variant(tmp_path, "llama3-rope"), isa, torch.float32)
    cache = library_cache(model, 9)
    assert model.progress == 0
    logits_of(model, cache, (60, 40))
    assert model.progress == 2 * 2 * 3, "two steps of three layers"


@pytest.mark.parametrize("isa", ISAS)
def test_a_tied_head_shares_the_matrix_of_the_embedding(isa: str, tmp_path: Path) -> None:
    model = load_on_library(tiny_variant(tmp_path, "llama-tied"), isa, torch.bfloat16)
    head, embedding = model.decoder._weights.head, model._weights.embedding
    assert head is not None and embedding is not None
    assert head.weight == embedding.weight


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_outputs", [16, 72, 250])
def test_a_product_is_that_of_the_reference(num_outputs: int, dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(0)
    library = open_library(isa)
    weight = torch.randn(num_outputs, 48).to(dtype)
    bias = torch.randn(num_outputs).to(dtype)
    packed = library.pack(to_numpy(weight))
    assert packed.shape == weight.shape
    wide_bias = bias.float().numpy()
    operand = getattr(torch, library.operand_dtype(type_name(dtype)))
    for num_rows in (1, 2, 3, 4, 13, 65):
        x = torch.randn(num_rows, 48).to(dtype)
        expected = cpu_kernels(backend="reference").linear.multiply(x, weight, bias)
        ours = to_torch(library.multiply(type_name(dtype), linear_of(packed, wide_bias), to_numpy(x.to(operand))))
        assert ours.shape == (num_rows, num_outputs)
        torch.testing.assert_close(ours, expected.float(), atol=1e-4 if dtype is torch.float32 else 0.07, rtol=1e-2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_packed_matrix_can_be_looked_up(dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(0)
    library = open_library(isa)
    matrix_VD = torch.randn(37, 48).to(dtype)
    packed_VD = library.pack(to_numpy(matrix_VD))
    rows_ND = to_torch(library.embed(type_name(dtype), linear_of(packed_VD, None), np.array([36, 0, -1, 17])))
    assert torch.equal(rows_ND, torch.stack([matrix_VD[36], matrix_VD[0], torch.zeros(48), matrix_VD[17]]).float())


@pytest.mark.parametrize("isa", ISAS)
def test_the_log_names_instruction_set_and_threads(isa: str) -> None:
    assert open_library(isa, 1).description == f"{isa}, 1 thread, not pinned"
    assert open_library(isa, 3).description == f"{isa}, 3 threads, not pinned"

"""int8 weights: the same arithmetic as in torch, memory, several ranks, and settings that exclude int8.

test_cpu_decoder_batches.py tests that results do not depend on the batch.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rayloom_engine.config import INT8_GROUP, EngineConfig, parse_config
from rayloom_engine.cpu_library import finding
from rayloom_engine.cpu_library.arrays import copy_elements
from rayloom_engine.cpu_library.library import linear_of
from rayloom_engine.errors import ConfigError
from rayloom_engine.front.openai.answers.fingerprint import fingerprint
from rayloom_engine.kernels.linear import LinearKernel
from rayloom_engine.layers.linear_spec import AxisPart, LinearSpec
from rayloom_engine.models.int8_shape import check_int8
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.on_library.matrix import Matrix, WeightFormat
from rayloom_engine.models.shape import read_shape
from rayloom_engine.protocol.messages import ServedModel
from rayloom_engine.worker.cpu_backend import LibraryChoice, check_quantization
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
from rt_stages import (
    FOR_PROMPTS_ALONE,
    RankProcesses,
    StagesInARow,
    answers,
    load_stages,
    make_engine,
    stage_config,
)
from rt_tiny import VARIANTS, VOCAB_SIZE, TinySequence, advance, cpu_kernels, make_cache, tiny_checkpoint, tiny_variant

TOKEN_IDS = [(7 * position) % VOCAB_SIZE for position in range(60)]
DTYPES = (torch.float32, torch.bfloat16)
SIZES = {"vocab_size": 251, "intermediate_size": 160, "num_hidden_layers": 4}

_epochs = itertools.count(1)


def whole(size: int) -> AxisPart:
    return AxisPart(range(size), size)


def quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers from -127 to 127, as float32, and the scale of each row."""
    largest = rows.float().abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0.0)  # torch rounds 127 / x twice
    return (rows.float() * inverse).round(), largest[..., 0] / 127


def int8_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + bias with int8 weights and activations. The sums over a group are exact integers."""
    integers_NK, scales_N = quantised(weight)
    grouped = x.reshape(*x.shape[:-1], -1, INT8_GROUP)
    x_integers, x_scales = quantised(grouped)
    weight_groups = integers_NK.view(weight.shape[0], -1, INT8_GROUP)
    sums = torch.einsum("...gk,ngk->...ng", x_integers.double(), weight_groups.double())  # exact
    y = (sums * x_scales.double()[..., None, :]).sum(dim=-1) * scales_N.double()
    return (y if bias is None else y + bias.double()).float()


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, in units of the expected values' standard deviation."""
    return float((ours - expected).square().mean().sqrt() / expected.std())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_outputs", [16, 72, 250])
def test_a_product_is_that_of_exact_sums_of_integers(num_outputs: int, dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(0)
    library = open_library(isa)
    weight = (torch.randn(num_outputs, 96) * torch.rand(num_outputs, 1)).to(dtype)
    weight[3] = 0
    bias = torch.randn(num_outputs)
    matrix = library.pack_int8(to_numpy(weight))
    for num_rows in (1, 2, 7, 65):
        x = torch.randn(num_rows, 96).to(dtype)
        x[0, :INT8_GROUP] = 0
        operand = x.to(getattr(torch, library.operand_dtype(type_name(dtype))))
        linear = linear_of(matrix.packed_NK, bias.numpy(), matrix.scales_N)
        ours = to_torch(library.multiply(type_name(dtype), linear, to_numpy(operand)))
        # Only the sum over groups and the scales are rounded.
        torch.testing.assert_close(ours, int8_product(x, weight, bias), atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_quantised_matrix_can_be_looked_up(dtype: torch.dtype, isa: str) -> None:
    torch.manual_seed(0)
    matrix_VD = torch.randn(37, 64).to(dtype)
    library = open_library(isa)
    packed = library.pack_int8(to_numpy(matrix_VD))
    matrix = linear_of(packed.packed_NK, None, packed.scales_N)
    rows_ND = to_torch(library.embed(type_name(dtype), matrix, np.array([36, 0, -1, 17])))
    integers_VD, scales = quantised(matrix_VD)
    plain_VD = integers_VD * scales[:, None]
    assert torch.equal(rows_ND, torch.stack([plain_VD[36], plain_VD[0], torch.zeros(64), plain_VD[17]]))
    assert relative_error(plain_VD, matrix_VD.float()) < 0.01


def logits_of(model: LibraryModel) -> torch.Tensor:
    (logits,) = advance(model, library_cache(model, 4), [(TinySequence(TOKEN_IDS, range(4)), 60)])
    return logits


def reference_logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """The logits [T, V] of the reference kernels in float32, with int8 arithmetic in every product and the embedding.

    `dtype`: the type to which weights are rounded before they are quantised.
    """
    shape = read_shape(folder)
    kernel = LinearKernel(multiply=int8_product, pack=lambda weight: weight, description="int8 in torch")
    kernels = dataclasses.replace(cpu_kernels(backend="reference"), linear=kernel)
    model = load_model(folder, shape, kernels, dtype=dtype).model
    embedding_VD = model._weights.embedding_VD
    integers_VD, scales_V = quantised(embedding_VD)
    embedding_VD.copy_(integers_VD * scales_V[:, None])
    (logits,) = advance(model, make_cache(shape), [(TinySequence(TOKEN_IDS, range(15)), 60)])
    return logits


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("variant", ["llama", "llama-tied", "llama-biases", "qwen2-some-windows", "qwen3-biases"])
def test_logits_are_those_of_the_same_arithmetic_in_torch(variant: str, isa: str, tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, variant)
    for dtype in DTYPES:
        expected = reference_logits(folder, dtype)
        logits, plain_logits = (
            logits_of(load_on_library(folder, isa, dtype, quantization=form)) for form in ("int8", "none")
        )
        error = relative_error(logits, expected)
        of_plain_weights = relative_error(plain_logits, expected)
        # In float32, sums differ in their last bits. So an activation halfway between two integers may be rounded to
        # the other integer. In bfloat16 activations are rounded before they are quantised.
        assert error < (0.1 if dtype is torch.float32 else 0.9) * of_plain_weights
        assert of_plain_weights < 0.1


@pytest.mark.parametrize("isa", ISAS)
def test_a_tied_head_shares_the_quantised_matrix_of_the_embedding(isa: str, tmp_path: Path) -> None:
    model = load_on_library(tiny_variant(tmp_path, "llama-tied"), isa, torch.bfloat16, quantization="int8")
    weights = model.decoder._weights
    assert weights.head is not None and weights.embedding is not None and weights.embedding.scales
    assert (weights.head.weight, weights.head.scales) == (weights.embedding.weight, weights.embedding.scales)


@pytest.mark.skipif(not ISAS, reason="there is no C library")
@pytest.mark.parametrize(("variant", "num_vocabularies"), [("llama", 2), ("llama-tied", 1)])
def test_a_weight_takes_a_byte_and_a_row_four_more(variant: str, num_vocabularies: int, tmp_path: Path) -> None:
    model = load_on_library(tiny_variant(tmp_path, variant), ISAS[0], torch.bfloat16, quantization="int8")
    # The rows of q, k, v, o, gate and up have 64 columns, and the rows of down have 96.
    layer = (64 + 32 + 32 + 64 + 96 + 96) * (64 + 4) + 64 * (96 + 4) + 2 * 64 * 2
    assert model.weight_bytes == 2 * layer + num_vocabularies * VOCAB_SIZE * (64 + 4) + 64 * 2


@pytest.mark.skipif(not ISAS, reason="there is no C library")
def test_the_plain_matrix_is_freed_and_the_bias_is_kept() -> None:
    library = open_library(ISAS[0])
    spec = LinearSpec(outputs={"q": whole(40), "k": whole(8)}, inputs=whole(64), has_bias=True)
    scheme = Matrix(spec, WeightFormat(library=library, dtype="bfloat16", quantization="int8"))
    torch.manual_seed(0)
    tensors = {name: torch.randn(found.array.shape) for name, found in scheme.destinations().items()}
    assert list(tensors) == ["q.weight", "q.bias", "k.weight", "k.bias"]
    for name, found in scheme.destinations().items():
        copy_elements(found.array, tensors[name].numpy())
    del found
    assert scheme._plain_NK is not None
    plain = weakref.ref(scheme._plain_NK)
    num_bytes = scheme.num_bytes
    scheme.finish()
    assert plain() is None
    assert scheme.num_bytes == num_bytes == 48 * (64 + 4) + 48 * 2
    x = torch.randn(15, 64).bfloat16()
    weight = torch.cat([tensors["q.weight"], tensors["k.weight"]]).bfloat16()
    bias = torch.cat([tensors["q.bias"], tensors["k.bias"]]).bfloat16()
    operand = to_numpy(x.to(getattr(torch, library.operand_dtype("bfloat16"))))
    ours = to_torch(library.multiply("bfloat16", scheme.structure, operand))
    torch.testing.assert_close(ours, int8_product(x, weight, bias), atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "damaged", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"]
)
def test_a_nan_in_a_weight_reaches_the_logits(damaged: str, value: float, isa: str, tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    weights[damaged].view(-1)[5] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = load_on_library(folder, isa, torch.bfloat16, quantization="int8")
    (logits,) = advance(model, library_cache(model, 1), [(TinySequence([7, 0, 8, 9], [0]), 4)])
    if damaged == "lm_head.weight":
        assert logits[:, 0].isnan().all() and logits[:, 1:].isfinite().all()
    else:
        assert logits[1:].isnan().all()


def checkpoint(folder: Path, variant: str) -> Path:
    architecture, overrides = VARIANTS[variant]
    return tiny_checkpoint(folder, architecture, **{**overrides, **SIZES})


@pytest.mark.skipif(not ISAS, reason="there is no C library")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["llama-tied", "llama-biases"])
def test_stages_give_the_same_bits_as_one_rank(variant: str, dtype: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, variant)
    settings = {"dtype": dtype, "quantization": "int8"}
    alone = load_stages(stage_config(folder, **settings))
    expected = answers(make_engine(StagesInARow(alone)), SIZES["vocab_size"])
    stages = load_stages(stage_config(folder, 3, **settings))
    got = answers(make_engine(StagesInARow(stages), depth=3), SIZES["vocab_size"])
    assert got == expected
    assert {rank.quantization for rank in stages} == {"int8"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("first"))
    processes = RankProcesses(stage_config(folder, tensor_parallel_size=2))
    yield processes
    processes.close()


@pytest.mark.skipif(not ISAS, reason="there is no C library")
@pytest.mark.parametrize("variant", ["llama-tied", "qwen3-biases"])
def test_shards_compute_nearly_the_logprobs_of_one_rank(variant: str, ranks: RankProcesses, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, variant)
    settings = {"dtype": "bfloat16", "quantization": "int8"}
    alone = load_stages(stage_config(folder, **settings))
    expected = logprobs_of(answers(make_engine(StagesInARow(alone)), SIZES["vocab_size"], FOR_PROMPTS_ALONE))
    ranks.load(stage_config(folder, tensor_parallel_size=2, **settings))  # 160 feed-forward inputs, cut into 64 and 96
    epoch = next(_epochs)
    ranks.join(epoch)
    got = logprobs_of(answers(make_engine(ranks, epoch), SIZES["vocab_size"], FOR_PROMPTS_ALONE))
    # Each shard has its own scales for its columns of o and down. So the results differ from those of one rank.
    assert got == pytest.approx(expected, abs=0.5)
    mean = sum(abs(a - b) for a, b in zip(got, expected, strict=True)) / len(got)
    assert mean < 0.1


def logprobs_of(outputs) -> list[float]:
    return [entry.logprob for part in outputs["logprobs"] for entry in part.prompt_logprobs]


INT8_DRAFT = {"speculation": "draft", "draft_model": "m", "draft_quantization": "int8"}


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"quantization": "int4"}, "quantization: Input should be 'auto', 'none' or 'int8', given 'int4'"),
        ({"quantization": None}, "quantization: Input should be 'auto', 'none' or 'int8', given None"),
        (
            {"quantization": "int8", "device": "cuda"},
            "quantization: 'int8' works on CPU only, and device is 'cuda'; remove one of the two",
        ),
        (
            {"quantization": "int8", "dtype": "float16"},
            "quantization: 'int8' works with dtype bfloat16 or float32, and dtype is 'float16'; change one of the two",
        ),
        (
            {**INT8_DRAFT, "device": "cuda"},
            "draft_quantization: 'int8' works on CPU only, and device is 'cuda'; remove one of the two",
        ),
        (
            {**INT8_DRAFT, "dtype": "float16"},
            "draft_quantization: 'int8' works with dtype bfloat16 or float32, and dtype is 'float16'; change one of "
            "the two",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings: dict[str, object], refusal: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(settings)
    assert str(error.value) == f"EngineConfig: {refusal}"


@pytest.mark.parametrize(
    ("overrides", "changes", "num_shards", "refusal"),
    [
        ({"hidden_size": 80}, {}, 1, "needs multiples of 32, and hidden_size is 80"),
        ({"intermediate_size": 112}, {}, 1, "needs multiples of 32, and intermediate_size is 112"),
        ({}, {}, 4, "needs multiples of 32, and the query heads' size on a rank is 16"),
        (
            {"head_dim": 32},
            {},
            4,
            "4 ranks cannot share 3 groups of 32 feed-forward inputs; use fewer ranks",
        ),
        ({}, {"checkpoint_dtype": "float16"}, 1, "auto means float16 for this checkpoint; set dtype to one of them"),
    ],
)
def test_models_without_groups_of_inputs_are_refused(
    overrides: dict[str, int], changes: dict[str, str], num_shards: int, refusal: str, tmp_path: Path
) -> None:
    shape = read_shape(tiny_checkpoint(tmp_path))
    shape = dataclasses.replace(shape, **overrides, **changes)
    with pytest.raises(ConfigError) as error:
        check_int8(shape, "auto", num_shards)
    assert refusal in str(error.value)


def test_a_model_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, intermediate_size=112)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="intermediate_size is 112"):
        load_stages(stage_config(folder, quantization="int8"))


def test_without_the_library_int8_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    monkeypatch.setenv("RAYLOOM_CPU_ISA", "torch")
    with pytest.raises(ConfigError) as error:
        load_stages(stage_config(folder, quantization="int8"))
    assert str(error.value) == (
        "quantization: 'int8' needs the CPU library, which is not used, because RAYLOOM_CPU_ISA or RAYLOOM_KERNELS "
        "demands torch; change that, or set quantization to 'none'"
    )
    monkeypatch.delenv("RAYLOOM_CPU_ISA")
    monkeypatch.delenv("RAYLOOM_CPU_LIBRARY", raising=False)
    monkeypatch.setattr(finding, "PACKAGE", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="there is no C\\+\\+ compiler here"):
        load_stages(stage_config(folder, quantization="int8"))


def test_int8_is_refused_on_an_accelerator_and_plain_weights_are_not() -> None:
    with pytest.raises(ConfigError) as error:
        check_quantization("int8", "cuda", LibraryChoice(None))
    assert str(error.value) == (
        "quantization: 'int8' works on CPU only, and this rank computes on cuda; set device to 'cpu', or quantization "
        "to 'none'"
    )
    check_quantization("none", "cuda", LibraryChoice(None))


def test_answers_of_other_weights_have_another_fingerprint() -> None:
    model = ServedModel(
        path="/p",
        architecture="a",
        num_parameters=1,
        vocab_size=2,
        max_model_len=3,
        eos_token_ids=(),
        dtype="bfloat16",
        compute_dtype="bfloat16",
        weight_bytes=4,
    )
    config = EngineConfig()
    kinds = [msgspec.structs.replace(model, quantization=quantization) for quantization in ("none", "int8")]
    assert len({fingerprint(config, kind) for kind in kinds}) == 2

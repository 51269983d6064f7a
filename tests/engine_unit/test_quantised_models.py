"""Models with quantised checkpoints: logits, memory, several ranks. The references use the dequantised weights.

test_cpu_grouped_weights.py tests the products, test_quantised_configs.py the refusals.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch

from rayloom_engine.config import INT8_GROUP
from rayloom_engine.kernels.linear import LinearKernel
from rayloom_engine.models.checkpoint.gguf_convert import convert_gguf
from rayloom_engine.models.costs import model_costs
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.model import RankModel
from rayloom_engine.models.shape import read_shape
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.stage import whole_model
from rt_gguf import write_gguf
from rt_library import ISAS, LibraryModel, library_cache, load_on_library
from rt_quantised import FORMATS, quantised_checkpoint
from rt_stages import (
    FOR_PROMPTS_ALONE,
    RankProcesses,
    StagesInARow,
    answers,
    load_stages,
    make_engine,
    stage_config,
)
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

VOCAB_SIZE = 250  # no multiple of 16, and no other matrix has this number of rows
TOKEN_IDS = [(7 * position) % VOCAB_SIZE for position in range(60)]
# With two ranks each rank's columns are whole groups of 64.
SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
ACTIVATIONS = 0.07  # relative error of these models' logits due to activations of 8 bits
GGUF_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")

_epochs = itertools.count(1)

needs_library = pytest.mark.skipif(not ISAS, reason="there is no C library")


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, in units of the expected values' standard deviation."""
    return float((ours - expected).square().mean().sqrt() / expected.std())


def logits_of(model: LibraryModel) -> torch.Tensor:
    (logits,) = advance(model, library_cache(model, 4), [(TinySequence(TOKEN_IDS, range(4)), 60)])
    return logits


def with_quantised_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + bias with activations of 8 bits, except for the head, which is dense."""
    if len(weight) != VOCAB_SIZE:
        grouped = x.float().view(*x.shape[:-1], -1, INT8_GROUP)
        scales = grouped.abs().amax(dim=-1, keepdim=True) / 127
        x = ((grouped / scales.clamp(min=1e-30)).round() * scales).view(x.shape)
    return torch.nn.functional.linear(x, weight, bias)


def reference_logits(folder: Path) -> torch.Tensor:
    """Logits of the dequantised weights in torch, with activations of 8 bits as in the C library."""
    kernel = LinearKernel(multiply=with_quantised_rows, pack=lambda weight: weight, description="8 bits in torch")
    kernels = dataclasses.replace(cpu_kernels(backend="reference"), linear=kernel)
    return torch_logits(load_model(folder, read_shape(folder), kernels, dtype=torch.float32).model)


def torch_logits(model: RankModel) -> torch.Tensor:
    (logits,) = advance(model, make_cache(model.shape), [(TinySequence(TOKEN_IDS, range(15)), 60)])
    return logits


def costs_of(folder: Path, element_bytes: int, num_ranks: int = 1) -> int:
    """The weight bytes of a stage's largest rank, computed from the costs that `inspect` reports."""
    costs = model_costs(read_shape(folder), (1, num_ranks) if num_ranks > 1 else (1,))
    parts = [costs.both, *(costs.kinds[ord(kind) - ord("a")].weights for kind in expanded(costs.layers))]
    if read_shape(folder).scheme is None:
        return sum(part.elements[-1] * element_bytes for part in parts)
    return sum(part.kept_elements[-1] * element_bytes + part.kept_bytes[-1] for part in parts)


def expanded(layers: str) -> Iterator[str]:
    number = ""
    for letter in layers:
        if letter.isdigit():
            number += letter
        else:
            yield from letter * int(number or 1)
            number = ""


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("dense") / "model", **SIZES)


@pytest.fixture(scope="module")
def dense_logits(dense: Path) -> torch.Tensor:
    return transformers_logits(dense, TOKEN_IDS)


@needs_library
@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dequantised_weights(
    name: str, dense: Path, dense_logits: torch.Tensor, tmp_path: Path
) -> None:
    plain = quantised_checkpoint(dense, name, tmp_path / "quantised")
    expected = transformers_logits(plain, TOKEN_IDS)
    # The reader returns exactly these weights, with one exception: float16 rounds the offset of a group with a zero
    # point.
    torch.testing.assert_close(torch_logits(load_tiny(tmp_path / "quantised")), expected, atol=0.02, rtol=0)
    exact = load_on_library(tmp_path / "quantised", ISAS[0], torch.float32, quantization="none")
    assert relative_error(logits_of(exact), expected) < 1e-3
    same_arithmetic = reference_logits(tmp_path / "quantised")
    for isa in ISAS:
        kept = load_on_library(tmp_path / "quantised", isa, torch.float32, quantization="auto")
        assert relative_error(logits_of(kept), expected) < ACTIVATIONS
        # An activation halfway between two integers may be rounded to the other integer. fp8 weights are rounded to 8
        # bits.
        bound = 0.06 if "f" in name.partition("-")[0] else 0.01
        assert relative_error(logits_of(kept), same_arithmetic) < bound
    assert relative_error(dense_logits, expected) > 0.02  # so the quantisation has an effect


@needs_library
@pytest.mark.parametrize("kind", [*GGUF_KINDS, "BF16"])
def test_a_gguf_file_keeps_its_weights(kind: str, tmp_path: Path) -> None:
    dense = tiny_variant(tmp_path / "original", "llama")
    tensors = write_gguf(tmp_path / "m.gguf", dense, kind=gguf.GGMLQuantizationType[kind])
    folders = [tmp_path / "kept", tmp_path / "converted"]
    for folder, keeps_blocks in zip(folders, (True, False), strict=True):
        folder.mkdir()
        convert_gguf(tmp_path / "m.gguf", folder, keeps_blocks=keeps_blocks)
    expected = transformers_logits(folders[1], TOKEN_IDS)
    exact = torch_logits(load_tiny(folders[0]))
    assert relative_error(exact, expected) < 0.03  # the converted weights are rounded to bfloat16
    kept = load_on_library(folders[0], ISAS[0], torch.float32, quantization="auto")
    assert relative_error(logits_of(kept), exact) < (0.01 if kind == "BF16" else ACTIVATIONS)
    label = read_shape(folders[0]).scheme
    assert (None if label is None else label.label) == (None if kind == "BF16" else f"gguf-{kind.lower()}")
    groups = [(len(values), values.shape[1] // 32) for values in tensors.values() if values.ndim == 2]
    if kind in ("Q4_0", "Q5_0", "Q8_0"):  # groups without offsets are stored in pairs
        groups = [(num_rows, num_groups + num_groups % 2) for num_rows, num_groups in groups]
    num_groups = sum(num_rows * of_row for num_rows, of_row in groups)
    num_others = sum(values.size for values in tensors.values() if values.ndim == 1)
    # Bytes of 32 weights. Weights of 5 bits are stored with 8 bits.
    group_bytes = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 34, "Q5_1": 36, "Q8_0": 34, "BF16": 128}[kind]
    assert kept.weight_bytes == num_groups * group_bytes + 4 * num_others


@needs_library
@pytest.mark.parametrize("part", ["v_proj", "k_proj"])
def test_q_k_and_v_of_different_types_keep_their_bits(part: str, tmp_path: Path) -> None:
    dense = tiny_variant(tmp_path / "original", "llama")
    kinds = gguf.GGMLQuantizationType
    tensors = write_gguf(tmp_path / "m.gguf", dense, kind=kinds.Q4_1, kinds={part: kinds.Q8_0})
    (tmp_path / "kept").mkdir()
    convert_gguf(tmp_path / "m.gguf", tmp_path / "kept", keeps_blocks=True)
    kept = load_on_library(tmp_path / "kept", ISAS[0], torch.float32, quantization="auto")
    assert relative_error(logits_of(kept), torch_logits(load_tiny(tmp_path / "kept"))) < ACTIVATIONS
    of_part = sum(values.size for name, values in tensors.items() if name.split(".")[-2] == part)
    of_others = sum(values.size for values in tensors.values() if values.ndim == 2) - of_part
    vectors = sum(values.size for values in tensors.values() if values.ndim == 1)
    # 32 weights take 34 bytes in Q8_0, and 20 bytes in Q4_1.
    assert kept.weight_bytes == of_part // 32 * 34 + of_others // 32 * 20 + 4 * vectors
    assert kept.weight_bytes == costs_of(tmp_path / "kept", 4)


@needs_library
def test_gate_and_up_of_different_types_are_stacked_with_8_bits(tmp_path: Path) -> None:
    dense = tiny_variant(tmp_path / "original", "llama")
    kinds = gguf.GGMLQuantizationType
    tensors = write_gguf(tmp_path / "m.gguf", dense, kind=kinds.Q4_1, kinds={"up_proj": kinds.Q8_0})
    (tmp_path / "kept").mkdir()
    convert_gguf(tmp_path / "m.gguf", tmp_path / "kept", keeps_blocks=True)
    kept = load_on_library(tmp_path / "kept", ISAS[0], torch.float32, quantization="auto")
    assert relative_error(logits_of(kept), torch_logits(load_tiny(tmp_path / "kept"))) < ACTIVATIONS
    stacked = sum(values.size for name, values in tensors.items() if name.split(".")[-2] in ("gate_proj", "up_proj"))
    of_others = sum(values.size for values in tensors.values() if values.ndim == 2) - stacked
    vectors = sum(values.size for values in tensors.values() if values.ndim == 1)
    # 32 weights with scale and offset take 20 bytes with 4 bits, 36 bytes with 8 bits.
    assert kept.weight_bytes == stacked // 32 * 36 + of_others // 32 * 20 + 4 * vectors
    assert kept.weight_bytes == costs_of(tmp_path / "kept", 4)


@needs_library
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K", "Q3_K"])
def test_the_k_formats_are_read(kind: str) -> None:
    from rayloom_engine.models.quantised.gguf_blocks import GgufReader

    kinds = gguf.GGMLQuantizationType
    inputs, num_bytes = gguf.GGML_QUANT_SIZES[kinds[kind]]
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (6, 2, num_bytes), dtype=torch.uint8).numpy()
    # The float16 numbers of a block: its scale, and in Q4_K and Q5_K the scale of its offsets.
    halves = slice(num_bytes - 2, num_bytes) if kind in ("Q6_K", "Q3_K") else slice(0, 4)
    blocks[..., halves] = torch.rand(6, 2, (halves.stop - halves.start) // 2).half().view(torch.uint8).numpy()
    rows = blocks.reshape(6, -1)
    reader = GgufReader(kind=kind, block_inputs=inputs, block_bytes=num_bytes)
    expected = torch.from_numpy(gguf.dequantize(rows, kinds[kind]))
    packed = reader.packed({"weight": rows})
    assert packed.form == reader.form(512)
    # Q3_K loses up to 1/254 of the largest of 32 weights, the other kinds only the last bits of a scale.
    bound = 6e-3 if kind == "Q3_K" else 1e-3
    assert relative_error(torch.from_numpy(packed.plain()), expected) < bound
    torch.testing.assert_close(torch.from_numpy(reader.plain({"weight": rows})), expected)


@needs_library
@pytest.mark.parametrize("name", FORMATS)
def test_inspect_gives_the_bytes_that_a_rank_holds(name: str, dense: Path, tmp_path: Path) -> None:
    quantised_checkpoint(dense, name, tmp_path / "quantised")
    shape = read_shape(tmp_path / "quantised")
    model = load_on_library(tmp_path / "quantised", ISAS[0], torch.bfloat16, quantization="auto")
    assert model.weight_bytes == costs_of(tmp_path / "quantised", 2)
    assert model.weight_bytes < costs_of(dense, 2)
    held = [
        load_on_library(
            tmp_path / "quantised",
            ISAS[0],
            torch.bfloat16,
            ModelPart(whole_model(shape.num_layers), Shard(index, 2)),
            quantization="auto",
        ).weight_bytes
        for index in range(2)
    ]
    assert max(held) == costs_of(tmp_path / "quantised", 2, num_ranks=2)


@needs_library
def test_matrices_that_are_not_quantised_stay_dense(tmp_path: Path) -> None:
    dense = tiny_checkpoint(tmp_path / "dense", **SIZES, num_hidden_layers=3)
    # Two kinds of matrices are not quantised: q of every layer, and down of the second layer. Because of q, the stacked
    # q, k, v is dense.
    skipped = ("q_proj", "layers.1.mlp.down_proj")
    plain = quantised_checkpoint(dense, "awq", tmp_path / "quantised", skipped=skipped)
    model = load_on_library(tmp_path / "quantised", ISAS[0], torch.float32, quantization="auto")
    assert relative_error(logits_of(model), transformers_logits(plain, TOKEN_IDS)) < ACTIVATIONS
    assert model.weight_bytes == costs_of(tmp_path / "quantised", 4)
    costs = model_costs(read_shape(tmp_path / "quantised"), (1,))
    assert costs.layers == "aba"
    # 32 weights of 4 bits with scale and offset take 20 bytes, and a row's factor 4.
    down, of_others = 128 * (256 // 32 * 20 + 4), (128 + 2 * 256) * (128 // 32 * 20 + 4)
    assert [kind.weights.kept_bytes for kind in costs.kinds] == [(of_others + down,), (of_others,)]


@needs_library
@pytest.mark.parametrize("name", ["awq", "int-quantized", "fp8-block"])
def test_stages_give_the_same_bits_as_one_rank(name: str, tmp_path: Path) -> None:
    dense = tiny_checkpoint(tmp_path / "dense", **SIZES, num_hidden_layers=4)
    quantised_checkpoint(dense, name, tmp_path / "quantised")
    settings = {"dtype": "bfloat16", "quantization": "auto"}
    alone = load_stages(stage_config(tmp_path / "quantised", **settings))
    expected = answers(make_engine(StagesInARow(alone)), VOCAB_SIZE)
    stages = load_stages(stage_config(tmp_path / "quantised", 3, **settings))
    assert answers(make_engine(StagesInARow(stages), depth=3), VOCAB_SIZE) == expected
    assert {rank.quantization for rank in stages} == {read_shape(tmp_path / "quantised").scheme.label}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("first"))
    processes = RankProcesses(stage_config(folder, tensor_parallel_size=2))
    yield processes
    processes.close()


@needs_library
@pytest.mark.parametrize("name", ["awq-64", "gptq-channel"])
def test_shards_compute_nearly_the_logprobs_of_one_rank(
    name: str, dense: Path, ranks: RankProcesses, tmp_path: Path
) -> None:
    quantised_checkpoint(dense, name, tmp_path / "quantised")
    settings = {"dtype": "bfloat16", "quantization": "auto"}
    alone = load_stages(stage_config(tmp_path / "quantised", **settings))
    expected = logprobs_of(answers(make_engine(StagesInARow(alone)), VOCAB_SIZE, FOR_PROMPTS_ALONE))
    ranks.load(stage_config(tmp_path / "quantised", tensor_parallel_size=2, **settings))
    epoch = next(_epochs)
    ranks.join(epoch)
    got = logprobs_of(answers(make_engine(ranks, epoch), VOCAB_SIZE, FOR_PROMPTS_ALONE))
    assert got == pytest.approx(expected, abs=0.5)  # the order of additions differs


def logprobs_of(outputs) -> list[float]:
    return [entry.logprob for part in outputs["logprobs"] for entry in part.prompt_logprobs]


def test_biases_that_the_model_does_not_have_must_be_zero(dense: Path, tmp_path: Path) -> None:
    """AutoGPTQ stores a bias tensor for each quantised linear layer, also for those without a bias by config.json."""
    from safetensors.torch import load_file, save_file

    from rayloom_engine.errors import ModelError

    quantised_checkpoint(dense, "gptq", tmp_path / "quantised")
    path = tmp_path / "quantised" / "model.safetensors"
    biases = {f"model.layers.0.self_attn.{name}_proj.bias": torch.zeros(1, dtype=torch.bfloat16) for name in "ko"}
    save_file({**load_file(path), **biases}, path, {"format": "pt"})
    load_tiny(path.parent)
    biases["model.layers.0.self_attn.o_proj.bias"].fill_(0.5)
    save_file({**load_file(path), **biases}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"0\.self_attn\.o_proj\.bias is not zero, and by its config\.json"):
        load_tiny(path.parent)


@needs_library
@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("gptq", "g_idx", "g_idx gives groups of inputs that are not neighbours"),
        ("gptq", "qzeros", "sym is true, and qzeros has zero points other than 8"),
    ],
)
def test_tensors_that_contradict_the_config_are_refused(
    name: str, tensor: str, message: str, dense: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    from rayloom_engine.errors import ModelError

    quantised_checkpoint(dense, name, tmp_path / "quantised")
    path = tmp_path / "quantised" / "model.safetensors"
    weights = load_file(path)
    damaged = weights[f"model.layers.0.self_attn.q_proj.{tensor}"]
    damaged.copy_(damaged.flip(0) ^ 1)
    save_file(weights, path, {"format": "pt"})
    for load in (
        lambda: load_on_library(path.parent, ISAS[0], torch.float32, quantization="auto"),
        lambda: load_tiny(path.parent),
    ):
        with pytest.raises(ModelError, match=message) as error:
            load()
        assert "model.layers.0.self_attn.q_proj" in str(error.value)


def test_inspect_names_the_scheme(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rayloom_engine.cli.commands import run

    quantised_checkpoint(dense, "awq", tmp_path / "quantised")
    assert run(["inspect", str(tmp_path / "quantised")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["quantization"] == "awq-int4-g32"
    assert found["weight_bytes"]["bfloat16"] == costs_of(tmp_path / "quantised", 2)

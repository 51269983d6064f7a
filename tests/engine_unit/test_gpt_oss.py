"""gpt-oss with mxfp4 experts: logits, bytes, several ranks, damaged checkpoints.

test_mxfp4.py tests the reader, test_cpu_grouped_weights.py the products. Other files test the dense variant of rt_tiny.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayloom_engine.cli.commands import run
from rayloom_engine.errors import ModelError
from rayloom_engine.models.costs import model_costs
from rayloom_engine.models.int8_shape import aligned_counts
from rayloom_engine.models.shape import read_shape
from rayloom_engine.models.shard_counts import shard_counts
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.stage import whole_model
from rt_architecture_checks import PROMPTS
from rt_library import ISAS, LibraryModel, library_cache, load_on_library
from rt_mxfp4 import mxfp4_checkpoint
from rt_one_rank import OneRank, greedy
from rt_tiny import (
    VARIANTS,
    TinySequence,
    advance,
    load_tiny,
    make_cache,
    tiny_checkpoint,
    tiny_variant,
    transformers_logits,
)
from rt_two_ranks import TwoRanks

NUM_TOKENS = 40
TOKEN_IDS = [(7 * position) % 256 for position in range(NUM_TOKENS)]
NUM_ANSWER_TOKENS = 12
EXPERTS = "model.layers.1.mlp.experts"
ACTIVATIONS = 0.05  # relative error of the logits due to activations of 8 bits

needs_library = pytest.mark.skipif(not ISAS, reason="there is no C library")


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mxfp4")
    mxfp4_checkpoint(tiny_variant(folder / "dense", "gpt-oss"), folder / "quantised")
    return folder / "quantised"


@pytest.fixture(scope="module")
def expected(quantised: Path) -> torch.Tensor:
    """The logits that transformers computes with the dequantised weights."""
    return transformers_logits(quantised.with_name("quantised-plain"), TOKEN_IDS)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).square().mean().sqrt() / theirs.std())


def logits_in(model: LibraryModel, *chunks: int) -> torch.Tensor:
    """Logits of all tokens, computed in steps of these numbers of tokens."""
    cache = library_cache(model, 3)
    sequence = TinySequence(TOKEN_IDS, range(3))
    return torch.cat([advance(model, cache, [(sequence, chunk)])[0] for chunk in chunks])


def test_torch_computes_the_logits_of_the_dequantised_weights(quantised: Path, expected: torch.Tensor) -> None:
    model = load_tiny(quantised)
    (ours,) = advance(model, make_cache(model.shape), [(TinySequence(TOKEN_IDS, range(10)), NUM_TOKENS)])
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("isa", ISAS)
def test_the_library_computes_the_logits_of_the_dequantised_weights(
    isa: str, quantised: Path, expected: torch.Tensor
) -> None:
    dense = load_on_library(quantised, isa, torch.float32, quantization="none")
    torch.testing.assert_close(logits_in(dense, NUM_TOKENS), expected, atol=1e-4, rtol=0)
    kept = load_on_library(quantised, isa, torch.float32, quantization="auto")
    ours = logits_in(kept, NUM_TOKENS)
    assert 1e-4 < relative_error(ours, expected) < ACTIVATIONS
    for chunks in ((1,) * NUM_TOKENS, (16, 7, 17)):
        assert torch.equal(logits_in(kept, *chunks), ours)
    int8 = load_on_library(quantised, isa, torch.float32, quantization="int8")
    assert relative_error(logits_in(int8, NUM_TOKENS), expected) < 2 * ACTIVATIONS


@needs_library
def test_the_router_adds_its_bias(quantised: Path, expected: torch.Tensor, tmp_path: Path) -> None:
    """A large bias makes every token select the same three experts."""
    folder = changed(quantised, tmp_path, {"model.layers.1.mlp.router.bias": lambda bias: bias + 50 * (bias >= 0)})
    plain = changed(
        quantised.with_name("quantised-plain"),
        tmp_path / "plain",
        {"model.layers.1.mlp.router.bias": lambda bias: bias + 50 * (bias >= 0)},
    )
    theirs = transformers_logits(plain, TOKEN_IDS)
    model = load_on_library(folder, ISAS[0], torch.float32, quantization="auto")
    assert relative_error(logits_in(model, NUM_TOKENS), theirs) < ACTIVATIONS
    assert relative_error(theirs, expected) > 2 * ACTIVATIONS  # so the bias has an effect


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["gate_up_proj_bias", "down_proj_bias", "router.bias"])
def test_a_nan_in_a_bias_reaches_the_logits(name: str, isa: str, quantised: Path, tmp_path: Path) -> None:
    tensor = f"model.layers.1.mlp.{name}" if name == "router.bias" else f"{EXPERTS}.{name}"
    folder = changed(quantised, tmp_path, {tensor: lambda bias: torch.full_like(bias, float("nan"))})
    assert logits_in(load_on_library(folder, isa, torch.bfloat16, quantization="auto"), NUM_TOKENS).isnan().all()


@needs_library
def test_a_rank_holds_the_bytes_that_inspect_gives(quantised: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = read_shape(quantised)
    assert run(["inspect", str(quantised)]) == 0
    assert '"quantization": "mxfp4"' in capsys.readouterr().out
    counts = aligned_counts(shape, shard_counts(shape))
    assert counts == (1, 2)  # two ranks have 64 and 32 of 96 feed-forward inputs
    costs = model_costs(shape, counts)
    parts = [costs.both, *(costs.kinds["ab".index(letter)].weights for letter in costs.layers)]
    for num_ranks in counts:
        held = [
            load_on_library(
                quantised,
                ISAS[0],
                torch.bfloat16,
                ModelPart(whole_model(shape.num_layers), Shard(index, num_ranks)),
                quantization="auto",
            ).weight_bytes
            for index in range(num_ranks)
        ]
        index = counts.index(num_ranks)
        # The second of two ranks has more weights. In each layer the first has 64 numbers more beside them: biases of o
        # and of six matrices down (7 * 64), less the biases of half of gate and up (6 * 64).
        spare = 2 * 2 * 64 * (num_ranks - 1)
        assert max(held) == sum(2 * part.kept_elements[index] + part.kept_bytes[index] for part in parts) - spare
    # Six experts. 32 weights take 18 bytes, and an output 4. gate and up have 192 outputs of 2 blocks. down has 64
    # outputs of 3 blocks, which are stored as 4.
    of_experts = 6 * (192 * (2 * 18 + 4) + 64 * (4 * 18 + 4))
    assert [kind.weights.kept_bytes[0] for kind in costs.kinds] == [of_experts] * len(costs.kinds)


@needs_library
def test_two_shards_and_two_stages_give_the_tokens_of_one_rank_also_when_one_is_killed(quantised: Path) -> None:
    tokens = greedy(OneRank(quantised).engine(), PROMPTS, NUM_ANSWER_TOKENS)
    ranks = TwoRanks()
    try:
        assert ranks.greedy(quantised, PROMPTS, NUM_ANSWER_TOKENS, tensor=2, killed=1) == tokens
        assert ranks.greedy(quantised, PROMPTS, NUM_ANSWER_TOKENS, pipeline=2) == tokens
        assert ranks.num_losses == 1
    finally:
        ranks.close()


def changed(source: Path, folder: Path, changes: dict[str, Callable[[torch.Tensor], torch.Tensor | None]]) -> Path:
    """A copy of a checkpoint in which functions replace tensors, or remove them by returning None."""
    folder.mkdir(exist_ok=True)
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name, change in changes.items():
        found = change(tensors.pop(name))
        if found is not None:
            tensors[name] = found.contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def loads(folder: Path) -> Iterator[Callable[[], object]]:
    yield lambda: load_tiny(folder)
    yield lambda: OneRank(folder)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("gate_up_proj_scales", lambda _: None, f"missing: {EXPERTS}.gate_up_proj_scales"),
        ("down_proj_blocks", lambda _: None, f"missing: {EXPERTS}.down_proj_blocks"),
        (
            "down_proj_scales",
            lambda scales: scales[:, :, :2],
            rf"wrong: {EXPERTS}.down_proj_scales is \[6, 64, 2\], should be \[6, 64, 3\]",
        ),
        (
            "gate_up_proj_blocks",
            lambda blocks: blocks.flatten(2),
            rf"wrong: {EXPERTS}.gate_up_proj_blocks is \[6, 192, 32\], should be \[6, 192, 2, 16\]",
        ),
        ("gate_up_proj_blocks", lambda blocks: blocks[:5], r"is \[5, 192, 2, 16\], should be \[6, 192, 2, 16\]"),
        ("down_proj_bias", lambda bias: bias[0], r"down_proj_bias is \[64\], should be \[6, 64\]"),
        ("down_proj_scales", lambda scales: scales.float(), "down_proj_scales has type F32, works: U8"),
    ],
)
def test_tensors_of_other_sizes_or_types_are_refused_by_name(
    suffix: str,
    change: Callable[[torch.Tensor], torch.Tensor | None],
    message: str,
    quantised: Path,
    tmp_path: Path,
) -> None:
    folder = changed(quantised, tmp_path, {f"{EXPERTS}.{suffix}": change})
    for load in loads(folder):
        with pytest.raises(ModelError, match=message):
            load()


def test_a_scale_that_is_no_number_is_refused_with_its_expert(quantised: Path, tmp_path: Path) -> None:
    def with_nan(scales: torch.Tensor) -> torch.Tensor:
        scales[4, 11, 1] = 255  # row 5 of up, because rows of gate and up are stored in turn
        return scales

    folder = changed(quantised, tmp_path, {f"{EXPERTS}.gate_up_proj_scales": with_nan})
    for load in loads(folder):
        with pytest.raises(ModelError, match=r"experts\.4\.up_proj.*scales\[5, 1\] is 255, which means NaN"):
            load()


def test_other_schemes_and_sizes_are_refused(tmp_path: Path) -> None:
    import json

    _, settings = VARIANTS["gpt-oss"]
    folder = tiny_checkpoint(tmp_path, "GptOssForCausalLM", **{**settings, "num_hidden_layers": 2})
    config = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"quantization_config": {"quant_method": "awq", "group_size": 32}}, "quantised as awq-int4-g32 is not suppor"),
        ({"quantization_config": {"quant_method": "mxfp4"}, "intermediate_size": 80}, "intermediate_size, which is 80"),
        ({"swiglu_limit": "7"}, "swiglu_limit must be a number > 0"),
        ({"swiglu_limit": -1.0}, "swiglu_limit must be a number > 0"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ModelError, match=message):
            read_shape(folder)

"""Models whose matrices have 4 and 6 bits, as in Q4_K_M files of llama.cpp; q, k and v of a layer may differ.

test_cpu_grouped_weights.py tests the products, test_quantised_models.py models with one number of bits.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rayloom_engine.core.adapter import AdapterLoad
from rayloom_engine.errors import ModelError
from rayloom_engine.kv.paged_batch import PagedBatch
from rayloom_engine.models.adapters.peft_folder import adapter_of
from rayloom_engine.models.on_library.decoder import BLOCK_SIZE
from rayloom_engine.models.quantised.amounts import ends_amount, layer_amount
from rayloom_engine.models.shape import read_shape
from rayloom_engine.parallel.shard import WHOLE
from rt_adapters import peft_logits, write_adapter
from rt_library import ISAS, LibraryModel, library_cache, load_on_library, to_torch
from rt_quantised import k_checkpoint
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
    VARIANTS,
    VOCAB_SIZE,
    TinySequence,
    advance,
    make_batch,
    tiny_checkpoint,
    transformers_logits,
)

NUM_TOKENS = 60
TOKEN_IDS = [(7 * position) % VOCAB_SIZE for position in range(NUM_TOKENS)]
NUM_BLOCKS = 4
ACTIVATIONS = 0.07  # relative error of the logits due to activations of 8 bits, as in test_quantised_models.py
# A row of a K type has whole blocks of 256 weights.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1}
OF_EXPERTS = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 512}
Q4_K_M = {
    "embed_tokens": "Q4_K",
    "q_proj": "Q4_K",
    "k_proj": "Q4_K",
    "v_proj": "Q6_K",
    "o_proj": "Q4_K",
    "gate_proj": "Q4_K",
    "up_proj": "Q4_K",
    "down_proj": "Q6_K",
    "lm_head": "Q6_K",
}
CASES = {  # a variant of the tiny models, and the types of its matrices
    "biases": ("llama-biases", Q4_K_M),
    "norms of q and k": ("qwen3", Q4_K_M),
    "tied embedding": ("qwen2", {**Q4_K_M, "embed_tokens": "Q6_K"}),
    "k differs": ("qwen3-biases", {**Q4_K_M, "k_proj": "Q6_K", "v_proj": "Q4_K"}),
    "q differs": ("llama-biases", {**Q4_K_M, "k_proj": "Q6_K"}),
    "up differs": ("llama-biases", {**Q4_K_M, "up_proj": "Q6_K"}),
    "experts": ("qwen2-moe", {**Q4_K_M, "gate_proj": "Q6_K", "up_proj": "Q6_K"}),
}

_epochs = itertools.count(1)

pytestmark = pytest.mark.skipif(not ISAS, reason="there is no C library")


@dataclasses.dataclass(frozen=True)
class Case:
    folder: Path
    plain: Path  # a checkpoint with the weights that the blocks represent


def make_case(parent: Path, name: str, **changes: int) -> Case:
    variant, kinds = CASES[name]
    architecture, settings = VARIANTS[variant]
    settings = {**settings, **SIZES, **(OF_EXPERTS if name == "experts" else {}), **changes}
    if "head_dim" in settings:
        settings["num_attention_heads"] = 256 // settings["head_dim"]
    dense = tiny_checkpoint(parent / "dense", architecture, **settings)
    return Case(parent / "mixed", k_checkpoint(dense, parent / "mixed", kinds))


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("case"), request.param)


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours - expected).square().mean().sqrt() / expected.std())


def load(case: Case, isa: str, dtype: torch.dtype = torch.float32) -> LibraryModel:
    return load_on_library(case.folder, isa, dtype, quantization="auto")


def logits_in(model: LibraryModel, *chunks: int) -> torch.Tensor:
    """Logits of all tokens, which are computed in steps of these numbers of tokens."""
    sequence = TinySequence(TOKEN_IDS, range(NUM_BLOCKS))
    cache = library_cache(model, NUM_BLOCKS)
    return torch.cat([advance(model, cache, [(sequence, chunk)])[0] for chunk in chunks])


def logits_in_one_step(
    model: LibraryModel, *, adapter_slot: int | None = None, wanted_rows: Sequence[int] | None = None
) -> torch.Tensor:
    batch = make_batch([NUM_TOKENS], [NUM_TOKENS], [range(NUM_BLOCKS)], BLOCK_SIZE)
    paged = PagedBatch(
        query_lens=batch.query_lens,
        context_lens=batch.context_lens,
        block_tables_SB=batch.block_tables_SB.numpy(),
        slot_mapping_T=batch.slot_mapping_T.numpy(),
        adapters_T=None if adapter_slot is None else np.full(NUM_TOKENS, adapter_slot, np.int32),
    )
    cache = library_cache(model, NUM_BLOCKS)
    hidden_TD = model.decoder.forward(np.array(TOKEN_IDS), np.arange(NUM_TOKENS), paged, cache, wanted_rows=wanted_rows)
    return to_torch(model.decoder.logits(hidden_TD))


def test_logits_and_bytes_are_those_of_the_file(case: Case) -> None:
    expected = transformers_logits(case.plain, TOKEN_IDS)
    shape = read_shape(case.folder)
    amounts = [layer_amount(shape, layer, WHOLE) for layer in range(shape.num_layers)]
    amounts.append(ends_amount(shape, WHOLE, is_first=True, is_last=True))
    for isa in ISAS:
        model = load(case, isa)
        assert relative_error(logits_in(model, NUM_TOKENS), expected) < ACTIVATIONS
        assert model.weight_bytes == sum(4 * elements + packed for elements, packed in amounts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_do_not_depend_on_chunks(case: Case, dtype: torch.dtype) -> None:
    for isa in ISAS:
        model = load(case, isa, dtype)
        expected = logits_in(model, NUM_TOKENS)
        for chunks in ((1,) * NUM_TOKENS, (16, 17, 27), (1, 15, 33, 11)):
            assert torch.equal(logits_in(model, *chunks), expected)


def test_the_rows_that_are_read_have_the_same_logits_without_the_others(case: Case) -> None:
    model = load(case, ISAS[0], torch.bfloat16)
    wanted = [3, NUM_TOKENS - 1]
    found = logits_in_one_step(model, wanted_rows=wanted)[wanted]
    assert torch.equal(found, logits_in(model, NUM_TOKENS)[wanted])


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "down_proj"])
def test_an_adapter_changes_its_own_rows(part: str, tmp_path: Path) -> None:
    case = make_case(tmp_path, "biases")
    folder = write_adapter(tmp_path / "adapter", case.plain, matrices=(part,), size=2.0)
    expected = peft_logits(case.plain, folder, TOKEN_IDS)
    for isa in ISAS:
        model = load(case, isa)
        without = logits_in(model, NUM_TOKENS)
        model.load_adapter(AdapterLoad(0, adapter_of(folder)))
        assert relative_error(logits_in_one_step(model, adapter_slot=0), expected) < ACTIVATIONS
        assert relative_error(without, expected) > 2 * ACTIVATIONS  # the adapter has an effect


def test_stages_give_the_same_bits_as_one_rank(case: Case) -> None:
    settings = {"dtype": "bfloat16", "quantization": "auto"}
    alone = load_stages(stage_config(case.folder, **settings))
    stages = load_stages(stage_config(case.folder, 2, **settings))
    expected = answers(make_engine(StagesInARow(alone)), VOCAB_SIZE)
    assert answers(make_engine(StagesInARow(stages), depth=2), VOCAB_SIZE) == expected


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankProcesses]:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("first"))
    processes = RankProcesses(stage_config(folder, tensor_parallel_size=2))
    yield processes
    processes.close()


@pytest.mark.parametrize("num_kv_heads", [2, 1])
@pytest.mark.parametrize("name", ["biases", "q differs", "tied embedding", "experts"])
def test_shards_compute_nearly_the_logprobs_of_one_rank(
    name: str, num_kv_heads: int, ranks: RankProcesses, tmp_path: Path
) -> None:
    """With one key/value head, each rank has a copy of it."""
    case = make_case(tmp_path, name, num_key_value_heads=num_kv_heads)
    settings = {"dtype": "bfloat16", "quantization": "auto"}
    alone = load_stages(stage_config(case.folder, **settings))
    expected = logprobs_of(answers(make_engine(StagesInARow(alone)), VOCAB_SIZE, FOR_PROMPTS_ALONE))
    ranks.load(stage_config(case.folder, tensor_parallel_size=2, **settings))
    epoch = next(_epochs)
    ranks.join(epoch)
    got = logprobs_of(answers(make_engine(ranks, epoch), VOCAB_SIZE, FOR_PROMPTS_ALONE))
    assert got == pytest.approx(expected, abs=0.5)


def logprobs_of(outputs) -> list[float]:
    return [entry.logprob for part in outputs["logprobs"] for entry in part.prompt_logprobs]


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_blocks_of_too_few_inputs_are_refused(kind: str, tmp_path: Path) -> None:
    dense = tiny_checkpoint(tmp_path / "dense", **{**SIZES, "intermediate_size": 1024})
    k_checkpoint(dense, tmp_path / "mixed", {"down_proj": kind})
    path = tmp_path / "mixed" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["blocks"][kind][0] *= 2  # so a row needs only half of the bytes
    path.write_text(json.dumps(config))
    weights = load_file(path.with_name("model.safetensors"))
    halved = {
        name: values[:, : values.shape[1] // 2] if values.dtype == torch.uint8 else values
        for name, values in weights.items()
    }
    save_file({name: values.contiguous() for name, values in halved.items()}, path.with_name("model.safetensors"))
    with pytest.raises(ModelError, match="the blocks have 512 inputs, and the matrix has 1024"):
        load_on_library(path.parent, ISAS[0], torch.float32, quantization="auto")

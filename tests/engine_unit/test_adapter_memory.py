"""The memory of LoRA adapters: bytes computed by hand, the bytes that a rank holds, and the KV cache beside them.

The comparison with the operator's sums is in tests/contract/test_adapter_sizing.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rayloom_engine.config import EngineConfig
from rayloom_engine.core.adapter import Adapter, AdapterLoad
from rayloom_engine.models import torch_adapters
from rayloom_engine.models.adapters.hub_adapter import check_digest
from rayloom_engine.models.adapters.memory import (
    PAGE_BYTES,
    adapter_bytes,
    adapter_token_bytes,
    layer_elements,
    padded_rank,
)
from rayloom_engine.models.adapters.peft_folder import adapter_of
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.models.inspection import inspect_model
from rayloom_engine.models.largest_step import LargestStep
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.on_library import adapters as library_adapters
from rayloom_engine.models.shape import ModelShape, read_shape
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.shard import Shard
from rayloom_engine.parallel.stage import make_stages, whole_model
from rayloom_engine.worker import library_computation
from rayloom_engine.worker.loaded_rank import LoadedRank
from rayloom_engine.worker.start import find_model, load_rank, part_of
from rt_adapters import write_adapter
from rt_library import ISAS, load_on_library
from rt_quantised import quantised_checkpoint
from rt_stages import stage_config
from rt_tiny import cpu_kernels, tiny_checkpoint

MIB = 1 << 20
needs_library = pytest.mark.skipif(not ISAS, reason="there is no C library")


@pytest.fixture(scope="module")
def smollm2() -> ModelShape:
    return inspect_model("builtin://smollm2-135m", None)[1]


@pytest.mark.parametrize(
    ("num_shards", "num_bytes"),
    [
        # Numbers of a layer at LoRA rank 1: q, k and v have 3 x 576 + 576 + 2 x 192, o has 576 + 576, gate and up have
        # 2 x 576 + 2 x 1536, and down has 1536 + 576. The sum is 10,176. Times LoRA rank 16, 30 layers and 2 bytes,
        # this is 9,768,960 bytes, which take 5 pages.
        (1, 5 * 2 * MIB),
        # A third of the layer, with the matrices in the same order: 3 x 576 + 192 + 2 x 64, 192 + 576, 2 x 576 + 2 x
        # 512 and 512 + 576. The sum is 6,080. This is 5,836,800 bytes, which take 3 pages.
        (3, 3 * 2 * MIB),
    ],
)
def test_bytes_of_an_adapter_of_rank_16_on_each_rank(smollm2: ModelShape, num_shards: int, num_bytes: int) -> None:
    for index in range(num_shards):
        part = ModelPart(whole_model(30), Shard(index, num_shards))
        assert adapter_bytes(smollm2, part, 16, element_bytes=2) == num_bytes


def test_stages_have_the_bytes_of_their_layers(smollm2: ModelShape) -> None:
    # At LoRA rank 16, 17 layers have 17 x 16 x 10,176 x 2 = 5,535,744 bytes and 13 layers have 13 x 16 x 10,176 x 2 =
    # 4,233,216 bytes. Each of the two takes 3 pages. At LoRA rank 64, 22,142,976 bytes take 11 pages, and 16,932,864
    # bytes take 9 pages.
    parts = [ModelPart(stage) for stage in make_stages(30, 2, smollm2.head_layers)]
    assert [len(part.stage.layers) for part in parts] == [17, 13]
    assert [adapter_bytes(smollm2, part, 16, element_bytes=2) for part in parts] == [6 * MIB, 6 * MIB]
    assert [adapter_bytes(smollm2, part, 64, element_bytes=2) for part in parts] == [22 * MIB, 18 * MIB]


def test_a_rank_that_is_no_multiple_of_16_counts_as_the_next_one() -> None:
    assert [padded_rank(rank) for rank in (1, 15, 16, 17, 256)] == [16, 16, 16, 32, 256]


def test_a_token_needs_the_reduced_rows_of_three_matrices_and_gate_and_up(smollm2: ModelShape) -> None:
    # A token needs 3 x 256 numbers of 4 bytes for the reduced rows. For gate and up it needs 2 x 1536 such numbers, or
    # a third of them with 3 shards.
    assert [adapter_token_bytes(smollm2, num_shards) for num_shards in (1, 3)] == [3072 + 12_288, 3072 + 4096]


def of_library(model: Any, slot: int) -> library_adapters.LibraryAdapter:
    found: library_adapters.LibraryAdapter = model.decoder._adapters._slots[slot][1]
    return found


def held_bytes(model: Any) -> int:
    """The bytes of the adapter in slot 0."""
    return sum(array.nbytes for array in of_library(model, 0)._arrays)


def in_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


WIDE = {"hidden_size": 512, "intermediate_size": 1200, "num_attention_heads": 8, "num_key_value_heads": 4}


@needs_library
@pytest.mark.parametrize(("rank", "padded"), [(16, 16), (40, 48)])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_library_holds_the_bytes_that_are_counted(rank: int, padded: int, num_shards: int, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", num_hidden_layers=4, **WIDE)
    adapter = adapter_of(write_adapter(tmp_path / "adapter", folder, rank=rank))
    shape = read_shape(folder)
    for index in range(num_shards):
        part = ModelPart(whole_model(4), Shard(index, num_shards))
        model = load_on_library(folder, ISAS[0], torch.bfloat16, part)
        model.load_adapter(AdapterLoad(0, adapter))
        held = held_bytes(model)
        assert held == layer_elements(shape, part.shard) * padded * 4 * 2
        assert in_pages(held) == adapter_bytes(shape, part, rank, element_bytes=2)


@needs_library
def test_the_groups_of_a_quantised_model_move_the_cuts_of_its_adapters(tmp_path: Path) -> None:
    # The feed-forward inputs form three groups of 64. So one rank has 64 inputs, and the other has 128.
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "vocab_size": 250}
    dense = tiny_checkpoint(tmp_path / "dense", **sizes)
    quantised_checkpoint(dense, "awq-64", tmp_path / "model")
    folder = tmp_path / "model"
    adapter = adapter_of(write_adapter(tmp_path / "adapter", folder, rank=16))
    shape = read_shape(folder)
    for index in range(2):
        shard = Shard(index, 2)
        part = ModelPart(whole_model(shape.num_layers), shard)
        model = load_on_library(folder, ISAS[0], torch.bfloat16, part, quantization="auto")
        model.load_adapter(AdapterLoad(0, adapter))
        unit = model.decoder.cut_unit
        assert unit > 1
        assert held_bytes(model) == layer_elements(shape, shard, unit) * 16 * shape.num_layers * 2


def test_on_torch_a_rank_holds_its_part_of_an_adapter_alone(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", num_hidden_layers=4, **WIDE)
    adapter = adapter_of(write_adapter(tmp_path / "adapter", folder, rank=16))
    shape = read_shape(folder)
    held = []
    for index in range(2):
        part = ModelPart(whole_model(4), Shard(index, 2))
        model = load_model(folder, shape, cpu_kernels(), dtype=torch.float32, part=part).model
        model.adapters.load(0, adapter)
        tensors = [tensor for update in updates_of(model, 0) for tensor in (update.a_rK, update.b_Nr)]
        held.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))
        assert in_pages(held[-1]) == adapter_bytes(shape, part, 16, element_bytes=4)
    # The matrices are q 512 x 512, k and v 256 x 512, o 512 x 512, gate and up 1200 x 512, and down 512 x 1200. A shard
    # has half of each: 3 x 512 + 256 + 2 x 128 for q, k and v, 256 + 512 for o, 2 x 512 + 2 x 600 for gate and up, and
    # 600 + 512 for down. The sum is 6,152 numbers at LoRA rank 1. The model has LoRA rank 16, 4 layers and 4 bytes for
    # a number.
    assert held == [6152 * 16 * 4 * 4] * 2


def updates_of(model: Any, slot: int) -> Iterator[torch_adapters.Update]:
    for product in model.adapters._products:
        yield from product.updates[slot]


@pytest.mark.parametrize("is_library", [pytest.param(True, marks=needs_library), False])
def test_an_adapter_is_freed_before_another_is_read_into_its_slot(
    is_library: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    first, second = (adapter_of(write_adapter(tmp_path / str(seed), folder, seed=seed)) for seed in (1, 2))
    model: Any
    if is_library:
        model = load_on_library(folder, ISAS[0], torch.float32)
        adapters, module = model.decoder._adapters, library_adapters
    else:
        model = load_model(folder, read_shape(folder), cpu_kernels(), dtype=torch.float32).model
        adapters, module = model.adapters, torch_adapters
    adapters.load(0, first)
    held = weakref.ref(of_library(model, 0) if is_library else next(updates_of(model, 0)).a_rK)
    seen = []

    def check(adapter: Adapter) -> Path:
        seen.append(held())
        return check_digest(adapter)

    monkeypatch.setattr(module, "check_digest", check)
    adapters.load(0, second)
    assert seen == [None]
    adapters.load(0, second)  # is not read again
    assert seen == [None]


def started(folder: Path, free_bytes: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> LoadedRank:
    """A rank of a machine with `free_bytes` of free memory."""
    monkeypatch.setattr(library_computation, "free_memory_bytes", lambda: free_bytes)
    given: dict[str, Any] = {"num_kv_blocks": None, "dtype": "bfloat16", **settings}
    config: EngineConfig = stage_config(folder, **given)
    resolved, shape = find_model(config, no_progress)
    return load_rank(config, resolved, shape, no_progress, part=part_of(config, shape, 0))


@needs_library
def test_the_kv_cache_leaves_the_memory_of_all_adapter_slots_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", num_hidden_layers=4, max_position_embeddings=1024, **WIDE)
    one = adapter_bytes(read_shape(folder), ModelPart(whole_model(4)), 64, element_bytes=2)
    settings = {"max_num_seqs": 4096, "max_loras": 20, "max_lora_rank": 64}
    without = started(folder, 512 * MIB, monkeypatch, **settings)
    # Beside adapters and a step, a quarter of the memory is free. Without adapters the cache takes half the memory.
    of_step = without.loaded.step_bytes(LargestStep(num_tokens=512, num_rows=4096, context_len=1024)).most
    free = (20 * one + 512 * adapter_token_bytes(read_shape(folder), 1) + of_step) * 4 // 3
    half = started(folder, free, monkeypatch, **settings)
    less = started(folder, free, monkeypatch, managed_adapters=True, **settings)
    assert half.kv.num_blocks == free // 2 // half.kv.block_bytes
    assert less.kv.num_blocks == free // 4 // less.kv.block_bytes
    assert "GiB for LoRA adapters (max_loras, max_lora_rank)" in less.kv.explanation

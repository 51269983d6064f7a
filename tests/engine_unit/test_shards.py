"""A stage cut into shards (tensor parallelism): heads and rows of each rank, refusals, bytes read.

test_shard_processes.py tests the results of ranks, because the ranks of a stage must run at the same time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.config import parse_config
from rayloom_engine.errors import ConfigError
from rayloom_engine.launcher.process_ranks import ProcessRanks
from rayloom_engine.llm import LLM
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.rope.parameters import RopeParameters
from rayloom_engine.models.shape import ModelShape, read_shape
from rayloom_engine.models.shard_counts import shard_counts
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.shard import WHOLE, Shard
from rayloom_engine.parallel.stage import whole_model
from rayloom_engine.worker.loaded_rank import LoadedRank
from rayloom_engine.worker.start import find_model, load_rank, part_of
from rt_stages import load_stages, stage_config
from rt_tiny import VARIANTS, cpu_kernels, tiny_checkpoint, tiny_variant


def _shape(num_heads: int, num_kv_heads: int, intermediate_size: int = 1000) -> ModelShape:
    return ModelShape(
        architecture="LlamaForCausalLM",
        num_layers=2,
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        vocab_size=256,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope=RopeParameters(),
        layer_windows=(None, None),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=False,
        checkpoint_dtype="float32",
        eos_token_ids=(),
    )


def _load_ranks(folder: Path, tensor: int, pipeline: int = 1) -> list[LoadedRank]:
    config = stage_config(folder, pipeline, tensor_parallel_size=tensor)
    resolved, shape = find_model(config, no_progress)
    return [
        load_rank(config, resolved, shape, no_progress, part=part_of(config, shape, rank))
        for rank in range(config.world_size)
    ]


@given(count=st.integers(1, 64), size=st.integers(0, 5000))
def test_parts_are_disjoint_complete_and_even(count: int, size: int) -> None:
    parts = [Shard(index, count).part(size) for index in range(count)]
    assert [index for part in parts for index in part] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert Shard(0, count).widths(size) == tuple(map(len, parts))


@given(count=st.integers(1, 64), size=st.integers(0, 5000), unit=st.integers(1, 256))
def test_parts_of_grouped_weights_are_cut_between_groups(count: int, size: int, unit: int) -> None:
    parts = [Shard(index, count).part(size, unit) for index in range(count)]
    assert [index for part in parts for index in part] == list(range(size))
    assert all(part.start % unit == 0 or part.start == size for part in parts)
    groups = [-(-len(part) // unit) for part in parts]
    assert max(groups) - min(groups) <= 1


@given(count=st.integers(1, 32), per_shard=st.integers(1, 4), num_kv_heads=st.integers(1, 32))
def test_every_shard_has_as_many_heads_and_the_key_heads_that_they_use(
    count: int, per_shard: int, num_kv_heads: int
) -> None:
    num_heads = count * per_shard
    if num_heads % num_kv_heads or (num_kv_heads % count and count % num_kv_heads):
        return
    for index in range(count):
        shard = Shard(index, count)
        heads = shard.part(num_heads)
        kv_heads = shard.kv_heads(num_kv_heads)
        queries_per_key = num_heads // num_kv_heads
        assert len(heads) == per_shard
        assert list(kv_heads) == sorted({head // queries_per_key for head in heads})
        # Inside the rank, query head h reads key head h // (heads / key heads), as in the whole model.
        inside = per_shard // len(kv_heads)
        assert [kv_heads[local // inside] for local in range(per_shard)] == [h // queries_per_key for h in heads]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "counts"),
    [
        (9, 3, (1, 3, 9)),  # SmolLM2 135M
        (32, 8, (1, 2, 4, 8, 16, 32)),  # Llama 3 8B
        (14, 2, (1, 2, 14)),  # Qwen2.5 0.5B: 7 would separate query heads of a key head
        (4, 4, (1, 2, 4)),
        (1, 1, (1,)),
    ],
)
def test_the_numbers_of_shards_that_work(num_heads: int, num_kv_heads: int, counts: tuple[int, ...]) -> None:
    assert shard_counts(_shape(num_heads, num_kv_heads)) == counts


def test_no_shard_is_without_a_row() -> None:
    assert shard_counts(_shape(8, 8, intermediate_size=3)) == (1, 2)


def test_a_number_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, num_attention_heads=9, num_key_value_heads=3, hidden_size=72)
    (folder / "model.safetensors").unlink()
    sentence = (
        "tensor_parallel_size: 2 ranks cannot share 9 attention heads and 3 key/value heads of a layer evenly; "
        "use 1, 3 or 9, and for more ranks pipeline_parallel_size, 1 to 2"
    )
    with pytest.raises(ConfigError) as refusal:
        find_model(stage_config(folder, tensor_parallel_size=2), no_progress)
    assert str(refusal.value) == sentence
    with pytest.raises(ConfigError, match="pipeline_parallel_size: 3 stages"):
        find_model(stage_config(folder, 3, tensor_parallel_size=3), no_progress)


def test_a_model_whose_norms_need_all_heads_has_one_rank_a_layer(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "olmo2")
    sentence = (
        "tensor_parallel_size: 2 ranks cannot share a layer of Olmo2ForCausalLM, whose norms of queries and keys are "
        "of all heads together; use 1, and for more ranks pipeline_parallel_size, 1 to 2"
    )
    with pytest.raises(ConfigError) as refusal:
        find_model(stage_config(folder, tensor_parallel_size=2), no_progress)
    assert str(refusal.value) == sentence


def test_too_few_accelerators_are_refused_with_the_settings_that_need_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("rayloom_engine.launcher.process_ranks.visible_devices", lambda *_: ["0", "1"])
    config = parse_config({"tensor_parallel_size": 2, "pipeline_parallel_size": 3})
    sentence = "tensor_parallel_size 2 x pipeline_parallel_size 3: 6 ranks need an accelerator each, .* machine has 2"
    with pytest.raises(ConfigError, match=sentence):
        ProcessRanks(config, tmp_path, "127.0.0.1:1").prepare(no_progress)


def test_a_model_in_the_callers_process_has_one_rank() -> None:
    sentence = "LLM runs one rank .* tensor_parallel_size 2 x pipeline_parallel_size 1; leave these out"
    with pytest.raises(ConfigError, match=sentence):
        LLM(tensor_parallel_size=2)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("variant", ["llama-biases", "qwen2-some-windows", "qwen3-biases"])
def test_the_bytes_that_ranks_read_add_up(variant: str, tensor: int, pipeline: int, tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, variant)
    shape = read_shape(folder)
    (whole,) = load_stages(stage_config(folder))
    ranks = _load_ranks(folder, tensor, pipeline)
    norms = shape.num_layers * 2 * (shape.hidden_size + shape.head_dim * shape.qk_norm) + shape.hidden_size
    # There are 2 key/value heads, so with 4 shards each head is read twice.
    copies = max(1, tensor // shape.num_kv_heads) - 1
    kv = 2 * shape.num_layers * shape.kv_size * (shape.hidden_size + shape.qkv_bias)
    embedding = shape.vocab_size * shape.hidden_size * (shape.tie_word_embeddings and pipeline > 1)
    more = 4 * (norms * (tensor - 1) + kv * copies + embedding)
    assert sum(rank.num_bytes_read for rank in ranks) == whole.num_bytes_read + more
    assert [rank.weight_bytes for rank in ranks] == [rank.num_bytes_read for rank in ranks]
    assert max(rank.num_bytes_read for rank in ranks) < 1.2 * whole.num_bytes_read / tensor + 4 * (norms + embedding)


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_rank_keeps_the_keys_of_its_own_heads(tensor: int, tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "llama")
    (whole,) = load_stages(stage_config(folder))
    for rank in _load_ranks(folder, tensor):
        assert rank.kv.block_bytes == whole.kv.block_bytes // 2
        pages = rank._allocate(rank.loaded, 3)._cache.pages
        assert sum(each.nbytes for each in pages) == 3 * rank.kv.block_bytes


@pytest.mark.parametrize("variant", VARIANTS)
def test_shards_put_together_are_the_model(variant: str, tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, variant)
    shape = read_shape(folder)

    def matrices(shard: Shard) -> list[tuple[torch.Tensor, ...]]:
        part = ModelPart(whole_model(shape.num_layers), shard)
        model = load_model(folder, shape, cpu_kernels(), dtype=torch.float32, part=part).model
        weights = model._weights
        dense = [
            tuple(linear.scheme.weight.to_dense() for linear in (layer.attention.out, layer.mlp.linears[-1]))
            for layer in weights.layers
        ]
        assert weights.embedding_VD is not None
        return [(weights.embedding_VD,), *dense]

    whole, *shards = (matrices(shard) for shard in (WHOLE, Shard(0, 2), Shard(1, 2)))
    assert torch.equal(torch.cat([shard[0][0] for shard in shards]), whole[0][0])
    for layer, *parts in zip(whole[1:], *(shard[1:] for shard in shards), strict=True):
        for index, matrix in enumerate(layer):
            assert torch.equal(torch.cat([part[index] for part in parts], dim=1), matrix)


def test_a_shard_without_a_group_is_refused(tmp_path: Path) -> None:
    rank = _load_ranks(tiny_variant(tmp_path, "llama"), 2)[1]
    assert rank.shard == Shard(1, 2)
    with pytest.raises(AssertionError, match="shard 1 needs a group"):
        rank.runner(3, 1, None)

"""A model cut into pipeline stages: layers and bytes of each stage, and the same tokens as the whole model.

In this file the stages run one after the other in the test's process; test_stage_processes.py has separate processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.errors import ConfigError, ModelError
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.shape import read_shape
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.stage import Stage, make_stages, split_layers
from rayloom_engine.worker.start import find_model, load_rank, part_of
from rt_stages import StagesInARow, answers, ids_by_request, load_stages, make_engine, stage_config
from rt_tiny import VARIANTS, cpu_kernels, tiny_checkpoint, tiny_variant


@pytest.mark.parametrize(
    ("num_layers", "sizes"),
    [
        (30, [30]),
        (30, [15, 15]),
        (30, [10, 10, 10]),
        (30, [7, 8, 8, 7]),
        (31, [16, 15]),
        (31, [10, 11, 10]),
        (32, [11, 11, 10]),
        (5, [1, 2, 1, 1]),
        (3, [1, 1, 1]),
    ],
)
def test_the_ends_are_lighter_when_layers_do_not_divide(num_layers: int, sizes: list[int]) -> None:
    assert [len(layers) for layers in split_layers(num_layers, len(sizes))] == sizes


@pytest.mark.parametrize(
    ("head_layers", "sizes"),
    [(0.5, [15, 15]), (1.5, [16, 14]), (4.0, [17, 13]), (8.0, [19, 11]), (3.0, [8, 8, 8, 6]), (99.0, [9, 10, 10, 1])],
)
def test_the_stage_with_a_large_head_has_fewer_layers(head_layers: float, sizes: list[int]) -> None:
    assert [len(layers) for layers in split_layers(30, len(sizes), head_layers)] == sizes


def test_half_of_the_heads_weights_count_in_layers(tmp_path: Path) -> None:
    # A layer has two matrices of 64 x 64, two of 32 x 64, three of 96 x 64, and two norms of 64: 30,848 parameters. The
    # head has 256 x 64 = 16,384.
    shape = read_shape(tiny_variant(tmp_path, "llama"))
    assert shape.head_layers == pytest.approx(0.5 * 16384 / 30848)


@given(num_stages=st.integers(1, 40), num_more=st.integers(0, 200))
def test_every_layer_has_one_stage_and_no_stage_two_layers_more_than_another(num_stages: int, num_more: int) -> None:
    num_layers = num_stages + num_more
    parts = split_layers(num_layers, num_stages)
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    sizes = [len(part) for part in parts]
    assert len(sizes) == num_stages and max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)
    assert sizes[0] == min(sizes) or all(size == max(sizes) for size in sizes[:-1])


@pytest.mark.parametrize("num_stages", [0, 4])
def test_a_number_of_stages_that_does_not_fit_is_refused_with_those_that_do(num_stages: int) -> None:
    with pytest.raises(ConfigError, match=rf"pipeline_parallel_size: {num_stages} stages .* 3 layers.*; use 1 to 3"):
        split_layers(3, num_stages)


def test_too_many_stages_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="use 1 to 2"):
        find_model(stage_config(folder, 3), no_progress)


def test_ranks_of_a_stage_are_neighbours(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "llama3-rope")
    config = stage_config(folder, 3).model_copy(update={"tensor_parallel_size": 2})
    stages = [part_of(config, read_shape(folder), rank).stage for rank in range(6)]
    assert [(stage.index, stage.layers) for stage in stages] == [
        (index, range(index, index + 1)) for index in (0, 0, 1, 1, 2, 2)
    ]
    assert [(stage.is_first, stage.is_last) for stage in stages[::2]] == [(True, False), (False, False), (False, True)]


@pytest.fixture(scope="module", params=VARIANTS)
def whole_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[SequenceOutput]]]:
    """A checkpoint of four layers, and the answers of the whole model."""
    architecture, overrides = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    longer = {"layer_types": (2 * overrides["layer_types"])[:4]} if "layer_types" in overrides else {}
    tiny_checkpoint(folder, architecture, **{**overrides, **longer, "num_hidden_layers": 4})
    return folder, answers(make_engine(StagesInARow(load_stages(stage_config(folder)))))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_compute_the_tokens_of_the_whole_model(
    num_stages: int, whole_model: tuple[Path, dict[str, list[SequenceOutput]]]
) -> None:
    """Three stages also copy blocks to host memory, and load them for the same requests once the cache is lost."""
    folder, expected = whole_model
    num_host_slots = 40 if num_stages == 3 else 0
    config = stage_config(folder, num_stages, kv_host_memory_bytes=num_host_slots << 15)
    stages = StagesInARow(load_stages(config))
    engine = make_engine(stages, depth=num_stages, num_host_slots=num_host_slots)
    got = answers(engine)
    assert ids_by_request(got) == ids_by_request(expected)
    assert all(len(ids) == 20 for ids in ids_by_request(got).values())
    counters = engine.scheduler.counters
    assert counters.num_preemptions > 0 and counters.prefix_hits > 0, "the requests must have crossed these paths"
    entries, right = (
        [(entry.token_id, entry.logprob) for part in outputs["logprobs"] for entry in part.prompt_logprobs]
        for outputs in (got, expected)
    )
    assert len(entries) == 29 and [token for token, _ in entries] == [token for token, _ in right]
    assert [value for _, value in entries] == pytest.approx([value for _, value in right], abs=1e-4)
    if num_host_slots:
        engine.scheduler.forget_ranks()
        stages.forget_all()
        again = ids_by_request(answers(engine, max_tokens=2))
        assert again == {name: ids[:2] for name, ids in ids_by_request(expected).items()}
        assert engine.stats().num_host_loads >= 2


@pytest.mark.parametrize(("variant", "num_stages"), [("llama", 2), ("qwen2-some-windows", 3), ("llama-tied", 2)])
def test_stages_share_out_bytes_and_blocks(variant: str, num_stages: int, tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, variant)
    shape = read_shape(folder)
    (whole,) = load_stages(stage_config(folder))
    ranks = load_stages(stage_config(folder, num_stages))
    embedding = shape.vocab_size * shape.hidden_size * 4 if shape.tie_word_embeddings else 0  # first and last stage
    assert whole.num_bytes_read == whole.weight_bytes == shape.weight_bytes(4)
    assert sum(rank.num_bytes_read for rank in ranks) == whole.num_bytes_read + embedding
    assert [rank.weight_bytes for rank in ranks] == [rank.num_bytes_read for rank in ranks]
    assert all(rank.num_bytes_read < whole.num_bytes_read for rank in ranks)
    assert sum(rank.kv.block_bytes for rank in ranks) == whole.kv.block_bytes == 16 * shape.kv_bytes_per_token(4)


def test_a_stage_counts_its_own_bytes_and_opens_every_shard(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, num_hidden_layers=3, max_shard_size="100KB")
    shape = read_shape(folder)
    reports: list[tuple[int, int]] = []
    middle = make_stages(3, 3)[1]
    loaded = load_model(
        folder,
        shape,
        cpu_kernels(),
        dtype=torch.float32,
        part=ModelPart(middle),
        progress=lambda phase, done, total, unit: reports.append((done, total)),
    )
    layer_bytes = 4 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64)  # qkv, o, gate, up and down, norms
    assert (reports[0], reports[-1]) == ((0, layer_bytes), (layer_bytes, layer_bytes))
    assert loaded.num_bytes_read == loaded.model.weight_bytes == layer_bytes


def test_every_stage_refuses_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, num_hidden_layers=3)
    shape = read_shape(tiny_checkpoint(tmp_path / "longer", num_hidden_layers=4))
    for stage in make_stages(4, 4):
        with pytest.raises(ModelError, match=r"missing: model\.layers\.3\.input_layernorm\.weight"):
            load_model(folder, shape, cpu_kernels(), dtype=torch.float32, part=ModelPart(stage))


def test_a_rank_divides_memory_and_threads_by_the_ranks_on_its_host(tmp_path: Path, monkeypatch) -> None:
    folder = tiny_variant(tmp_path, "llama")
    monkeypatch.setattr("rayloom_engine.worker.torch_computation.free_memory_bytes", lambda: 64 << 20)
    monkeypatch.setattr("rayloom_engine.worker.start.usable_cores", lambda: 5)
    monkeypatch.setenv("RAYLOOM_CPU_ISA", "torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    config = stage_config(folder, 2, num_kv_blocks=None, max_num_seqs=4096, threads=None)
    resolved, shape = find_model(config, no_progress)
    threads = torch.get_num_threads()
    try:
        part = part_of(config, shape, 0)
        ranks = [load_rank(config, resolved, shape, no_progress, part=part, ranks_on_host=num) for num in (1, 2)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    # In one layer, a block has 16 tokens x 2 x 32 values x 4 bytes = 4 KiB. Half of the memory is for blocks.
    assert [rank.kv.num_blocks for rank in ranks] == [8192, 4096]


def test_a_new_runner_keeps_weights_and_memory_and_forgets_the_rest(tmp_path: Path) -> None:
    ranks = load_stages(stage_config(tiny_variant(tmp_path, "llama"), 2))
    expected = ids_by_request(answers(make_engine(StagesInARow(ranks))))
    caches = [rank._computation for rank in ranks]
    again = answers(make_engine(StagesInARow(ranks, epoch=2), epoch=2))
    assert ids_by_request(again) == expected
    assert [rank._computation for rank in ranks] == caches
    ranks[0].runner(3, 3, StagesInARow(ranks)._runners[0]._link)
    assert ranks[0]._computation is not None and ranks[0]._computation.num_blocks == 3


def test_a_stage_without_a_link_is_refused(tmp_path: Path) -> None:
    first = load_stages(stage_config(tiny_variant(tmp_path, "llama"), 2))[0]
    assert first.stage == Stage(0, 2, range(1))
    with pytest.raises(AssertionError, match="stage 0 needs a link"):
        first.runner(3, 1, None)

"""The check that nodes can hold a model's stages: results, compared with a search of all placements, and messages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.config import parse_config
from rayloom_engine.launcher.placement import Node, can_hold, rank_resources, shortage, stage_resources

AMOUNTS = st.sampled_from([0.0, 0.01, 0.03, 0.5, 1.0, 2.0, 3.0, 4.5])
NODES = st.lists(st.fixed_dictionaries({"CPU": AMOUNTS}, optional={"a100": AMOUNTS}), max_size=3)
STAGES = st.fixed_dictionaries({"CPU": AMOUNTS.filter(bool)}, optional={"a100": AMOUNTS.filter(bool)})


def _by_trying(nodes: Sequence[dict[str, float]], stage: dict[str, float], num_stages: int, strategy: str) -> bool:
    """Tries every placement of stages on nodes. Returns True if one of them fits."""
    for places in itertools.product(range(len(nodes)), repeat=num_stages):
        if strategy == "STRICT_PACK" and len(set(places)) > 1:
            continue
        if strategy == "STRICT_SPREAD" and len(set(places)) < num_stages:
            continue
        if all(
            places.count(index) * amount <= node.get(name, 0.0) + 1e-6
            for index, node in enumerate(nodes)
            for name, amount in stage.items()
        ):
            return True
    return False


@settings(deadline=None)
@given(NODES, STAGES, st.integers(1, 4), st.sampled_from(["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"]))
def test_nodes_hold_stages_when_a_placement_exists(
    nodes: list[dict[str, float]], stage: dict[str, float], num_stages: int, strategy: str
) -> None:
    assert can_hold(nodes, stage, num_stages, strategy) == _by_trying(nodes, stage, num_stages, strategy)


@pytest.mark.parametrize(
    ("document", "num_gpus", "expected"),
    [
        ({}, 8, {"CPU": 1.0, "GPU": 1.0}),
        ({"tensor_parallel_size": 2}, 1, {"CPU": 1.0}),
        ({"device": "cuda"}, 0, {"CPU": 1.0, "GPU": 1.0}),
        ({"device": "cpu"}, 8, {"CPU": 1.0}),
        ({"tensor_parallel_size": 2, "ranks_per_gpu": 2}, 1, {"CPU": 1.0, "GPU": 0.5}),
        ({"tensor_parallel_size": 4, "ranks_per_gpu": 2}, 1, {"CPU": 1.0}),
        ({"pipeline_parallel_size": 6, "ranks_per_gpu": 6, "device": "cuda"}, 0, {"CPU": 1.0, "GPU": 0.1666}),
        (
            {"tensor_parallel_size": 2, "ranks_per_gpu": 2, "ray_resources_per_rank": {"GPU": 0.25}},
            1,
            {"GPU": 0.25},
        ),
        ({"ray_resources_per_rank": {"CPU": 2, "a100": 0.01}}, 8, {"CPU": 2.0, "a100": 0.01}),
    ],
)
def test_a_rank_takes_its_resources(document: dict[str, object], num_gpus: int, expected: dict[str, float]) -> None:
    assert rank_resources(parse_config(document), num_gpus) == expected


def test_a_stage_takes_the_sum_of_its_ranks_in_rays_precision() -> None:
    config = parse_config({"tensor_parallel_size": 3})
    assert stage_resources(config, {"CPU": 1.0, "a100": 0.1}) == {"CPU": 3.0, "a100": 0.3}


def _node(name: str, free: float | None = None, **total: float) -> Node:
    return Node(name=name, total=total, available=total if free is None else {"CPU": free})


def test_missing_resources_are_named_node_by_node() -> None:
    config = parse_config({"tensor_parallel_size": 2, "pipeline_parallel_size": 3})
    text = shortage(config, [_node("a", CPU=4.0), _node("b", CPU=1.0, GPU=1.0)], {"CPU": 1.0, "GPU": 1.0}, 2.0)
    assert text == (
        "tensor_parallel_size 2 x pipeline_parallel_size 3: no room in the Ray cluster after 2 s for 3 x "
        "(2 CPU, 2 GPU). The nodes have too little: a has 4 CPU, 0 GPU, lacks 2 GPU; b has 1 CPU, 1 GPU, lacks 1 CPU, "
        "1 GPU. Add nodes, or lower one of the sizes"
    )


def test_too_few_gpus_could_be_shared_if_the_nodes_have_the_other_resources() -> None:
    config = parse_config({"tensor_parallel_size": 2, "pipeline_parallel_size": 2})
    text = shortage(config, [_node("a", CPU=4.0, GPU=1.0)], {"CPU": 1.0, "GPU": 1.0}, 2.0)
    assert text.endswith(
        "a has 4 CPU, 1 GPU, lacks 1 GPU. Add nodes, or lower one of the sizes, or let 4 ranks share an accelerator by "
        "ranks_per_gpu: 4 (they exchange through host memory, which is slow)"
    )


def test_the_message_has_the_number_of_stages_for_which_nodes_have_room() -> None:
    config = parse_config({"pipeline_parallel_size": 3, "ray_placement_strategy": "STRICT_SPREAD"})
    text = shortage(config, [_node("a", CPU=2.0), _node("b", CPU=1.0)], {"CPU": 1.0}, 2.0)
    assert "3 x (1 CPU), each on a node of its own. The nodes have too little: a has 2 CPU, holds 2 stages;" in text
    assert "b has 1 CPU, holds 1 stage. Add nodes" in text


def test_used_resources_and_missing_ones_have_different_messages() -> None:
    config = parse_config({"pipeline_parallel_size": 2})
    text = shortage(config, [_node("a", 0.5, CPU=2.0)], {"CPU": 1.0}, 2.0)
    assert text.endswith("enough, but others use it: a has 0.5 CPU free of 2 CPU. End them, or add nodes")

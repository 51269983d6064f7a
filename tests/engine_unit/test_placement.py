"""The check that nodes can hold a model's stages: results, compared with a search of all placements, and messages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.config import parse_config
from rayloom_engine.launcher.placement import (
    Node,
    can_hold,
    num_stages_on,
    rank_resources,
    shortage,
    stage_resources,
)

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
            {"tensor_parallel_size": 2, "ranks_per_gpu": 2, "ray_resources_per_rank": {"GPU": 0.4}},
            1,
            {"GPU": 0.4},
        ),
        ({"ray_resources_per_rank": {"CPU": 2, "a100": 0.01}}, 8, {"CPU": 2.0, "a100": 0.01}),
    ],
)
def test_a_rank_takes_its_resources(document: dict[str, object], num_gpus: int, expected: dict[str, float]) -> None:
    assert rank_resources(parse_config(document), num_gpus) == expected


def test_a_stage_takes_the_sum_of_its_ranks_in_rays_precision() -> None:
    config = parse_config({"tensor_parallel_size": 3})
    assert stage_resources(config, {"CPU": 1.0, "a100": 0.1}) == {"CPU": 3.0, "a100": 0.3}


@pytest.mark.parametrize(
    ("sizes", "ranks_per_gpu", "per_rank", "per_stage"),
    [
        ((6, 1), 3, None, 2.0),  # a rank takes 0.3333, but 1.9998 GPUs would be 1 and 0.9998
        ((12, 1), 6, None, 2.0),
        ((3, 2), 3, None, 1.0),
        ((6, 1), 3, 0.3, 2.0),
        ((2, 3), 6, None, 0.3332),  # three stages on a GPU
        ((2, 2), 4, 0.21, 0.42),
        ((2, 1), 1, 2.0, 4.0),
    ],
)
def test_a_stage_of_ranks_that_share_gpus_takes_whole_gpus_or_a_part_of_one(
    sizes: tuple[int, int], ranks_per_gpu: int, per_rank: float | None, per_stage: float
) -> None:
    document: dict[str, object] = {"device": "cuda", "ranks_per_gpu": ranks_per_gpu}
    document |= {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1]}
    document |= {} if per_rank is None else {"ray_resources_per_rank": {"GPU": per_rank}}
    config = parse_config(document)
    assert stage_resources(config, rank_resources(config, 0))["GPU"] == per_stage


@pytest.mark.parametrize(
    ("num_gpus", "per_stage", "num_stages"),
    [
        (2.0, 2.0, 1),
        (3.0, 2.0, 1),
        (2.0, 0.3332, 6),
        (5.0, 0.42, 10),  # 11 parts of 0.42 are less than 5, but no GPU has room for three of them
        (1.5, 0.42, 3),
        (0.0, 0.42, 0),
    ],
)
def test_no_stage_has_parts_of_two_gpus(num_gpus: float, per_stage: float, num_stages: int) -> None:
    assert num_stages_on({"GPU": num_gpus}, {"GPU": per_stage}) == num_stages
    assert num_stages_on({"GPU": num_gpus, "CPU": 2.0}, {"CPU": 1.0, "GPU": per_stage}) == min(num_stages, 2)


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


def test_too_few_gpus_are_no_reason_to_share_them_because_no_manifest_has_that_setting() -> None:
    config = parse_config({"tensor_parallel_size": 2, "pipeline_parallel_size": 2})
    text = shortage(config, [_node("a", CPU=4.0, GPU=1.0)], {"CPU": 1.0, "GPU": 1.0}, 2.0)
    assert text.endswith("a has 4 CPU, 1 GPU, lacks 1 GPU. Add nodes, or lower one of the sizes")


def test_the_message_has_the_number_of_stages_for_which_nodes_have_room() -> None:
    config = parse_config({"pipeline_parallel_size": 3, "ray_placement_strategy": "STRICT_SPREAD"})
    text = shortage(config, [_node("a", CPU=2.0), _node("b", CPU=1.0)], {"CPU": 1.0}, 2.0)
    assert "3 x (1 CPU), each on a node of its own. The nodes have too little: a has 2 CPU, holds 2 stages;" in text
    assert "b has 1 CPU, holds 1 stage. Add nodes" in text


def test_used_resources_and_missing_ones_have_different_messages() -> None:
    config = parse_config({"pipeline_parallel_size": 2})
    text = shortage(config, [_node("a", 0.5, CPU=2.0)], {"CPU": 1.0}, 2.0)
    assert text.endswith("enough, but others use it: a has 0.5 CPU free of 2 CPU. End them, or add nodes")

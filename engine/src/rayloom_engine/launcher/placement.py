"""Placement of ranks in a Ray cluster: a rank's resources, a check for room, and the message for lack of room. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rayloom_engine.config import EngineConfig
from rayloom_engine.gpu_sharing import gpu_per_rank

Resources = Mapping[str, float]  # name of a Ray resource -> amount

_UNITS = 10_000  # Ray counts resources in units of 1/10000


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    name: str
    total: Resources
    available: Resources


def rank_resources(config: EngineConfig, num_gpus: float) -> dict[str, float]:
    """Returns the resources of one rank in a cluster that has `num_gpus` GPUs."""
    if config.ray_resources_per_rank is not None:
        return dict(config.ray_resources_per_rank)
    uses_gpu = config.device == "cuda" or (
        config.device == "auto" and num_gpus * config.ranks_per_gpu >= config.world_size
    )
    return {"CPU": 1.0, "GPU": gpu_per_rank(config.ranks_per_gpu)} if uses_gpu else {"CPU": 1.0}


def stage_resources(config: EngineConfig, per_rank: Resources) -> dict[str, float]:
    """Returns the placement bundle of one stage. Ray places a bundle on one node.

    The ranks of a stage communicate in every layer, so they share a node. Different stages communicate once a step.
    """
    stage = {name: round(amount * config.tensor_parallel_size, 4) for name, amount in per_rank.items()}
    if "GPU" in stage and 1 < config.ranks_per_gpu <= config.tensor_parallel_size:
        # Whole GPUs. Otherwise six ranks with 0.3333 GPU each would get 1.9998 GPUs: one, and 0.9998 of another, which
        # has room for two ranks only.
        stage["GPU"] = float(config.tensor_parallel_size // config.ranks_per_gpu)
    return stage


def num_stages_on(node: Resources, stage: Resources) -> int:
    """Returns how many stages fit on a node with these resources."""
    return min(_num_shares(name, node.get(name, 0.0), amount) for name, amount in stage.items())


def _num_shares(name: str, available: float, amount: float) -> int:
    """Returns how many stages get `amount` of a resource. A part of a GPU is always on one GPU."""
    has, takes = round(available * _UNITS), round(amount * _UNITS)
    if name != "GPU" or takes >= _UNITS:
        return has // takes
    num_whole, rest = divmod(has, _UNITS)
    return num_whole * (_UNITS // takes) + rest // takes


def can_hold(nodes: Iterable[Resources], stage: Resources, num_stages: int, strategy: str) -> bool:
    """True if `num_stages` equal stages fit on nodes with these resources, under Ray's placement strategy."""
    numbers = [num_stages_on(node, stage) for node in nodes]
    if strategy == "STRICT_PACK":
        return max(numbers, default=0) >= num_stages
    if strategy == "STRICT_SPREAD":
        return sum(number > 0 for number in numbers) >= num_stages
    return sum(numbers) >= num_stages


def shortage(config: EngineConfig, nodes: Sequence[Node], per_rank: Resources, waited_s: float) -> str:
    """Returns the message for stages without room: each node's resources, the missing resources, and the cure."""
    stage = stage_resources(config, per_rank)
    num_stages = config.pipeline_parallel_size
    strategy = config.ray_placement_strategy
    is_taken = can_hold((node.total for node in nodes), stage, num_stages, strategy)
    needs = f"{config.parallelism}: no room in the Ray cluster after {waited_s:g} s for {num_stages} x ({_list(stage)})"
    where = {"STRICT_SPREAD": ", each on a node of its own", "STRICT_PACK": ", all on one node"}.get(strategy, "")
    details = "; ".join(_node(node, stage, is_taken) for node in nodes) or "there are no nodes"
    if is_taken:
        return f"{needs}{where}. The nodes have enough, but others use it: {details}. End them, or add nodes"
    return f"{needs}{where}. The nodes have too little: {details}. Add nodes, or lower one of the sizes" + (
        " or ray_resources_per_rank" if config.ray_resources_per_rank else ""
    )


def _node(node: Node, stage: Resources, is_taken: bool) -> str:
    has = _list({name: node.total.get(name, 0.0) for name in stage})
    if is_taken:
        return f"{node.name} has {_list({name: node.available.get(name, 0.0) for name in stage})} free of {has}"
    missing = {name: amount - node.total.get(name, 0.0) for name, amount in stage.items()}
    missing = {name: amount for name, amount in missing.items() if amount > 0}
    number = num_stages_on(node.total, stage)
    verdict = f"lacks {_list(missing)}" if missing else f"holds {number} stage{'s' if number > 1 else ''}"
    return f"{node.name} has {has}, {verdict}"


def _list(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())

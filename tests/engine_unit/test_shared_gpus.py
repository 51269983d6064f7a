"""Ranks that share a GPU (setting ranks_per_gpu): devices, refusals, backend, and memory of each rank.

tests/engine_gpu/test_shared_gpu.py has such ranks on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch

from rayloom_engine.config import parse_config
from rayloom_engine.errors import ConfigError
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.parallel import host_exchange
from rayloom_engine.parallel.backend import choose_backend
from rayloom_engine.parallel.process_link import ProcessGroupLink
from rayloom_engine.worker import job, torch_computation
from rayloom_engine.worker.device_shares import rank_devices
from rayloom_engine.worker.loaded_rank import LoadedRank
from rayloom_engine.worker.start import find_model, load_rank, part_of
from rayloom_engine.worker.torch_computation import TorchPart
from rt_one_rank import OneRank, greedy
from rt_stages import stage_config
from rt_tiny import tiny_variant
from rt_two_ranks import TwoRanks

PROMPTS = ([5, 17, 33, 8, 90], [9], list(range(4, 44)))
NUM_TOKENS = 8


def _devices(devices: list[str], num_ranks: int | None = None, **settings: object) -> list[str]:
    config = parse_config(settings)
    num = num_ranks or config.world_size
    return rank_devices(config, devices, num, subject="SUBJECT", remedy="REMEDY")


@pytest.mark.parametrize(
    ("sizes", "ranks_per_gpu", "devices"),
    [
        ((2, 2), 1, ["5", "7", "a", "b"]),
        ((2, 2), 2, ["5", "5", "7", "7"]),  # a stage on each
        ((2, 2), 4, ["5"] * 4),
        ((4, 1), 2, ["5", "5", "7", "7"]),
        ((1, 3), 3, ["5"] * 3),
    ],
)
def test_ranks_that_follow_each_other_share_a_device(
    sizes: tuple[int, int], ranks_per_gpu: int, devices: list[str]
) -> None:
    settings = {"tensor_parallel_size": sizes[0], "pipeline_parallel_size": sizes[1], "ranks_per_gpu": ranks_per_gpu}
    assert _devices(["5", "7", "a", "b"], **settings) == devices


def test_a_machine_of_a_job_may_have_some_of_the_ranks() -> None:
    settings = {"tensor_parallel_size": 1, "pipeline_parallel_size": 6, "ranks_per_gpu": 2}
    assert _devices(["0", "1"], 3, **settings) == ["0", "0", "1"]


def test_without_devices_ranks_compute_on_the_cpu() -> None:
    assert _devices([], tensor_parallel_size=2) == []


@pytest.mark.parametrize(
    ("ranks_per_gpu", "devices", "need", "enough"),
    [
        (1, ["0", "1", "2"], "an accelerator each, and this machine has 3", 2),
        (1, ["0"], "an accelerator each, and this machine has 1", 4),
        (2, ["0"], "2 accelerators, 2 ranks on each, and this machine has 1", 4),
    ],
)
def test_too_few_devices_are_refused_with_the_number_of_ranks_that_could_share_one(
    ranks_per_gpu: int, devices: list[str], need: str, enough: int
) -> None:
    with pytest.raises(ConfigError) as refusal:
        _devices(devices, tensor_parallel_size=4, ranks_per_gpu=ranks_per_gpu)
    assert str(refusal.value) == (
        f"SUBJECT: 4 ranks need {need}; REMEDY, set device to cpu, or let {enough} ranks share an accelerator by "
        f"ranks_per_gpu: {enough}, on a command line --ranks-per-gpu {enough} (they exchange through host memory, "
        "which is slow)"
    )


def test_a_rank_of_a_job_gets_the_device_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Exception):
        pass

    def end(*_: object) -> None:
        raise Ended

    environment = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    environment |= {"MASTER_ADDR": "h", "MASTER_PORT": "9", "RAYLOOM_RANK_TOKEN": "x" * 32, "CUDA_VISIBLE_DEVICES": ""}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(job, "visible_devices", lambda: ["5", "7"])
    monkeypatch.setattr(job, "RankServer", end)
    monkeypatch.setattr(job.signal, "signal", lambda *_: None)
    sizes = {"executor": "external", "tensor_parallel_size": 4}
    with pytest.raises(Ended):
        job.serve_in_job(parse_config({**sizes, "ranks_per_gpu": 2}))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    with pytest.raises(ConfigError, match=r"'external': 4 ranks need an accelerator each, .* has 2; start fewer on"):
        job.serve_in_job(parse_config(sizes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "9")
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE 9 cannot be in a job of WORLD_SIZE 4"):
        job.serve_in_job(parse_config(sizes))


@pytest.mark.parametrize(
    ("device_type", "ranks_per_gpu", "backend"),
    [("cuda", 1, "nccl"), ("cuda", 2, "gloo"), ("cpu", 1, "gloo"), ("cpu", 2, "gloo")],
)
def test_only_ranks_with_a_gpu_each_use_nccl(device_type: str, ranks_per_gpu: int, backend: str) -> None:
    assert choose_backend(device_type, ranks_per_gpu) == backend


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_variant(tmp_path_factory.mktemp("tiny"), "llama")


class MakeRank(Protocol):
    def __call__(self, ranks_per_gpu: int, free_bytes: int = 8 << 20) -> LoadedRank: ...


@pytest.fixture
def rank_on_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRank:
    """Loads rank 0 of two stages of two ranks. Weights and blocks are on the CPU; in all else the rank is on a GPU."""
    monkeypatch.setenv("RAYLOOM_CPU_ISA", "torch")
    monkeypatch.setattr(TorchPart, "device_type", "cuda")

    def rank(ranks_per_gpu: int, free_bytes: int = 8 << 20) -> LoadedRank:
        monkeypatch.setattr(torch_computation, "free_memory_bytes", lambda: free_bytes)
        settings = {"num_kv_blocks": None, "max_num_seqs": 512, "max_num_batched_tokens": 16}
        config = stage_config(folder, 2, tensor_parallel_size=2, **settings)
        config = config.model_copy(update={"ranks_per_gpu": ranks_per_gpu})
        resolved, shape = find_model(config, no_progress)
        return load_rank(config, resolved, shape, no_progress, part=part_of(config, shape, 0), ranks_on_host=4)

    return rank


def test_ranks_on_a_gpu_divide_its_memory_but_not_by_the_ranks_of_the_host(rank_on_gpu: MakeRank) -> None:
    alone, half, shared = rank_on_gpu(1), rank_on_gpu(1, 4 << 20), rank_on_gpu(2)
    assert 0 < shared.kv.num_blocks == half.kv.num_blocks < alone.kv.num_blocks
    assert (alone.backend, alone.exchanges_on_host) == ("nccl", False)
    assert (shared.backend, shared.exchanges_on_host) == ("gloo", True)


class Peers:
    """A TensorGroup and a StageLink of one rank. Notes each call, and whether the rank's activity counts it a wait."""

    def __init__(self, rank: LoadedRank, notes: list[tuple[str, bool]]) -> None:
        self._rank = rank
        self._notes = notes

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        self._notes.append(("sum", self._rank.activity.waits))
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        self._notes.append(("gather", self._rank.activity.waits))
        return part

    def receive(self, num_tokens: int) -> torch.Tensor:
        self._notes.append(("receive", self._rank.activity.waits))
        return torch.empty(num_tokens, 1)

    def send(self, hidden_TD: torch.Tensor) -> None:
        self._notes.append(("send", self._rank.activity.waits))


def _notes_of_exchanges(rank: LoadedRank, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[tuple[str, bool]]]:
    """Exchanges tensors as a rank's steps do. Returns the classes of group and link, outermost first, and the notes.

    A note is a call of a peer or a copy to host memory, and whether the activity counted it a wait for a peer.
    """
    notes: list[tuple[str, bool]] = []
    copy = host_exchange._host_copy

    def noted_copy(tensor: torch.Tensor) -> torch.Tensor:
        notes.append(("copy", rank.activity.waits))
        return copy(tensor)

    monkeypatch.setattr(host_exchange, "_host_copy", noted_copy)
    peers = Peers(rank, notes)
    runner = rank.runner(4, 1, peers, peers)
    assert runner._link is not None
    runner._group.all_reduce(torch.ones(2, 3))
    runner._group.gather(torch.ones(2, 3))
    runner._link.send(torch.ones(2, 3))
    assert not rank.activity.waits
    classes = []
    for outermost, name in ((runner._group, "_group"), (runner._link, "_link")):
        each: object = outermost
        while each is not peers:
            classes.append(type(each).__name__)
            each = getattr(each, name)
    return classes, notes


def test_a_copy_to_host_memory_is_no_wait_for_another_rank(
    rank_on_gpu: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a rank whose own GPU hangs would look like one that waits for a peer, and would not be replaced."""
    classes, notes = _notes_of_exchanges(rank_on_gpu(2), monkeypatch)
    assert classes == ["HostGroup", "WatchedGroup", "HostLink", "WatchedLink"]
    copied = ("copy", False)
    assert notes == [copied, ("sum", True), copied, ("gather", True), copied, ("send", True)]


def test_ranks_with_a_gpu_each_make_no_copies(rank_on_gpu: MakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    classes, notes = _notes_of_exchanges(rank_on_gpu(1), monkeypatch)
    assert classes == ["WatchedGroup", "WatchedLink"]
    assert notes == [("sum", True), ("gather", True), ("send", True)]


def test_hidden_states_of_ranks_that_share_a_gpu_arrive_in_host_memory_and_are_copied_to_the_gpu(
    rank_on_gpu: MakeRank,
) -> None:
    alone, shared = rank_on_gpu(1), rank_on_gpu(2)
    links = [alone.link(), shared.link()]
    assert all(isinstance(link, ProcessGroupLink) for link in links)
    assert [link._form.device.type for link in links] == ["cuda", "cpu"]
    link = shared._watched_link(links[1])
    assert isinstance(link, host_exchange.HostLink)
    assert link._device.type == "cuda"


@pytest.fixture(scope="module")
def ranks() -> Iterator[TwoRanks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYLOOM_CPU_ISA", "torch")
        ranks = TwoRanks("rayloom_engine.worker.torch_computation", exchanges_on_host=True)
        yield ranks
        ranks.close()


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}], ids=["two shards", "two stages"])
def test_ranks_that_exchange_copies_give_the_tokens_of_one_rank_also_after_a_loss(
    layout: dict[str, int], folder: Path, ranks: TwoRanks
) -> None:
    expected = greedy(OneRank(folder).engine(), PROMPTS, NUM_TOKENS)
    num_losses = ranks.num_losses
    assert ranks.greedy(folder, PROMPTS, NUM_TOKENS, **layout, killed=1) == expected
    assert ranks.num_losses == num_losses + 1

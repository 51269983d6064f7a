"""A rank's host memory for copies of KV blocks: exact logits after a load, and the facts that copies depend on.

test_host_file.py has the files, test_stage_processes.py the deaths of ranks.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.engine import Engine
from rayloom_engine.core.sequence import Sequence
from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.errors import ConfigError, ModelError
from rayloom_engine.kv import host_file
from rayloom_engine.kv.host_file import HostFile, allocated_bytes, file_name, remove_files
from rayloom_engine.models.checkpoint.source import ResolvedModel
from rayloom_engine.worker import host_memory, start
from rayloom_engine.worker.host_memory import HostMemoryPlace, model_identity, open_host_memory
from rt_one_rank import OneRank
from rt_tiny import tiny_variant

PROMPT = tuple(range(3, 73))  # 70 tokens: four full blocks and a part of one
OTHERS = [tuple(range(first, first + 80)) for first in (80, 161)]
MIB = 1 << 20


@pytest.fixture(scope="module", params=["", "torch"], ids=["C library", "torch"])
def rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYLOOM_CPU_ISA", request.param)
        return OneRank(tiny_variant(tmp_path_factory.mktemp("model"), "llama"), kv_host_memory_bytes=MIB)


def answer(engine: Engine, prompt: tuple[int, ...], num_tokens: int = 4) -> tuple[list[TokenLogprobs], int]:
    """The logprobs of the tokens and of their alternatives, and the number of cached tokens of the prompt."""
    params = DecodingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=20)
    sequence = Sequence(request_id="a", prompt_ids=prompt, params=params)
    engine.add(sequence)
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    engine.scheduler.check_integrity()
    return [entry for output in outputs for entry in output.logprobs], sequence.num_cached_tokens or 0


def test_logits_after_a_load_are_those_after_a_hit_in_the_cache(rank: OneRank) -> None:
    """Both compute the same last positions of the prompt, so every bit of the logits must be the same."""
    engine = rank.engine(num_blocks=64)
    first, _ = answer(engine, PROMPT)
    expected, num_cached = answer(engine, PROMPT)
    assert (len(expected), num_cached) == (4, 64)

    engine = rank.engine(num_blocks=8, num_host_slots=40)
    assert answer(engine, PROMPT) == (first, 0)
    for other in OTHERS:
        answer(engine, other)
    assert answer(engine, PROMPT) == (expected, 64)
    stats = engine.stats()
    assert (stats.num_host_loads, stats.host_hits) == (4, 64)
    assert stats.num_host_slots == 40 and stats.num_used_host_slots == stats.num_host_stores > 4
    engine.scheduler.pool.tier.begin_epoch(("",))
    assert engine.stats().num_host_slots == 0, "the rank has lost its memory"


def test_a_plan_stores_an_evicted_block_before_its_new_owner_overwrites_it(rank: OneRank) -> None:
    engine = rank.engine(num_blocks=64)
    first, _ = answer(engine, PROMPT, num_tokens=1)
    expected, _ = answer(engine, PROMPT, num_tokens=1)

    engine = rank.engine(num_blocks=6, num_host_slots=40)
    assert answer(engine, PROMPT, num_tokens=1) == (first, 0)
    assert engine.stats().num_host_stores == 0
    answer(engine, OTHERS[0], num_tokens=1)
    assert engine.stats().num_host_stores == 4, "the blocks of the first prompt, which the second has evicted"
    assert answer(engine, PROMPT, num_tokens=1) == (expected, 64)
    assert engine.stats().num_host_loads >= 3


@pytest.fixture
def token() -> Iterator[str]:
    token = secrets.token_hex(16)
    yield token
    remove_files(token)


def test_the_next_process_of_a_rank_finds_the_copies_and_no_other_rank_does(rank: OneRank, token: str) -> None:
    loaded = rank.loaded
    first = open_host_memory(rank.config, loaded, "model", 1, HostMemoryPlace(token=token))
    assert first is not None
    assert first.num_slots == MIB // loaded.kv_layout.block_bytes(16, 4)
    first.file.close()
    ids = {first.file.id}
    for model, place, is_same in (
        ("model", HostMemoryPlace(token=token), True),
        ("model", HostMemoryPlace(token=token, rank=1), False),
        ("another model", HostMemoryPlace(token=token), False),
        ("model", HostMemoryPlace(), False),
    ):
        memory = open_host_memory(rank.config, loaded, model, 1, place)
        assert memory is not None
        assert (memory.file.id in ids) is is_same
        ids.add(memory.file.id)
        memory.file.close()


def test_a_local_model_with_other_weights_does_not_get_the_copies_of_the_old_ones(token: str, tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "llama")
    ids = []
    for is_changed in (False, False, True):
        if is_changed:
            (weights,) = folder.glob("*.safetensors")
            weights.write_bytes(weights.read_bytes()[:-64] + bytes(64))
        rank = OneRank(folder, host=HostMemoryPlace(token=token), kv_host_memory_bytes=MIB)
        ids.append(rank.host_file.id)
        rank.host_file.close()
    assert ids[0] == ids[1] != ids[2]


def test_the_identity_of_a_model_has_its_commit_its_context_and_the_version_of_the_engine(
    rank: OneRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ResolvedModel(path=tmp_path, source="model", commit="a")
    first = model_identity(model, rank.shape)
    assert first == model_identity(dataclasses.replace(model, path=tmp_path / "elsewhere"), rank.shape)
    assert first != model_identity(dataclasses.replace(model, commit="b"), rank.shape)
    longer = dataclasses.replace(rank.shape, rope=dataclasses.replace(rank.shape.rope, context_len=7))
    assert first != model_identity(model, longer)
    monkeypatch.setattr(host_memory, "version", lambda _: "another")
    assert first != model_identity(model, rank.shape)
    with pytest.raises(ModelError, match="cannot be read"):
        model_identity(dataclasses.replace(model, commit=None), rank.shape)


def test_too_much_memory_is_refused_at_the_start_and_given_up_by_a_replacement(
    rank: OneRank, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = rank.config.model_copy(update={"kv_host_memory_bytes": 1 << 60})
    with pytest.raises(
        ConfigError, match=r"kv_host_memory_bytes: 1073741824\.00 GiB for each rank.* lower kv_host_memory_bytes"
    ):
        open_host_memory(config, rank.loaded, "model", 1, HostMemoryPlace(token=token))
    place = HostMemoryPlace(token=token, is_required=False)
    assert open_host_memory(config, rank.loaded, "model", 1, place) is None
    assert "no copies of KV blocks in host memory from now on: kv_host_memory_bytes" in caplog.text


def test_several_engines_on_a_machine_share_its_memory(
    rank: OneRank, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: 3 * MIB)
    monkeypatch.setattr(host_memory, "allocated_bytes", lambda token: 0)
    place = HostMemoryPlace(token=token)
    for engines_on_host, ranks_on_host in ((3, 1), (2, 2)):
        config = rank.config.model_copy(update={"engines_on_host": engines_on_host})
        with pytest.raises(ConfigError, match=f"this machine .{engines_on_host * ranks_on_host}.*a tenth"):
            open_host_memory(config, rank.loaded, "model", ranks_on_host, place)


def test_a_load_that_fails_later_leaves_no_file(token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fail(*_: object) -> None:
        seen.append(allocated_bytes(token) >= MIB)
        raise ConfigError("no room for the KV cache")

    monkeypatch.setattr(start, "_plan_cache", fail)
    folder = tiny_variant(tmp_path, "llama")
    with pytest.raises(ConfigError, match="no room for the KV cache"):
        OneRank(folder, host=HostMemoryPlace(token=token), kv_host_memory_bytes=MIB)
    assert seen == [True] and allocated_bytes(token) == 0


def test_memory_that_the_system_does_not_give_is_refused_with_the_cure(
    rank: OneRank, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"of shared memory .* cannot be allocated .*No space left.*--shm-size"):
        open_host_memory(rank.config, rank.loaded, "model", 1, HostMemoryPlace(token=token))


@pytest.mark.parametrize("age", [0.0, 70.0, 100.0])
def test_an_engine_has_the_memory_that_a_killed_engine_on_another_machine_took(
    age: float, rank: OneRank, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisors are on another machine, so no file of them tells that the first engine is dead."""
    killed = secrets.token_hex(16)
    HostFile.open(file_name(killed, "rank0"), "", MIB).close()
    left = host_file.FOLDER / file_name(killed, "rank0")
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: 0 if left.exists() else 1 << 40)
    waits = []

    def pass_time(seconds: float) -> None:
        waits.append(seconds)
        os.utime(left, (time.time() - age - seconds,) * 2)

    monkeypatch.setattr(host_memory, "sleep", pass_time)
    try:
        os.utime(left, (time.time() - age,) * 2)
        replacement = HostMemoryPlace(token=token, is_required=False)
        is_old = age > 75.0
        memory = open_host_memory(rank.config, rank.loaded, "model", 1, replacement)
        assert (memory is not None) is is_old, "a rank that replaces another does not wait"
        if memory is None:
            memory = open_host_memory(rank.config, rank.loaded, "model", 1, HostMemoryPlace(token=token))
        assert memory is not None and not left.exists()
        memory.file.close()
        assert waits == ([] if is_old else [pytest.approx(76.0 - age, abs=0.5)])
    finally:
        remove_files(killed)


def test_files_that_are_stale_are_removed_before_the_free_memory_is_measured(
    rank: OneRank, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = secrets.token_hex(16)
    HostFile.open(file_name(killed, "rank0"), "", MIB).close()
    left = host_file.FOLDER / file_name(killed, "rank0")
    os.utime(left, (time.time() - 3600.0,) * 2)
    measured = []
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: measured.append(left.exists()) or 1 << 40)
    memory = open_host_memory(rank.config, rank.loaded, "model", 1, HostMemoryPlace(token=token))
    assert memory is not None and measured == [False]
    memory.file.close()

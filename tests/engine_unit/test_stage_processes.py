"""Pipeline stages in separate processes over gloo, with two steps in flight, generate the tokens of a single process.

The tokens are also the same after a loss of the group.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import NewSlot, SlotStep, StepPlan
from rayloom_engine.parallel.process_group import interface_towards
from rt_embeds import EmbeddingRows
from rt_stages import (
    UNTIL_PREEMPTED,
    RankProcesses,
    StagesInARow,
    answers,
    ids_by_request,
    load_stages,
    make_engine,
    stage_config,
)
from rt_tiny import tiny_variant


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_variant(tmp_path_factory.mktemp("tiny"), "qwen2-some-windows")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    engine = make_engine(StagesInARow(load_stages(stage_config(folder))))
    return ids_by_request(answers(engine, max_tokens=UNTIL_PREEMPTED))


@pytest.fixture
def stages(folder: Path) -> Iterator[RankProcesses]:
    processes = RankProcesses(stage_config(folder, 2, kv_host_memory_bytes=1 << 20))
    yield processes
    processes.close()


def test_a_group_that_is_left_and_joined_again_computes_the_same(
    stages: RankProcesses, expected: dict[str, list[int]]
) -> None:
    ports = set()
    bytes_read = []
    for epoch in (1, 2, 3):
        port, read = stages.join(epoch)
        ports.add(port)
        bytes_read.append(read)
        engine = make_engine(stages, epoch, depth=2)
        assert ids_by_request(answers(engine, max_tokens=UNTIL_PREEMPTED)) == expected
    assert len(ports) == 3
    assert bytes_read[1:] == bytes_read[:1] * 2, "a rebuild must not read weights again"


@pytest.mark.parametrize("lost", [0, 1])
def test_after_a_rank_was_killed_the_other_keeps_its_weights_and_no_token_changes(
    lost: int, stages: RankProcesses, folder: Path, expected: dict[str, list[int]]
) -> None:
    """Some prompts are embeddings. Only the first stage uses them, and gets them again after the loss."""
    _, before = stages.join(1)
    engine = make_engine(_DiesAtStep(stages, lost, at_step=7), depth=2)
    outputs = answers_across_a_loss(engine, stages, EmbeddingRows(folder))
    assert ids_by_request(outputs) == expected
    assert stages.join(3)[1] == before


@pytest.mark.parametrize("lost", [0, 1])
def test_after_a_rank_was_killed_both_load_the_blocks_that_both_have_in_host_memory(
    lost: int, stages: RankProcesses, folder: Path, expected: dict[str, list[int]]
) -> None:
    stages.join(1)
    memory = stages.host_memory()
    engine = make_engine(_DiesAtStep(stages, lost, at_step=9), depth=2, num_host_slots=64)
    tier = engine.scheduler.pool.tier
    tier.begin_epoch(memory)
    loaded_before = []

    def rejoined() -> None:
        assert stages.host_memory() == memory, "the replacement found another memory"
        tier.begin_epoch(stages.host_memory())
        loaded_before.append(tier.num_loaded)
        assert tier.slots.num_used > 0

    outputs = answers_across_a_loss(engine, stages, EmbeddingRows(folder), rejoined)
    assert ids_by_request(outputs) == expected
    assert tier.num_loaded > loaded_before[0]


def test_a_stage_continues_before_the_next_one_receives_and_notices_its_end(stages: RankProcesses) -> None:
    stages.join(1)
    assert [stages.ask(0, "run", _plan(number))[1].step_id for number in (1, 2)] == [1, 2]
    results = [stages.ask(1, "run", _plan(number))[1] for number in (1, 2)]
    assert [result.sampled[0].slot for result in results] == [1, 2]
    assert len({result.sampled[0].token_id for result in results}) == 1
    stages.processes[1].kill()
    stages.processes[1].join(60.0)
    with pytest.raises(RuntimeError):
        for number in (3, 4, 5):
            stages.ask(0, "run", _plan(number))


def test_a_stage_may_wait_for_the_previous_one_longer_than_for_the_rendezvous(stages: RankProcesses) -> None:
    limit_s = 3.0
    stages.join(1, limit_s)
    stages.send(1, "run", _plan(1))
    assert not stages.has_answer(1, limit_s + 0.5)
    stages.ask(0, "run", _plan(1))
    assert stages.receive(1, "run")[1].step_id == 1


def test_a_meeting_that_nobody_came_to_can_be_repeated(stages: RankProcesses, expected: dict[str, list[int]]) -> None:
    port = stages.ask(0, "open_store")
    with pytest.raises(RuntimeError):
        stages.ask(0, "join", port, 1, 1.0)
    stages.join(2)
    engine = make_engine(stages, 2, depth=2)
    assert ids_by_request(answers(engine, max_tokens=UNTIL_PREEMPTED)) == expected


def test_the_interface_is_the_one_that_leads_to_the_host() -> None:
    addresses = [
        (entry.address, name)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family is socket.AF_INET
    ]
    assert any(address == "127.0.0.1" for address, _ in addresses)
    assert [(address, interface_towards(address)) for address, _ in addresses] == addresses
    assert interface_towards("host.invalid") is None


def _plan(number: int) -> StepPlan:
    """A prompt of three tokens in a slot of its own, in epoch 1."""
    new = NewSlot(
        slot=number,
        request_id=f"{number}",
        token_ids=(3, 4, 5),
        num_prompt_tokens=3,
        block_table=(number,),
        params=DecodingParams(max_tokens=9, temperature=0.0),
        eos_token_ids=(),
    )
    step = SlotStep(slot=number, start=0, num_tokens=3, samples=True)
    return StepPlan(step_id=number, epoch=1, new_slots=(new,), slots=(step,))


class _DiesAtStep:
    """The executor of RankProcesses, which kills a rank's process before a step."""

    def __init__(self, stages: RankProcesses, lost: int, at_step: int) -> None:
        self._stages = stages
        self._lost = lost
        self._at_step = at_step
        self._num_steps = 0

    def submit(self, plan):
        self._num_steps += 1
        if self._num_steps == self._at_step:
            process = self._stages.processes[self._lost]
            os.kill(process.pid, signal.SIGKILL)
            process.join(60.0)
        self._stages.submit(plan)

    def collect(self):
        return self._stages.collect()

    def forget_all(self) -> None:
        self._stages.forget_all()


def answers_across_a_loss(engine, stages: RankProcesses, embedding: EmbeddingRows, rejoined=lambda: None):
    """Returns the result of `answers`. When the engine's step raises, the test makes a new process group.

    Then it calls `rejoined`.
    """
    step = engine.step
    losses = []

    def step_or_rebuild():
        try:
            return step()
        except RuntimeError as error:
            losses.append(error)
            for rank, process in stages.processes.items():
                if not process.is_alive():
                    stages.start(rank)
            stages.join(2)
            engine.scheduler.epoch = 2
            rejoined()
            return []

    engine.step = step_or_rebuild
    outputs = answers(engine, max_tokens=UNTIL_PREEMPTED, embedding=embedding)
    assert len(losses) == 1
    return outputs

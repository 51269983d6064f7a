"""Sequences with unbuilt grammars or costly masks delay no other sequence and lose no token."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from rayloom_engine.core.decoding import DecodingParams, ThinkingBudget
from rayloom_engine.core.sequence import Sequence
from rayloom_engine.core.step import NewSlot, SlotStep
from rayloom_engine.grammar.compile import grammar_of
from rayloom_engine.llm import LLM
from rayloom_engine.sampling_params import SamplingParams
from rayloom_engine.structured_outputs import StructuredOutputs
from rayloom_engine.worker.builds import Builds
from rayloom_engine.worker.forms import Forms
from rayloom_engine.worker.masks import MASKS_S, Masks
from rayloom_engine.worker.slots import Slot
from rt_forms import tiny_vocabulary
from rt_tiny import tiny_checkpoint, tiny_tokenizer

NUM_COSTLY = 32
NUM_TOKENS = 40


@pytest.fixture(scope="module", params=[None, 8], ids=["full attention", "window"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint(folder, "MistralForCausalLM", sliding_window=request.param)
    with LLM(str(tiny_tokenizer(folder)), dtype="float32", num_kv_blocks=400, max_num_seqs=40, threads=1) as llm:
        yield llm


def sequence(llm: LLM, request_id: str, params: SamplingParams) -> Sequence:
    # The prompt has 16 tokens, which fill a block. So its last token is computed again, in a block that other sequences
    # may share.
    prompt = tuple(range(60, 76))
    decoding = params.decoding(0, len(prompt), llm.model.max_model_len, llm.model.vocab_size, 0)
    return Sequence(request_id=request_id, prompt_ids=prompt, params=decoding, eos_token_ids=(2,))


def constrained(number: int, **form: Any) -> SamplingParams:
    return SamplingParams(seed=number, max_tokens=12, structured_outputs=StructuredOutputs(**form))


def step_until(llm: LLM, request_id: str, tokens: dict[str, list[int]]) -> list[list[str]]:
    """Steps until the request is finished. Returns the requests that got a token in each step."""
    steps = []
    while True:
        outputs = llm._engine.step()
        for output in outputs:
            tokens[output.sequence_id] += output.token_ids
        steps.append([output.sequence_id for output in outputs])
        if any(output.sequence_id == request_id and output.finish_reason for output in outputs):
            return steps


def builds_of(llm: LLM) -> Builds:
    return llm._engine._executor._rank._slots.forms._builds


def test_others_get_a_token_in_each_step_while_grammars_are_built(llm: LLM) -> None:
    gate = threading.Event()
    builds_of(llm).start(lambda: gate.wait(60))  # this build blocks the thread of all builds
    wishes = {f"form {number}": constrained(number, regex=f"[a-z{number}]{{6,9}}") for number in range(6)}
    tokens: dict[str, list[int]] = defaultdict(list)
    for request_id, params in wishes.items():
        llm._engine.add(sequence(llm, request_id, params))
    plain = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    llm._engine.add(sequence(llm, "plain", plain))
    assert step_until(llm, "plain", tokens) == [["plain"]] * NUM_TOKENS
    assert llm._engine.step() == []  # no other sequence can run, so the step waits 0.1 s for the grammar
    gate.set()
    while llm._engine.has_unfinished:
        for output in llm._engine.step():
            tokens[output.sequence_id] += output.token_ids
    for request_id, params in {**wishes, "plain": plain}.items():
        llm._engine.add(sequence(llm, request_id, params))
        alone: dict[str, list[int]] = defaultdict(list)
        step_until(llm, request_id, alone)
        assert alone[request_id] == tokens[request_id]


def test_costly_grammars_that_arrive_together_leave_others_their_pace(llm: LLM, measured: Any) -> None:
    # 32 such grammars take 2 to 3 s of CPU time.
    parts = [{"properties": {f"p{n}": {"type": "string"} for n in range(40)}} for _ in range(40)]
    tokens: dict[str, list[int]] = defaultdict(list)
    costly = [constrained(n, json={"title": f"{llm} {n}", "allOf": parts}) for n in range(NUM_COSTLY)]
    plain = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    llm._engine.add(sequence(llm, "plain", plain))
    llm._engine.step()
    for number, params in enumerate(costly):
        llm._engine.add(sequence(llm, f"costly {number}", params))
    before = time.thread_time()
    steps = step_until(llm, "plain", tokens)
    step_s = (time.thread_time() - before) / len(steps)
    assert all("plain" in step for step in steps)
    assert len(steps) == NUM_TOKENS - 1
    finished = sum(bool(tokens[f"costly {number}"]) for number in range(NUM_COSTLY))
    assert finished < NUM_COSTLY, "the grammars were built sooner than 40 tokens"
    assert step_s < 0.1
    reasons = set()
    while llm._engine.has_unfinished:
        reasons |= {output.finish_reason for output in llm._engine.step()}
    assert reasons <= {None, "stop", "length"}
    measured(f"{finished} of {NUM_COSTLY} grammars built beside {NUM_TOKENS} tokens, {step_s * 1000:.1f} ms a step")


FORM = DecodingParams(max_tokens=9, grammar=grammar_of(StructuredOutputs(regex="[ab]{9}")))
THINKING = DecodingParams(max_tokens=9, thinking=ThinkingBudget(num_tokens=0, start="", ends=("x",), end_ids=(7,)))


def slots_with_forms(forms: Forms, num: int, params: DecodingParams = FORM) -> list[tuple[SlotStep, Slot]]:
    pairs = []
    for number in range(num):
        new = NewSlot(
            slot=number,
            request_id=f"{number}",
            token_ids=(5,),
            num_prompt_tokens=1,
            block_table=(0,),
            params=params,
            eos_token_ids=(2,),
        )
        pairs.append((SlotStep(slot=number, start=0, num_tokens=1, samples=True), Slot(new, forms=forms)))
    return pairs


def test_masks_of_a_step_have_a_time_and_those_left_come_first_next_time() -> None:
    forms = Forms(tiny_vocabulary)
    ticks = iter(range(1000))
    # Each mask takes 0.6 of MASKS_S. So in each step a second mask still begins, but a third does not.
    masks = Masks(forms, 256, cpu_clock=lambda: 0.6 * MASKS_S * next(ticks))
    pairs = slots_with_forms(forms, 5)
    for _, slot in pairs:
        while not slot.form.is_built:
            slot.form.wait_a_slice()
    postponed = [masks.set(pairs, is_whole_step=True).postponed for _ in range(3)]
    assert postponed == [{2, 3, 4}, {0, 1, 4}, {1, 2, 3}]
    assert masks.waiting_slots() == ()


@pytest.mark.parametrize("params", [FORM, THINKING], ids=["form", "thinking"])
def test_a_slot_waits_until_its_grammar_is_built_or_it_is_freed(params: DecodingParams) -> None:
    gate = threading.Event()
    forms = Forms(lambda: tiny_vocabulary() if gate.wait(60) else None)
    masks = Masks(forms, 256)
    pairs = slots_with_forms(forms, 2, params)
    found = masks.set(pairs, is_whole_step=False)
    assert (found.postponed, found.waited_s) == ({0, 1}, 0.0)
    found = masks.set(pairs, is_whole_step=True)
    assert found.postponed == {0, 1}
    assert found.waited_s > 0.05
    assert masks.waiting_slots() == (0, 1)
    masks.forget((0,))
    assert masks.waiting_slots() == (1,)
    gate.set()
    while masks.waiting_slots():
        time.sleep(0)
    assert masks.set(pairs, is_whole_step=False).postponed == set()
    assert all(slot.allowed is not None for _, slot in pairs)


def test_steps_without_a_grammar_count_as_a_wait_for_it() -> None:
    now = [1000.0]
    builds = Builds(wall_s=0.5, clock=lambda: now[0])
    has_begun, release = threading.Event(), threading.Event()
    stuck = builds.start(lambda: has_begun.set() or release.wait(60))
    assert has_begun.wait(60)
    builds.note_wait()  # the first call counts as 0.1 s, whatever the time before it
    for _ in range(10):  # 0.02 s each
        now[0] += 0.02
        builds.note_wait()
    now[0] += 3600  # as if the process was stopped for an hour: counts as 0.1 s
    builds.note_wait()
    assert not builds.is_done(stuck)  # 0.4 s have passed
    for _ in range(2):
        now[0] += 0.11
        builds.note_wait()
    assert builds.is_done(stuck)
    release.set()


def test_a_step_that_waits_itself_counts_its_wait_once() -> None:
    now = [1000.0]
    builds = Builds(wall_s=0.5, clock=lambda: now[0])
    has_begun, release = threading.Event(), threading.Event()
    stuck = builds.start(lambda: has_begun.set() or release.wait(60))
    assert has_begun.wait(60)
    for _ in range(4):
        now[0] += 0.1
        builds.wait_a_slice(stuck)
        builds.note_wait()
    assert not builds.is_done(stuck)  # 0.4 s have passed
    builds.wait_a_slice(stuck)
    assert builds.is_done(stuck)
    release.set()

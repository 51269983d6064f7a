"""The draft model of a rank: models that it refuses, its memory, its limits, its failures, and slots that lag."""

from __future__ import annotations

import itertools
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayloom_engine.config import BLOCK_SIZE
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import FIRST_EPOCH, DraftWork, NewSlot, Proposal, SlotStep, StepPlan, StepResult
from rayloom_engine.errors import ConfigError, ModelError
from rayloom_engine.models.draft_checks import check_tokenizers
from rayloom_engine.models.largest_step import LargestStep, StepBytes, with_draft_model
from rayloom_engine.worker import library_computation
from rayloom_engine.worker.block_tables import BlockTables
from rayloom_engine.worker.drafted_kv import DraftedKv
from rayloom_engine.worker.slots import Slot
from rayloom_engine.worker.start import warm_up
from rt_stages import EPOCH, StagesInARow, load_stages, stage_config
from rt_tiny import tiny_checkpoint, tiny_tokenizer, tiny_variant

GREEDY = DecodingParams(max_tokens=40, temperature=0.0)


def _load(model: Path, draft: Path | str, epoch: int = EPOCH, **changes: Any) -> StagesInARow:
    config = stage_config(model, speculation="draft", draft_model=str(draft), **changes)
    return StagesInARow(load_stages(config), epoch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer(tiny_checkpoint(tmp_path_factory.mktemp("model")))


def test_a_draft_model_with_another_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    draft = tiny_tokenizer(tiny_checkpoint(tmp_path))
    path = draft / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    path.write_text(json.dumps({**tokenizer, "truncation": None}))  # other bytes, but the same tokens
    _load(model, draft)
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    sentence = (
        rf"another tokenizer than the model: 2 of the model's 256 tokens .* 'a' \({vocabulary['b']} in the model, "
    )
    with pytest.raises(ConfigError, match=sentence):
        _load(model, draft)
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"cannot be compared \(TypeError"):
        _load(model, draft)
    path.write_text("[" * 200_000)
    with pytest.raises(ConfigError, match=r"cannot be compared \(RecursionError"):
        _load(model, draft)


def test_a_long_token_is_cut_in_the_message(model: Path, tmp_path: Path) -> None:
    draft = tiny_tokenizer(tiny_checkpoint(tmp_path / "draft"))
    target = shutil.copytree(model, tmp_path / "target")
    path = target / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["!" * 41] = 256
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=f"such as '{'!' * 40}[.][.][.]' [(]256 in the model, missing in the draft"):
        check_tokenizers("d", draft, target)


def test_an_error_of_the_load_names_the_setting_of_the_draft_model(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYLOOM_KERNELS", "plain")  # torch, which has no int8 weights
    with pytest.raises(ConfigError, match=f"draft_model: {model}, with its own setting draft_quantization: .*int8"):
        _load(model, model, draft_quantization="int8")


def test_tokenizers_that_cannot_be_compared_are_named_in_the_log(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = tiny_checkpoint(tmp_path)
    _load(model, draft)
    (record,) = [record for record in caplog.records if "not compared" in record.message]
    assert record.message.startswith(f"draft_model: the tokenizers of {draft} and of the model are not compared")
    assert f"there is no {draft / 'tokenizer.json'};" in record.message


def test_a_draft_model_that_needs_freed_blocks_is_refused(tmp_path: Path) -> None:
    windows = tiny_variant(tmp_path / "windows", "mistral-window")
    with pytest.raises(ConfigError, match="attends to all positions, but the model attends to 8, so earlier blocks"):
        _load(windows, tiny_checkpoint(tmp_path / "all"))
    _load(windows, windows)


def test_a_missing_draft_model_is_named_as_such(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="draft_model: no model"):
        _load(model, tmp_path / "none")


def test_the_revision_of_a_draft_model_reaches_its_source(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    _load(model, model, draft_revision="v2")
    assert [record.message for record in caplog.records if "revision" in record.message] == [
        f"revision v2 has no effect: {model} is not from the hub"
    ]


def test_a_block_has_the_bytes_of_both_models(model: Path, tmp_path: Path) -> None:
    draft = tiny_checkpoint(tmp_path, num_hidden_layers=1)
    (alone,) = load_stages(stage_config(model))
    (both,) = load_stages(stage_config(model, speculation="draft", draft_model=str(draft)))
    assert both.kv.block_bytes == alone.kv.block_bytes * 3 // 2  # two layers and one layer of the same size
    assert alone.weight_bytes < both.weight_bytes < 2 * alone.weight_bytes
    first, last = load_stages(stage_config(model, 2, speculation="draft", draft_model=str(draft)))
    assert (first.draft, last.draft is not None) == (None, True), "only the rank that samples has the draft model"


def test_the_hidden_states_and_logits_of_the_model_need_memory_while_the_draft_model_computes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = 3 << 20
    monkeypatch.setattr(library_computation, "free_memory_bytes", lambda: free_bytes)
    changes = {"num_kv_blocks": None, "max_model_len": 64, "max_num_batched_tokens": 512, "max_num_seqs": 64}
    (rank,) = load_stages(stage_config(model, speculation="draft", draft_model=str(model), **changes))
    step = LargestStep(num_tokens=512, num_rows=64, context_len=64)
    of_model = rank.loaded.step_bytes(step).most
    assert rank.draft is not None
    assert rank.draft.step_bytes(step).most == of_model, "the same model"
    # Each of the 512 hidden states has 64 float32 numbers. For 64 of them there is a copy, and 256 logits.
    held = 4 * (512 * 64 + 64 * (64 + 256))
    assert with_draft_model(StepBytes(usual=1, most=7), StepBytes(usual=2, most=5), 3) == StepBytes(usual=5, most=10)
    assert of_model + held > free_bytes // 2, "the memory of the step decides the number of blocks"
    assert rank.kv.num_blocks == (free_bytes - of_model - held) // rank.kv.block_bytes


def _slot(number: int, prompt: tuple[int, ...], blocks: tuple[int, ...]) -> NewSlot:
    return NewSlot(
        slot=number,
        request_id="abc"[number],
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        block_table=blocks,
        params=GREEDY,
        eos_token_ids=(),
    )


def _begin(
    stages: StagesInARow, num_prompt: int, num_blocks: int, num_proposals: int | None, epoch: int = EPOCH
) -> StepResult:
    """The step of a prompt in slot 0."""
    new = _slot(0, tuple(range(16, 16 + num_prompt)), tuple(range(num_blocks)))
    step = SlotStep(slot=0, start=0, num_tokens=num_prompt, samples=True, num_proposals=num_proposals)
    return stages.run(StepPlan(step_id=1, epoch=epoch, new_slots=(new,), slots=(step,)))


@pytest.mark.parametrize(("num_prompt", "num_proposed"), [(12, 4), (14, 2), (15, 1), (16, 0)])
def test_a_proposal_ends_where_the_slot_has_no_block(model: Path, num_prompt: int, num_proposed: int) -> None:
    # The sampled token has position `num_prompt`. The KV of the last proposed token is not computed.
    result = _begin(_load(model, model), num_prompt, num_blocks=1, num_proposals=4)
    assert BLOCK_SIZE == 16
    assert sum(len(proposal.token_ids) for proposal in result.proposals) == num_proposed


def test_a_proposal_ends_at_the_draft_models_longest_context(model: Path, tmp_path: Path) -> None:
    draft = tiny_checkpoint(tmp_path, max_position_embeddings=8)
    stages = _load(model, draft)
    (proposal,) = _begin(stages, 5, num_blocks=1, num_proposals=6).proposals
    assert len(proposal.token_ids) == 3  # 5 tokens and the sampled one, and two proposed tokens with KV
    assert _begin(_load(model, draft), 8, num_blocks=1, num_proposals=6).proposals == ()


class _Watched:
    """A draft model's computation that gives no token for some slots, fails, and counts cleared blocks."""

    def __init__(self, stages: StagesInARow, broken: set[str] | None = None) -> None:
        draft_model = stages.draft_model
        self._computation = draft_model._computation
        draft_model._computation = self
        self.broken = broken or set()
        self.fails_in: set[str] = set()  # names of functions that raise
        self.cleared: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._computation, name)

    def sample(self, logits_NV: Any, slots: list[Slot]) -> list[int | None]:
        ids = self._computation.sample(logits_NV, slots)
        return [None if slot.request_id in self.broken else token for slot, token in zip(slots, ids, strict=True)]

    def forward(self, *arguments: Any) -> Any:
        if "forward" in self.fails_in:
            raise MemoryError("no memory for a step")
        return self._computation.forward(*arguments)

    def clear_blocks(self, block_ids: tuple[int, ...]) -> None:
        if "clear_blocks" in self.fails_in:
            raise RuntimeError("cannot clear")
        self.cleared += block_ids
        self._computation.clear_blocks(block_ids)


def _decode(slot: int, start: int, token_id: int, num_proposals: int | None = 3, **other: Any) -> SlotStep:
    return SlotStep(
        slot=slot,
        start=start,
        num_tokens=1,
        new_token_ids=(token_id,),
        samples=True,
        num_proposals=num_proposals,
        **other,
    )


def test_logits_that_are_not_finite_end_the_proposals_of_their_slot_and_its_blocks_are_cleared(model: Path) -> None:
    stages = _load(model, model)
    computation = _Watched(stages, {"a"})
    result = _begin(stages, 10, num_blocks=2, num_proposals=3)
    assert (result.proposals, result.corrupt_slots, result.dirty_slots) == ((), (), ())
    assert computation.cleared == [0, 1]
    token_id = result.sampled[0].token_id
    computation.broken.clear()
    result = stages.run(StepPlan(step_id=2, epoch=EPOCH, slots=(_decode(0, 10, token_id),)))
    assert (len(result.sampled), result.proposals) == (1, ()), "the slot is broken until it is freed"


def test_a_shared_block_that_is_cleared_is_not_whole_even_if_another_slot_has_computed_it(model: Path) -> None:
    stages = _load(model, model)
    _begin(stages, 16, num_blocks=2, num_proposals=None)  # the draft model leaves the prompt out
    ids = tuple(range(16, 32))
    slots = tuple(_slot(number, (*ids, 40 + number), (0, 2 + number)) for number in (1, 2))
    steps = tuple(SlotStep(slot=number, start=16, num_tokens=1, samples=True, num_proposals=1) for number in (1, 2))
    computation = _Watched(stages, {"b"})
    result = stages.run(StepPlan(step_id=2, epoch=EPOCH, freed_slots=(0,), new_slots=slots, slots=steps))
    assert [proposal.slot for proposal in result.proposals] == [2]
    assert computation.cleared == [0, 3]
    assert not stages.draft_model.kv.is_whole[0], "slot 2 has computed the block, and slot 1 has cleared it"
    assert result.draft_work is not None
    assert result.draft_work.whole_blocks == ()


def test_blocks_that_may_hold_a_nan_are_cleared_in_both_caches(model: Path) -> None:
    stages = _load(model, model)
    computation = _Watched(stages)
    new = _slot(0, (16, 17), (4,))
    step = SlotStep(slot=0, start=0, num_tokens=2, samples=True)
    stages.run(StepPlan(step_id=1, epoch=EPOCH, new_slots=(new,), cleared_blocks=(4,), slots=(step,)))
    assert computation.cleared == [4]


@pytest.mark.parametrize("fails_in", ["forward", "clear_blocks"])
def test_a_rank_whose_draft_model_fails_answers_without_drafts(
    model: Path, caplog: pytest.LogCaptureFixture, fails_in: str
) -> None:
    stages = _load(model, model)
    computation = _Watched(stages)
    result = _begin(stages, 10, num_blocks=2, num_proposals=3)
    assert len(result.proposals[0].token_ids) == 3
    computation.fails_in.add(fails_in)
    sampled = []
    for start in range(10, 13):
        step = _decode(0, start, result.sampled[0].token_id)
        result = stages.run(StepPlan(step_id=2, epoch=EPOCH, cleared_blocks=(5,), slots=(step,)))
        assert (result.proposals, result.draft_work) == ((), None)
        sampled.append(result.sampled[0].token_id)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.message == "the draft model has failed; answers continue without drafts until the ranks restart"
    assert record.exc_info is not None, "the log has the traceback"
    alone = StagesInARow(load_stages(stage_config(model)))
    result = _begin(alone, 10, num_blocks=2, num_proposals=None)
    expected = []
    for start in range(10, 13):
        step = _decode(0, start, result.sampled[0].token_id, None)
        result = alone.run(StepPlan(step_id=2, epoch=EPOCH, slots=(step,)))
        expected.append(result.sampled[0].token_id)
    assert sampled == expected


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_whose_draft_model_fails_in_the_warm_up_does_not_start(model: Path, fails: bool) -> None:
    stages = _load(model, model)
    if fails:
        _Watched(stages).fails_in.add("forward")
    with pytest.raises(ConfigError, match=r"no memory for a step.*choose another") if fails else nullcontext():
        warm_up(stages._runners[-1], EPOCH)
    assert stages.has_no_draft_model == fails


def test_a_draft_model_that_fails_in_the_warm_up_of_a_recovery_costs_its_proposals_alone(model: Path) -> None:
    epoch = FIRST_EPOCH + 1
    stages = _load(model, model, epoch)
    _Watched(stages).fails_in.add("forward")
    warm_up(stages._runners[-1], epoch)
    assert stages.has_no_draft_model
    result = _begin(stages, 10, num_blocks=2, num_proposals=3, epoch=epoch)
    assert (len(result.sampled), result.proposals) == (1, ())


@pytest.mark.parametrize("is_appended", [False, True])
def test_a_block_with_a_new_owner_is_computed_anew(model: Path, is_appended: bool) -> None:
    """`is_appended`: a later step appends the block to the table of its owner, and the draft model knows the rest."""
    ids = tuple(range(60, 93))
    stages = _load(model, model, num_kv_blocks=6)
    _begin(stages, 16, num_blocks=1, num_proposals=0)  # the draft model computes block 0 for another slot
    steps = [
        SlotStep(slot=1, start=0, num_tokens=16, num_proposals=0 if is_appended else None),
        SlotStep(slot=1, start=16, num_tokens=16, new_block_ids=(0 if is_appended else 4,), num_proposals=None),
    ]
    owner = _slot(1, ids[:32], (3 if is_appended else 0,))
    stages.run(StepPlan(step_id=2, epoch=EPOCH, freed_slots=(0,), new_slots=(owner,), slots=tuple(steps[:1])))
    stages.run(StepPlan(step_id=3, epoch=EPOCH, slots=tuple(steps[1:])))
    table = (3, 0, 5) if is_appended else (0, 4, 5)
    last = SlotStep(slot=2, start=32, num_tokens=1, samples=True, num_proposals=3)
    result = stages.run(StepPlan(step_id=4, epoch=EPOCH, new_slots=(_slot(2, ids, table),), slots=(last,)))
    assert result.proposals[0].token_ids == _next_ids(stages, result.sampled[0].token_id)


def _next_ids(stages: StagesInARow, token_id: int) -> tuple[int, ...]:
    """The three tokens that slot 2 gets after `token_id`, from position 33 on."""
    found: list[int] = [token_id]
    for start in range(33, 36):
        step = SlotStep(slot=2, start=start, num_tokens=1, new_token_ids=(found[-1],), samples=True)
        found.append(stages.run(StepPlan(step_id=5, epoch=EPOCH, slots=(step,))).sampled[0].token_id)
    return tuple(found[1:])


def test_a_sequence_that_has_lagged_behind_catches_up_in_several_steps(model: Path) -> None:
    stages = _load(model, model, max_num_batched_tokens=70)
    stages.draft_model._clock = itertools.count().__next__  # each part of a step seems to take 1 s
    result = _begin(stages, 70, num_blocks=6, num_proposals=None)
    proposals: list[tuple[Proposal, ...]] = []
    works: list[DraftWork | None] = []
    for start in range(70, 73):
        step = _decode(0, start, result.sampled[0].token_id, 2)
        result = stages.run(StepPlan(step_id=2, epoch=EPOCH, slots=(step,)))
        proposals.append(result.proposals)
        works.append(result.draft_work)
    assert [len(each) for each in proposals] == [0, 1, 1], "64 tokens in the first step"
    # The second step catches up with 72 - 64 + 1 tokens, and has another pass for the second proposed token. The third
    # step computes the newest token, because the first proposed token was right.
    assert works == [
        DraftWork(proposal_s=1, catch_up_s=1, num_catch_up_tokens=64, lagging_slots=(0,), whole_blocks=(0, 1, 2, 3)),
        DraftWork(proposal_s=1, num_passes=1, num_served=1, catch_up_s=1, num_catch_up_tokens=9),
        DraftWork(proposal_s=2, num_passes=2, num_served=1),
    ]


def test_a_sequence_that_lags_behind_far_takes_no_proposals_from_others(model: Path) -> None:
    stages = _load(model, model, max_num_batched_tokens=70)
    first = _begin(stages, 70, num_blocks=5, num_proposals=None).sampled[0].token_id
    new = _slot(1, (20, 21, 22), (5,))
    prompt = SlotStep(slot=1, start=0, num_tokens=3, samples=True, num_proposals=0)
    second = stages.run(StepPlan(step_id=2, epoch=EPOCH, new_slots=(new,), slots=(prompt,))).sampled[0].token_id
    plan = StepPlan(step_id=3, epoch=EPOCH, slots=(_decode(0, 70, first), _decode(1, 3, second)))
    result = stages.run(plan)
    assert [(proposal.slot, len(proposal.token_ids)) for proposal in result.proposals] == [(1, 3)]
    assert result.draft_work is not None
    assert (result.draft_work.lagging_slots, result.draft_work.num_catch_up_tokens) == ((0,), 64)


def test_a_prompt_that_is_longer_than_the_draft_models_context_is_left_out(model: Path, tmp_path: Path) -> None:
    stages = _load(model, tiny_checkpoint(tmp_path, max_position_embeddings=8))
    new = _slot(0, tuple(range(16, 28)), (0,))
    chunk = SlotStep(slot=0, start=0, num_tokens=4, num_proposals=0)
    result = stages.run(StepPlan(step_id=1, epoch=EPOCH, new_slots=(new,), slots=(chunk,)))
    assert result.draft_work is not None
    assert result.draft_work.num_catch_up_tokens == 0


def test_a_block_behind_the_window_belongs_to_its_new_owner() -> None:
    kv = DraftedKv(4, window=16)
    tables = BlockTables()
    old = _slot(0, tuple(range(20)), (0, 1))
    tables.begin(0, old.block_table)
    chunk = SlotStep(slot=0, start=0, num_tokens=14)
    kv.apply(StepPlan(step_id=1, epoch=EPOCH, new_slots=(old,), slots=(chunk,)), tables)
    kv.computed(0, 14, tables.of(0))
    kv.of(0).ahead = (14, 15, 16)  # the slot gets these tokens, but no proposal for a long time
    tables.append(0, (2,))
    decode = SlotStep(slot=0, start=40, num_tokens=1, new_block_ids=(2,))
    owner = _slot(1, (7,), (0,))  # the window has passed block 0, so the block gets another owner
    tables.begin(1, owner.block_table)
    first = SlotStep(slot=1, start=0, num_tokens=1)
    kv.apply(StepPlan(step_id=2, epoch=EPOCH, new_slots=(owner,), slots=(decode, first)), tables)
    kv.follow(0, np.arange(42), 40, 42, tables.of(0))
    assert (kv.of(0).num_computed, kv.of(0).ahead) == (16, ())
    assert not kv.is_whole[0]


def test_a_block_that_is_loaded_from_host_memory_has_no_kv_of_the_draft_model() -> None:
    kv, tables, new = DraftedKv(4, window=None), BlockTables(), _slot(0, tuple(range(40)), (0, 1, 2))
    kv.is_whole[[0, 1]] = True
    tables.begin(0, new.block_table)
    steps = (SlotStep(slot=0, start=32, num_tokens=8),)
    kv.apply(StepPlan(step_id=1, epoch=EPOCH, host_loads=((5, 1),), new_slots=(new,), slots=steps), tables)
    assert kv.of(0).num_computed == 16, "the draft model computes the tokens from the loaded block on"

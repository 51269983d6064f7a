"""Prompts of embeddings on one rank: the embeddings of token ids give the tokens of these ids.

Left out: several ranks and their deaths (test_stage_processes.py, test_shard_processes.py), HTTP
(test_front_prompt_embeds.py), and the files that clients send (test_saved_tensor.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from rayloom_engine.core.block_hash import next_block_hash
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.embeds import MAX_EMBEDS_BYTES, EmbeddedPrompt, Embeds, check_embeds, most_step_rows
from rayloom_engine.core.engine import Engine
from rayloom_engine.core.sequence import Sequence as EngineSequence
from rayloom_engine.core.step import NewSlot, SampledToken, StepPlan, StepResult
from rayloom_engine.errors import ConfigError, RequestError
from rayloom_engine.models.embeds_support import check_takes_embeds
from rayloom_engine.models.given_rows import EmbedsAt, GivenRows, given_rows
from rayloom_engine.models.measured_shape import MeasuredShape
from rayloom_engine.worker.cpu_backend import VARIABLE
from rayloom_engine.worker.cpu_sampler import _penalised
from rayloom_engine.worker.sampler import adjust_logits
from rayloom_engine.worker.slots import Slot
from rayloom_engine.worker.token_counts import TokenCounts
from rt_embeds import EmbeddingRows, prompt_of
from rt_one_rank import OneRank, greedy
from rt_scheduler import make_scheduler, make_sequence
from rt_stages import StagesInARow, load_stages, make_engine, stage_config
from rt_tiny import tiny_variant

PROMPTS = [[7 + (5 * index + 3 * position) % 200 for position in range(3 + 18 * index)] for index in range(4)]
NUM_TOKENS = 12


class Model:
    """A model in this process, and prompts of its embeddings."""

    def __init__(self, folder: Path, variant: str) -> None:
        self.folder = folder
        tiny_variant(folder, variant)
        # Only the embedding module of Gemma, as transformers has it, scales the rows of the matrix itself.
        scale = 64**0.5 if variant.startswith("gemma") else 1.0
        self.embedding = EmbeddingRows(folder, scale)
        self.rank = OneRank(folder, enable_prompt_embeds=True)
        self.expected = greedy(self.rank.engine(), PROMPTS, NUM_TOKENS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """On the C library."""
    return Model(tmp_path_factory.mktemp("qwen2"), "qwen2-some-windows")


@pytest.fixture(
    scope="module", params=["library granite", "library gemma2", "torch qwen3", "torch granite", "torch gemma2"]
)
def other_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    backend, variant = request.param.split()
    with pytest.MonkeyPatch.context() as patch:
        if backend == "torch":
            patch.setenv(VARIABLE, "torch")
        model = Model(tmp_path_factory.mktemp(variant), variant)
    assert ("C library" in model.rank.loaded.arithmetic) == (backend == "library")
    return model


def test_every_kind_of_model_computes_the_tokens_of_the_ids(other_model: Model) -> None:
    prompts = [other_model.embedding.prompt(ids) for ids in PROMPTS]
    assert greedy(other_model.rank.engine(num_step_tokens=16), prompts, NUM_TOKENS) == other_model.expected


def test_alone_and_beside_prompts_of_ids_the_tokens_are_the_same(model: Model) -> None:
    for ids, expected in zip(PROMPTS, model.expected, strict=True):
        assert greedy(model.rank.engine(), [model.embedding.prompt(ids)], NUM_TOKENS) == [expected]
    mixed = [ids if index % 2 else model.embedding.prompt(ids) for index, ids in enumerate(PROMPTS)]
    assert greedy(model.rank.engine(), mixed, NUM_TOKENS) == model.expected


def test_chunks_and_preemption_change_no_token(model: Model) -> None:
    engine = model.rank.engine(num_step_tokens=5)
    assert greedy(engine, [model.embedding.prompt(ids) for ids in PROMPTS], NUM_TOKENS) == model.expected
    prompts = [ids[:15] for ids in PROMPTS[1:]]
    engine = model.rank.engine(num_blocks=6)  # each prompt has one block, and with its answer three
    tokens = greedy(engine, [model.embedding.prompt(ids) for ids in prompts], 30)
    assert engine.scheduler.counters.num_preemptions > 0
    assert tokens == greedy(model.rank.engine(), prompts, 30)


def test_a_resumed_sequence_continues_exactly(model: Model) -> None:
    """The front has the tokens received so far and the embeddings, and submits both again."""
    prompts = [model.embedding.prompt(ids) for ids in PROMPTS]
    received = [expected[: 3 * index] for index, expected in enumerate(model.expected)]
    assert greedy(model.rank.engine(), prompts, NUM_TOKENS, received) == model.expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_embeddings_are_the_values_that_they_store(model: Model, dtype: str) -> None:
    rows_TD = model.embedding.of(PROMPTS[2])
    narrow = prompt_of(rows_TD, dtype)
    wide = prompt_of(rows_TD.to(getattr(torch, dtype)).float())
    assert greedy(model.rank.engine(), [narrow], NUM_TOKENS) == greedy(model.rank.engine(), [wide], NUM_TOKENS)
    found = given_rows([EmbedsAt(4, narrow.embeds), EmbedsAt(50, narrow.embeds.rows(0, 1))])
    assert found is not None
    assert found.rows_G.tolist() == [*range(4, 4 + len(PROMPTS[2])), 50]
    assert found.embeds_GD.dtype == np.float32
    assert np.array_equal(found.embeds_GD[:-1], rows_TD.to(getattr(torch, dtype)).float().numpy())


def test_all_choices_of_a_prompt_are_forks_of_the_first(model: Model) -> None:
    tokens = []
    for prompt in (tuple(PROMPTS[3]), model.embedding.prompt(PROMPTS[3])):
        engine = model.rank.engine(num_step_tokens=16)
        params = [DecodingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=seed) for seed in range(3)]
        for seed, each in enumerate(params):
            fork_of = None if seed == 0 else "0"
            engine.add(EngineSequence(request_id=str(seed), prompt_ids=prompt, params=each, fork_of=fork_of))
        tokens.append(_run(engine))
        assert engine.scheduler.counters.prefix_hits == 2 * (len(PROMPTS[3]) - 1), (
            "the forks computed one position each"
        )
    assert tokens[0] == tokens[1]
    assert len({tuple(each) for each in tokens[0].values()}) == 3


def test_equal_embeddings_share_blocks_and_others_never_do(model: Model) -> None:
    ids = PROMPTS[3]
    prompt = model.embedding.prompt(ids)
    other = model.embedding.prompt([*ids[:20], 3, *ids[21:]])  # the first block of 16 positions is equal
    engine = model.rank.engine()
    expected = [greedy(model.rank.engine(), [each], 1)[0] for each in (prompt, other, [0] * len(ids))]
    hits = []
    tokens = []
    for each in (prompt, prompt, other, [0] * len(ids), prompt_of(model.embedding.of(ids), "bfloat16")):
        before = engine.scheduler.counters.prefix_hits
        tokens += greedy(engine, [each], 1)
        hits.append(engine.scheduler.counters.prefix_hits - before)
    assert hits == [0, 48, 16, 0, 0]
    assert tokens[:4] == [expected[0], *expected]


def _run(engine: Engine) -> dict[str, list[int]]:
    ids: dict[str, list[int]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            ids.setdefault(output.sequence_id, []).extend(output.token_ids)
        engine.scheduler.check_integrity()
    return ids


def _embedded(num: int, first: int = 0, width: int = 2) -> EmbeddedPrompt:
    """Embeddings whose element i is first + i."""
    return EmbeddedPrompt(Embeds("float32", width, np.arange(first, first + num * width, dtype="<f4").tobytes()))


def test_a_hash_covers_embeddings_their_type_and_the_blocks_before() -> None:
    first, second = _embedded(12), _embedded(12, first=1)
    third = EmbeddedPrompt(Embeds("float32", 2, first.embeds.data[:64] + second.embeds.data[64:]))
    wide = EmbeddedPrompt(msgspec.structs.replace(first.embeds, dtype="bfloat16", width=4))
    chains = [make_sequence("a", each).hashes(3, 4) for each in (first, _embedded(12), second, third, wide, [0] * 12)]
    assert chains[0] == chains[1]
    assert chains[3][:2] == chains[0][:2] and chains[3][2] not in (chains[0][2], chains[2][2])
    assert len({each for chain in chains for each in chain}) == 3 + 3 + 1 + 3 + 3


def test_a_block_with_the_end_of_the_embeddings_and_generated_tokens_depends_on_both() -> None:
    sequences = [make_sequence("a", _embedded(6, first)) for first in (0, 1)]
    for sequence in sequences:
        sequence.token_ids += [8, 9]
    tail = sequences[0].prompt_ids.embeds.rows(4, 6)
    parent = next_block_hash([], (0,) * 4, b"", b"", sequences[0].prompt_ids.embeds.rows(0, 4).digest())
    assert sequences[0].hashes(2, 4)[1] == next_block_hash([parent], (0, 0, 8, 9), b"", b"", tail.digest())
    assert sequences[0].hashes(2, 4)[1] != sequences[1].hashes(2, 4)[1]


def test_a_plan_has_only_the_rows_that_its_step_computes() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    prompt = _embedded(6)
    scheduler.add(make_sequence("a", prompt, max_tokens=3))
    plans = []
    while (plan := scheduler.schedule()) is not None:
        plans.append(plan)
        scheduler.update(_result(plan))
    assert plans[0].new_slots[0].has_embeds
    assert [step.embeds for plan in plans for step in plan.slots] == [
        prompt.embeds.rows(0, 4),
        prompt.embeds.rows(4, 6),
        None,
        None,
    ]


def _result(plan: StepPlan) -> StepResult:
    sampled = tuple(SampledToken(step.slot, 5) for step in plan.slots if step.samples)
    return StepResult(step_id=plan.step_id, epoch=plan.epoch, sampled=sampled)


@pytest.mark.parametrize("backend", ["library", "torch"])
def test_only_the_first_stage_converts_embeddings(model: Model, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "torch":
        monkeypatch.setenv(VARIABLE, "torch")
    stages = StagesInARow(load_stages(stage_config(model.folder, 2, enable_prompt_embeds=True)))
    conversions: list[int] = []

    def counted(parts: Sequence[EmbedsAt]) -> GivenRows[npt.NDArray[Any]] | None:
        conversions.extend(part.embeds.num_rows for part in parts)
        return given_rows(parts)

    monkeypatch.setattr(f"rayloom_engine.worker.{backend}_computation.given_rows", counted)
    assert greedy(make_engine(stages), [model.embedding.prompt(PROMPTS[1])], 1) == [model.expected[1][:1]]
    assert conversions == [len(PROMPTS[1])]


def test_prompts_with_other_embeddings_are_not_one_prompt() -> None:
    """Their placeholders are equal, so only the embeddings tell them apart."""
    first, second = _embedded(3), _embedded(3, first=1)
    assert tuple(first) == tuple(second) == (0, 0, 0)
    assert first == _embedded(3) and hash(first) == hash(_embedded(3))
    assert first != second
    assert first != (0, 0, 0)
    assert not make_sequence("a", first).has_prompt_of(make_sequence("b", second))
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", first))
    fork = make_sequence("b", second, fork_of="a")
    scheduler.add(fork)
    assert fork.prompt_ids is second
    equal = make_sequence("c", _embedded(3), fork_of="a")
    scheduler.add(equal)
    assert equal.prompt_ids is first and equal.embeds is first.embeds, "the rows are kept once"


@pytest.mark.parametrize(
    ("embeds", "hidden_size", "sentence"),
    [
        (_embedded(3).embeds, 0, "start the server with --enable-prompt-embeds"),
        (_embedded(3).embeds, 4, "rows of 2 elements, and the hidden size of this model is 4"),
        (Embeds("float32", 0, bytes(8)), 2, "rows of 0 elements"),
        (Embeds("float32", 2, b""), 2, "has no rows"),
        (Embeds("float16", 2, bytes(7)), 2, "has 7 bytes, and a row has 4"),
        (Embeds("float32", 2**22, bytes(9 * 2**24)), 2**22, "at most 134217728 are allowed"),
    ],
)
def test_a_core_refuses_embeddings_that_it_cannot_compute(embeds: Embeds, hidden_size: int, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence) as caught:
        check_embeds(embeds, hidden_size)
    assert caught.value.field == "prompt_embeds"
    check_embeds(None, 0)


def test_a_step_of_embeddings_fits_into_a_message() -> None:
    assert most_step_rows(8192) == 4096
    assert most_step_rows(8192) * 8192 * 4 == MAX_EMBEDS_BYTES


def test_transformers_modules_are_refused_before_weights_are_read(model: Model) -> None:
    check_takes_embeds(model.rank.shape)
    measured = object.__new__(MeasuredShape)
    object.__setattr__(measured, "architecture", "CohereForCausalLM")
    with pytest.raises(ConfigError, match=r"enable_prompt_embeds: .* the native backend.*CohereForCausalLM; remove"):
        check_takes_embeds(measured)


def _slot(generated: Sequence[int], *, has_embeds: bool) -> Slot:
    return Slot(
        NewSlot(
            slot=0,
            request_id="a",
            token_ids=(0, 0, 0, *generated),
            num_prompt_tokens=3,
            has_embeds=has_embeds,
            block_table=(0,),
            params=DecodingParams(max_tokens=9, temperature=0.0, repetition_penalty=2.0),
            eos_token_ids=(),
        )
    )


@pytest.mark.parametrize("generated", [(), (2, 4, 2)])
def test_no_penalty_counts_a_placeholder(generated: tuple[int, ...]) -> None:
    """Token 0 stands at every position of the prompt, and only a prompt of ids has it."""
    expected = [1.0 if token in generated else 2.0 for token in range(6)]
    for has_embeds in (True, False):
        slot = _slot(generated, has_embeds=has_embeds)
        expected[0] = 2.0 if has_embeds else 1.0
        logits_V = torch.full((6,), 2.0)
        adjust_logits(logits_V, slot)
        assert logits_V.tolist() == expected
        token_ids, penalty = _penalised(slot)
        seen = {int(each) for each in token_ids[: slot.num_tokens]} if penalty != 1.0 else set()
        assert seen == {token for token in range(6) if expected[token] == 1.0}
        places, _ = TokenCounts(6, torch.device("cpu")).additions([slot])
        assert {int(place) % 6 for place in places} == seen

"""The operator counts as many bytes for a draft model as the engine needs on the rank that samples."""

import json
from pathlib import Path

import pytest

from rayloom_engine.config import BLOCK_SIZE, EngineConfig
from rayloom_engine.models.checkpoint.source import ResolvedModel
from rayloom_engine.models.draft_facts import DraftCosts, DraftFacts, draft_facts
from rayloom_engine.models.inspection import MAX_FACTS_BYTES, inspect_model
from rayloom_engine.models.inspection import facts as engine_facts
from rayloom_engine.models.largest_step import LargestStep, StepBytes, held_bytes, with_draft_model
from rayloom_engine.models.quantised.amounts import weight_bytes
from rayloom_engine.models.step_memory import step_bytes
from rayloom_operator.api import draft_facts as ours
from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.resolve.question import MAX_DRAFTED
from rayloom_operator.resolve.rank_memory import DraftRoom, drafting_step_bytes
from rt_facts import WELL_KNOWN, shape_of

BUILTIN = "builtin://smollm2-135m"


def shape_named(name):
    return inspect_model(name, None)[1] if name == BUILTIN else shape_of(name)


def facts_of(name, draft=None):
    """The facts of a model, as the operator reads them. `draft`: facts of a draft model in the same document."""
    resolved = ResolvedModel(path=Path(), source=name, commit=None)
    return ModelFacts.model_validate_json(engine_facts(resolved, shape_named(name), draft).text())


def draft_of(name):
    """The engine's facts of a draft model, as the operator reads them beside those of a model."""
    return facts_of(BUILTIN, draft_facts(None, shape_named(name))).draft


@pytest.mark.parametrize(("theirs", "read"), [(DraftCosts, ours.DraftCosts), (DraftFacts, ours.DraftFacts)])
def test_the_operator_reads_every_fact_of_a_draft_model(theirs, read):
    assert set(theirs.model_fields) == set(read.model_fields)


@pytest.mark.parametrize("name", [BUILTIN, *WELL_KNOWN, "gpt-oss-20b"])
def test_facts_of_a_draft_model_are_those_of_the_same_model_added_up(name):
    assert draft_of(name) == facts_of(name).as_draft()


@pytest.mark.parametrize("name", [BUILTIN, *WELL_KNOWN])
def test_weights_and_kv_are_what_the_engine_allocates(name):
    shape, costs = shape_named(name), draft_of(name).costs

    assert costs.weights.bytes_at(0, 2) == shape.weight_bytes(2)
    assert costs.weights.bytes_at(0, 2, keeps_quantised=True) == weight_bytes(shape, 2)
    assert costs.kv.bytes_at(0, 2) * BLOCK_SIZE == BLOCK_SIZE * shape.kv_bytes_per_token(2)


@pytest.mark.parametrize(("name", "draft"), [("qwen3-8b", "qwen3-0.6b"), ("qwen3-0.6b", "qwen3-8b")])
@pytest.mark.parametrize("num_rows", [8, 64])
def test_a_step_takes_what_the_engine_keeps_free_for_it(name, draft, num_rows):
    shape, of_draft = shape_named(name), shape_named(draft)
    step = LargestStep(num_tokens=512, num_rows=num_rows, context_len=4096)

    def alone(shape):
        return step_bytes(shape, 1, element_bytes=2, num_tokens=512, num_seqs=num_rows)

    held = held_bytes(step, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size)
    both = [StepBytes(usual=alone(each), most=alone(each)) for each in (shape, of_draft)]
    costs = draft_of(draft).costs
    room = DraftRoom(
        weights=0,
        kv_block=0,
        token_bytes=costs.step.token.bytes_at(0, 2),
        sequence_bytes=costs.step.sequence_bytes,
        num_drafted=7,
    )
    sizes = {"hidden_size": shape.hidden_size, "vocab_size": shape.vocab_size}

    found = drafting_step_bytes(alone(shape), room, num_tokens=512, num_rows=num_rows, **sizes)
    assert found == with_draft_model(*both, held).usual


def test_the_number_of_draft_tokens_is_the_engines():
    assert EngineConfig().num_speculative_tokens == MAX_DRAFTED


@pytest.mark.parametrize("name", [BUILTIN, *WELL_KNOWN, "gpt-oss-20b"])
def test_facts_of_a_model_and_a_draft_model_fit_into_a_termination_message(name):
    resolved = ResolvedModel(path=Path(), source=name, commit="c" * 40)
    text = engine_facts(resolved, shape_named(name), draft_facts("d" * 40, shape_named(BUILTIN))).text()

    assert len(text.encode()) <= MAX_FACTS_BYTES
    assert json.loads(text)["costs"]["tensor"] == list(facts_of(name).costs.tensor), "no number of ranks is left out"

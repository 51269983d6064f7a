"""The operator reads the termination message of `rayloom-engine inspect`."""

import json
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings

from rayloom_engine.errors import ModelError, ModelFault
from rayloom_engine.models.checkpoint.source import ResolvedModel
from rayloom_engine.models.costs import AdapterCosts, Amounts, Costs, LayerKind, StepCosts
from rayloom_engine.models.inspection import Inspection, Shape, failure, inspect_model
from rayloom_engine.models.inspection import facts as engine_facts
from rayloom_operator.api import costs as ours
from rayloom_operator.api.model_facts import ModelFacts, ModelShape
from rayloom_operator.api.status import stored_model
from rayloom_operator.decide.inspection import _REASONS, _VERSIONS
from rt_facts import shapes
from rt_inspection import COMMIT, ended, look
from rt_shapes import SMOLLM2


def test_the_operator_reads_every_size_that_the_engine_leaves():
    assert set(Shape.model_fields) == set(ModelShape.model_fields)


@pytest.mark.parametrize("part", [Costs, Amounts, LayerKind, StepCosts, AdapterCosts], ids=lambda part: part.__name__)
def test_the_operator_reads_every_part_of_the_costs(part):
    theirs = getattr(ours, part.__name__).model_fields
    # In a status, a field with an explicit alias has this alias as its name. Every other field has its own name in
    # camelCase.
    read = {field.alias if field.alias_priority == 2 else name for name, field in theirs.items()}

    assert read == set(part.model_fields)


def test_the_operator_reads_the_version_that_the_engine_writes():
    assert Inspection().version in _VERSIONS


def _limit(field):
    return next((part.le for part in field.metadata if hasattr(part, "le")), float("inf"))


@pytest.mark.parametrize("name", [name for name, field in Shape.model_fields.items() if field.annotation is int])
def test_what_the_engine_lets_through_the_operator_takes(name):
    assert 1 < _limit(Shape.model_fields[name]) <= _limit(ModelShape.model_fields[name])


def test_the_engine_lets_no_more_parameters_through_than_the_operator_takes():
    assert _limit(Inspection.model_fields["num_parameters"]) <= _limit(ModelFacts.model_fields["num_parameters"])


def test_facts_arrive():
    words = engine_facts(*inspect_model("builtin://smollm2-135m", None)).text()

    assert ModelFacts.model_validate_json(words) == SMOLLM2
    assert look(ended(words)).facts == SMOLLM2


@pytest.mark.parametrize("fault", get_args(ModelFault))
def test_a_fault_arrives_with_its_sentence(fault):
    words = failure(ModelError("it is so", fault)).text()
    verdict = look(ended(words, code=78)).verdict

    assert (verdict.reason, json.loads(words)["error"]["reason"]) == (_REASONS[fault], fault)
    assert verdict.message.startswith("it is so.")


@settings(deadline=None, print_blob=True)
@given(shapes())
def test_the_operator_takes_the_facts_of_any_model_that_the_engine_takes(shape):
    text = engine_facts(ResolvedModel(path=Path(), source="", commit=COMMIT), shape).text()
    seen = look(ended(text))

    assert (seen.verdict, seen.facts.num_parameters) == (None, shape.num_parameters)
    assert seen.facts.costs.num_layers == shape.num_layers
    assert seen.facts.costs.attention_span == shape.attention_span == seen.facts.shape.attention_span
    # The facts can be stored in the status and read again.
    document = json.loads(json.dumps(seen.model.model_dump(mode="json", by_alias=True, exclude_none=True)))
    assert stored_model({"model": document}) == seen.model

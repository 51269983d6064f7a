"""What `rayloom-engine inspect` leaves is what the operator reads."""

import json
from typing import get_args

import pytest

from rayloom_engine.errors import ModelError, ModelFault
from rayloom_engine.models.inspection import Shape, failure, inspect_model
from rayloom_engine.models.inspection import facts as engine_facts
from rayloom_operator.inspection import _REASONS
from rayloom_operator.model_facts import BUILTIN_FACTS, ModelFacts, ModelShape
from rt_inspection import ended, look


def test_the_operator_reads_every_size_that_the_engine_leaves():
    assert set(Shape.model_fields) == set(ModelShape.model_fields)


def test_facts_arrive():
    words = engine_facts(*inspect_model("builtin://smollm2-135m", None)).text()

    assert ModelFacts.model_validate_json(words) == BUILTIN_FACTS["smollm2-135m"]
    assert look(ended(words)).facts == BUILTIN_FACTS["smollm2-135m"]


@pytest.mark.parametrize("fault", get_args(ModelFault))
def test_a_fault_arrives_with_its_sentence(fault):
    words = failure(ModelError("it is so", fault)).text()
    verdict = look(ended(words, code=78)).verdict

    assert (verdict.reason, json.loads(words)["error"]["reason"]) == (_REASONS[fault], fault)
    assert verdict.message.startswith("it is so.")

"""The operator's facts about built-in models are what the engine says of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rayloom_engine.models.checkpoint import limits
from rayloom_operator.api import model_facts
from rayloom_operator.api.model_facts import BUILTIN_FACTS, ModelFacts


@pytest.mark.parametrize("name", BUILTIN_FACTS)
def test_the_facts_of_a_built_in_model_are_what_inspect_says(name):
    command = [Path(sys.executable).parent / "rayloom-engine", "inspect", "--model", f"builtin://{name}"]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)

    assert ModelFacts.model_validate(said) == BUILTIN_FACTS[name]


def test_no_size_that_the_engine_takes_is_refused_by_the_operator():
    ours = ("MAX_LAYERS", "MAX_HEADS", "MAX_WIDTH", "MAX_VOCABULARY", "MAX_POSITIONS", "MAX_PARAMETERS")
    theirs = ("MAX_LAYERS", "MAX_HEADS", "MAX_SIZE", "MAX_VOCAB", "MAX_POSITIONS", "MAX_PARAMETERS")

    assert [getattr(model_facts, name) for name in ours] == [getattr(limits, name) for name in theirs]

"""The facts that come with the operator, and those in examples/, are the facts that the engine computes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rayloom_engine.models.checkpoint import limits
from rayloom_operator.api import costs, model_facts
from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.shipped_facts import shipped_facts
from rt_facts import CONFIGS, load_tool

TOOL = load_tool()
TEXTS = TOOL.files()
# As the models' cards count them.
PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-72b": 72_706_203_648,
}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_the_file_is_current(path):
    written = path.read_text(encoding="utf-8")

    assert written == TEXTS[path], f"{path} is not what inspect says; run: make facts"


def test_no_file_is_left_over():
    assert {path.stem for path in TOOL.EXAMPLES.iterdir()} == set(TOOL.OF_EXAMPLES)
    assert {path.stem for path in CONFIGS.iterdir()} == {*TOOL.PUBLISHED, *TOOL.OF_EXAMPLES} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_configuration_has_the_models_parameters(name):
    assert TOOL.facts_of(name)["num_parameters"] == PARAMETERS[name]


@pytest.mark.parametrize("name", TOOL.BUILTIN)
def test_the_facts_of_a_built_in_model_are_what_inspect_prints(name):
    command = [Path(sys.executable).parent / "rayloom-engine", "inspect", "--model", name]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)

    assert ModelFacts.model_validate_json(json.dumps(said)) == shipped_facts()[name]


def test_no_number_that_the_engine_takes_is_refused_by_the_operator():
    ours = (model_facts.MAX_HEADS, model_facts.MAX_WIDTH, model_facts.MAX_VOCABULARY)
    ours += (costs.MAX_LAYERS, costs.MAX_POSITIONS, costs.MAX_PARAMETERS)
    theirs = ("MAX_HEADS", "MAX_SIZE", "MAX_VOCAB", "MAX_LAYERS", "MAX_POSITIONS", "MAX_PARAMETERS")

    assert list(ours) == [getattr(limits, name) for name in theirs]
    assert costs.MAX_TENSOR == limits.MAX_HEADS

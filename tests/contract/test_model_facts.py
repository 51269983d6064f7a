"""The facts that the operator ships, and the facts in examples/, are those that the engine computes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import write_facts
from published_models import CONFIGS, PUBLISHED
from rayloom_engine.models.checkpoint import limits
from rayloom_operator.api import costs, model_facts
from rayloom_operator.api.model_facts import ModelFacts
from rayloom_operator.api.shipped_facts import builtin_models, published_models
from rt_facts import WELL_KNOWN

RUN = "run: make facts"
# Numbers of parameters according to the models' files.
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
# Models whose sizes the engine computes without torch.
QUICK = [
    name
    for name, model in published_models().items()
    if model.facts is not None and model.facts.shape.model_backend is None
]


def written():
    return json.loads(write_facts.PUBLISHED_FACTS.read_text(encoding="utf-8"))


def test_facts_of_models_with_a_native_decoder_are_current():
    for name in QUICK:
        assert written()[name].items() >= write_facts.outcome_of(name).items(), RUN


@pytest.mark.slow
def test_facts_of_all_published_models_are_current():
    outcomes = {name: write_facts.outcome_of(name) for name in PUBLISHED}

    assert write_facts.PUBLISHED_FACTS.read_text(encoding="utf-8") == write_facts.published_text(outcomes), RUN


def test_facts_of_built_in_models_are_current():
    assert write_facts.BUILTIN_FACTS.read_text(encoding="utf-8") == write_facts.builtin_text(), RUN


@pytest.mark.parametrize("name", write_facts.OF_EXAMPLES)
def test_facts_of_examples_are_current(name):
    path = write_facts.EXAMPLES / f"{name}.json"

    assert path.read_text(encoding="utf-8") == write_facts.example_text(name, written()[name]), RUN


def test_each_published_model_has_a_configuration_and_facts_or_a_reason_against_it():
    assert {path.stem for path in CONFIGS.rglob("*.json")} == set(PUBLISHED) == set(written())
    assert {path.stem for path in write_facts.EXAMPLES.iterdir()} == set(write_facts.OF_EXAMPLES)
    for name, model in published_models().items():
        assert model.sources == tuple(f"hf://{each}" for each in PUBLISHED[name].repositories)
        assert (model.facts is None) == bool(model.refusal)


@pytest.mark.parametrize("name", WELL_KNOWN)
def test_a_configuration_has_the_models_parameters(name):
    assert published_models()[name].facts.num_parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", write_facts.BUILTIN)
def test_the_facts_of_a_built_in_model_are_what_inspect_prints(name):
    command = [Path(sys.executable).parent / "rayloom-engine", "inspect", "--model", name]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)

    assert ModelFacts.model_validate_json(json.dumps(said)) == builtin_models()[name]


def test_no_number_that_the_engine_takes_is_refused_by_the_operator():
    ours = (model_facts.MAX_HEADS, model_facts.MAX_WIDTH, model_facts.MAX_VOCABULARY)
    ours += (costs.MAX_LAYERS, costs.MAX_POSITIONS, costs.MAX_PARAMETERS)
    theirs = ("MAX_HEADS", "MAX_SIZE", "MAX_VOCAB", "MAX_LAYERS", "MAX_POSITIONS", "MAX_PARAMETERS")

    assert list(ours) == [getattr(limits, name) for name in theirs]
    assert costs.MAX_TENSOR == limits.MAX_HEADS

"""The cost of a step, and the forecast of the time for one of its layers."""

from __future__ import annotations

import json
from pathlib import Path

from rayloom_engine.build import stage_work
from rayloom_engine.core.step import SlotStep, StepPlan
from rayloom_engine.core.step_work import StepForecast, StepWork
from rayloom_engine.core_server.ranks.stillness import patience_s
from rayloom_engine.models.shape import read_shape

WORK = StepWork(flops_per_token=100.0, flops_per_pair=2.0, num_layers=4)


def _plan(*steps: tuple[int, int]) -> StepPlan:
    slots = tuple(SlotStep(slot=slot, start=start, num_tokens=num) for slot, (start, num) in enumerate(steps))
    return StepPlan(step_id=1, epoch=1, slots=slots)


def test_a_step_costs_by_its_tokens_and_by_the_positions_that_they_attend_to() -> None:
    # 10 + 1 tokens with 10 x 30 and 1 x 6 pairs.
    assert WORK.flops(_plan((20, 10), (5, 1)).slots) == 11 * 100 + 306 * 2
    # With a window of 8: 10 x 18 and 1 x 6 pairs.
    windowed = StepWork(flops_per_token=100.0, flops_per_pair=2.0, num_layers=4, window=8)
    assert windowed.flops(_plan((20, 10), (5, 1)).slots) == 11 * 100 + 186 * 2


def test_a_layer_is_forecast_from_the_largest_step_in_flight_and_the_best_speed() -> None:
    forecast = StepForecast(WORK)
    forecast.submitted(_plan((0, 10)))  # 1,200 operations
    assert forecast.layer_s == 0.0, "no speed is known"
    forecast.ended(0.5)
    forecast.submitted(_plan((9, 1)))  # 120 operations
    forecast.submitted(_plan((20, 10)))  # 1,600 operations
    assert forecast.layer_s == 1600 / 2400 / 4
    forecast.ended(1.0)  # the speed of a decode does not predict large steps
    assert forecast.layer_s == 1600 / 2400 / 4
    forecast.forget()
    assert forecast.layer_s == 0.0


def test_the_first_large_step_replaces_the_speed_of_small_ones() -> None:
    forecast = StepForecast(StepWork(flops_per_token=100.0))
    forecast.submitted(_plan((0, 1)))
    forecast.ended(10.0)  # the weights were read from the disk: 10 operations a second
    forecast.submitted(_plan((0, 64)))
    assert forecast.layer_s == 640.0, "nothing better is known"
    forecast.ended(8.0)  # 800 operations a second
    forecast.submitted(_plan((0, 63)))
    forecast.ended(1.0)  # 6,300 operations a second, but the step is small
    forecast.submitted(_plan((0, 64)))
    assert forecast.layer_s == 8.0


def test_a_slow_first_token_does_not_hide_a_hang_in_the_first_prompt() -> None:
    # An 8B model's probe takes 3 s. A chunk of 8,192 tokens would then be forecast at 974 s for each of 32 layers.
    forecast = StepForecast(StepWork(flops_per_token=1.6e10, flops_per_pair=4 * 4096 * 32, num_layers=32))
    forecast.submitted(_plan((0, 1)))
    forecast.ended(3.0)
    forecast.submitted(_plan((0, 8192)))
    assert round(forecast.layer_s) == 974
    assert patience_s(10.0, forecast.layer_s, is_trial=False) == 60.0


def test_a_step_without_a_time_teaches_nothing() -> None:
    forecast = StepForecast(StepWork())
    forecast.submitted(_plan((0, 10)))
    forecast.ended(0.0)
    forecast.submitted(_plan((0, 10)))
    assert forecast.layer_s == 0.0


def test_stages_share_the_work(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path)
    whole, half = stage_work(shape, 1), stage_work(shape, 2)
    assert whole.flops_per_pair == 4 * 8 * 16 * 6
    assert whole.flops_per_token == 2 * shape.num_parameters
    assert (half.flops_per_pair, half.flops_per_token) == (whole.flops_per_pair / 2, whole.flops_per_token / 2)
    assert (whole.num_layers, half.num_layers) == (6, 3)

"""`bench routing` without engines: the choices of an engine, the requests and their figures."""

from __future__ import annotations

import argparse

import pytest

from rayloom_bench.fleet.arrivals import Arrival, Segment
from rayloom_bench.fleet.traffic import SharedPrefixes
from rayloom_bench.routing import command
from rayloom_bench.routing.choices import CHOICES, FEWEST, GATEWAY, ROUND_ROBIN
from rayloom_bench.routing.command import engine_flags
from rayloom_bench.routing.figures import ChoiceFigures, best_hit_rate, figures_of, figures_table, verdicts
from rayloom_bench.routing.load import Answered, RoutedLoad, run_load, token_ids
from rayloom_bench.routing.servers import RoutedEngines
from rayloom_bench.server import ServerFailed
from rayloom_engine.errors import ConfigError
from rt_fake_openai import FakeOpenAI, running

ENGINES = RoutedEngines(gateway_url="g", engine_urls=("a", "b"))


def arrival(prefix: int, own: int, at_s: float = 0.0) -> Arrival:
    return Arrival(at_s=at_s, prompt=(Segment(prefix, 30), Segment(own, 10)), num_output=4)


def figures(hit_rate: float, p90_s: float, *failures: str) -> ChoiceFigures:
    return ChoiceFigures(
        hit_rate=hit_rate, ttft_p50_s=0.1, ttft_p90_s=p90_s, ttft_p99_s=1.0, num_answered=9, failures=failures
    )


def test_the_gateway_gets_all_requests_and_round_robin_alternates() -> None:
    gateway, round_robin = CHOICES[GATEWAY](ENGINES), CHOICES[ROUND_ROBIN](ENGINES)
    assert [gateway.pick() for _ in range(3)] == ["g", "g", "g"]
    assert [round_robin.pick() for _ in range(4)] == ["b", "a", "b", "a"]


def test_the_engine_with_the_fewest_unfinished_requests_is_next() -> None:
    fewest = CHOICES[FEWEST](ENGINES)
    assert [fewest.pick() for _ in range(3)] == ["a", "b", "a"]
    fewest.ended("a")
    fewest.ended("a")
    assert fewest.pick() == "a"
    assert fewest.pick() == "b", "one each, and a was chosen later than b"


def test_a_text_has_the_same_ids_in_every_prompt() -> None:
    one, other = (token_ids(arrival(3, own), 1000) for own in (100, 101))
    assert one[:30] == other[:30]
    assert one[30:] != other[30:]
    assert token_ids(arrival(4, 100), 1000)[:30] != one[:30]
    assert all(250 <= token < 750 for token in one)


def test_the_best_possible_choice_computes_each_prefix_once() -> None:
    # 4 prompts of 40 tokens; the second and the fourth find the 30 tokens of their prefix
    arrivals = [arrival(0, 10), arrival(0, 11), arrival(1, 12), arrival(0, 13)]
    assert best_hit_rate(arrivals) == 60 / 160
    # without the first two, whose prefix the fourth still finds: one of two prompts has its 30 tokens
    assert best_hit_rate(arrivals, 2) == 30 / 80


def test_figures_and_verdicts_are_those_of_the_answers() -> None:
    answers = tuple(Answered(num_prompt=40, num_cached=30, ttft_s=seconds / 10) for seconds in range(11))
    found = figures_of(RoutedLoad(answered=answers, failures=("cut",)))
    assert (found.hit_rate, found.ttft_p50_s, found.ttft_p90_s) == pytest.approx((0.75, 0.5, 0.9))
    assert (found.num_answered, found.failures) == (11, ("cut",))

    good = {GATEWAY: figures(0.87, 0.1), ROUND_ROBIN: figures(0.7, 0.35), FEWEST: figures(0.7, 0.2)}
    assert verdicts(good, best=0.9) == [
        "- Goal: at least 95% of the best possible hits; 96.7%, met.",
        "- Goal: TTFT p90 at least 3 times better than with round robin; 3.5 times, met. Than with fewest requests: "
        "2.0 times.",
    ]
    bad = {**good, GATEWAY: figures(0.8, 0.2)}
    assert ["MISSED" in line for line in verdicts(bad, best=0.9)] == [True, True]
    assert "| round robin | 70.0% | 78% | 0.10, 0.35, 1.00 s | 9 | 0 |" in figures_table(good, best=0.9)


def test_an_engine_has_blocks_for_fourteen_prefixes_and_its_running_requests() -> None:
    flags = engine_flags("m", SharedPrefixes(num_prefix_tokens=1024, num_own=32, num_output=32))
    # 14 prefixes of 64 blocks, and 16 requests of 4 full blocks and a partly filled block
    assert flags[flags.index("--num-kv-blocks") + 1] == str(14 * 64 + 16 * 5)
    assert flags[flags.index("--max-model-len") + 1] == "1088"


def test_every_request_is_sent_and_failures_are_counted() -> None:
    with running(FakeOpenAI(faults={1: "status"})) as fake:
        engines = RoutedEngines(gateway_url=fake.url, engine_urls=(fake.url,))
        ended: list[None] = []
        arrivals = [arrival(0, 10 + number, at_s=number / 100) for number in range(3)]
        load = run_load(arrivals, CHOICES[GATEWAY](engines), 1000, lambda: ended.append(None))
    assert len(ended) == 3
    assert [(each.num_prompt, each.num_cached) for each in load.answered] == [(40, 0)] * 2
    assert load.failures == ('HTTP 429: {"error": {"message": "too much"}}',)
    assert [body["min_tokens"] for body in fake.bodies] == [4, 4, 4]


def test_requests_of_the_warm_up_are_sent_but_only_their_failures_count() -> None:
    with running(FakeOpenAI(faults={1: "status"})) as fake:
        engines = RoutedEngines(gateway_url=fake.url, engine_urls=(fake.url,))
        arrivals = [arrival(0, 10 + number, at_s=number / 100) for number in range(3)]
        load = run_load(arrivals, CHOICES[GATEWAY](engines), 1000, num_warm_up=2)
    assert len(fake.bodies) == 3
    assert (len(load.answered), len(load.failures)) == (1, 1)


@pytest.mark.parametrize("given", ["-1", "400"])
def test_a_warm_up_that_leaves_no_request_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=f"--warm-up: {given} given; .* less than --requests, 400"):
        command.run(parsed("--warm-up", given))


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_flags(parser)
    return parser.parse_args(flags)


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="--rate: 0 given"):
        command.run(parsed("--rate", "0"))


def test_a_server_that_does_not_start_is_a_failed_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ServerFailed("it ended")

    monkeypatch.setattr(command, "_measure", fail)
    monkeypatch.setattr(command, "busy_percent", lambda: 0.0)
    assert command.run(parsed()) == 1
    assert "bench routing: it ended" in capsys.readouterr().err

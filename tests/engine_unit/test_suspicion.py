"""Exactly the sequences that cause deaths are condemned, after few deaths, whatever else runs in their steps."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.core.planning.spans import Span
from rayloom_engine.core.suspicion import Suspicion


class Engine:
    """A simulated engine: each sequence of a step gets a token, but a poisonous sequence kills the step."""

    def __init__(self, num_sequences: int, poisonous: dict[str, int], choice: random.Random) -> None:
        """`poisonous`: id -> number of known tokens at which a step with this sequence dies."""
        self.tokens = {f"s{number}": 5 for number in range(num_sequences)}
        self.suspicion = Suspicion()
        self.num_deaths = 0
        self._poisonous = poisonous
        self._choice = choice

    def step(self, is_unlucky: bool = False) -> bool:
        """Computes a step.

        Returns True if the only sequence of this step was the last suspect. Only such a step can condemn the suspect.
        """
        allowed = self.suspicion.trial({name: num - 1 for name, num in self.tokens.items()}) or list(self.tokens)
        batch = self._choice.sample(allowed, self._choice.randint(1, len(allowed)))
        is_lone_trial = len(self.suspicion.suspects) == 1 and batch == list(self.suspicion.suspects)
        is_fatal = any(self.tokens[name] == self._poisonous.get(name) for name in batch)
        if is_fatal or (is_unlucky and not is_lone_trial):
            self.num_deaths += 1
            # The next core reads the suspicion from a file.
            self.suspicion.died({name: (self.tokens[name] - 1, self.tokens[name]) for name in batch})
            self.suspicion = msgspec.msgpack.decode(msgspec.msgpack.encode(self.suspicion), type=Suspicion)
            for name in self.suspicion.condemned:
                self.tokens.pop(name, None)
        else:
            for name in batch:
                self.tokens[name] += 1
                if self.tokens[name] == 12:
                    del self.tokens[name]  # finished
        return is_lone_trial


@settings(max_examples=300, deadline=None)
@given(
    num_sequences=st.integers(1, 64),
    poisons=st.lists(
        st.tuples(st.integers(0, 63), st.integers(5, 11)), min_size=1, max_size=2, unique_by=lambda p: p[0]
    ),
    seed=st.integers(0, 2**32),
)
def test_exactly_the_poisonous_ones_fail_after_few_deaths(num_sequences, poisons, seed) -> None:
    poisonous = {f"s{number % num_sequences}": tokens for number, tokens in poisons}
    engine = Engine(num_sequences, poisonous, random.Random(seed))
    num_steps = 0
    while engine.tokens:
        engine.step()
        num_steps += 1
        assert num_steps < 5000, "starved"
    assert set(engine.suspicion.condemned) == set(poisonous)
    assert engine.num_deaths <= len(poisonous) * (2 + math.floor(math.log2(num_sequences)) + 1)


@settings(max_examples=300, deadline=None)
@given(num_sequences=st.integers(1, 20), unlucky=st.sets(st.integers(0, 200), max_size=60), seed=st.integers(0, 2**32))
def test_deaths_of_other_causes_fail_no_sequence(num_sequences, unlucky, seed) -> None:
    engine = Engine(num_sequences, {}, random.Random(seed))
    num_steps = 0
    while engine.tokens:
        engine.step(is_unlucky=num_steps in unlucky)
        num_steps += 1
        assert num_steps < 5000, "starved"
    assert engine.suspicion.condemned == []


def test_the_newest_of_eight_is_found_after_three_deaths() -> None:
    names = [f"s{number}" for number in range(8)]
    spans, computed = dict.fromkeys(names, (8, 9)), dict.fromkeys(names, 8)
    suspicion = Suspicion()
    assert not suspicion.died(spans)
    assert suspicion.trial(computed) == []
    assert not suspicion.died(spans)
    assert suspicion.trial(computed) == names[:4]
    computed.update(dict.fromkeys(names[:4], 9))
    assert suspicion.trial(computed) == names[4:6]
    computed.update(dict.fromkeys(names[4:6], 9))
    assert suspicion.trial(computed) == names[6:7]
    computed["s6"] = 9
    assert suspicion.trial(computed) == ["s7"]
    assert suspicion.died({"s7": (8, 9)})
    assert (suspicion.condemned, suspicion.suspects) == (["s7"], {})


def test_two_deaths_fail_no_sequence_and_a_third_only_the_one_that_was_alone_in_all() -> None:
    suspicion = Suspicion()
    for _ in range(2):
        suspicion.died({"alone": (0, 3)})
        assert suspicion.condemned == []
    suspicion.died({"alone": (0, 3)})
    assert suspicion.condemned == ["alone"]


@pytest.mark.parametrize(
    "spans",
    [
        [(512, 1024), (1024, 1536), (1536, 2048)],  # the second death was at later positions than the first
        [(4096, 4608), (1024, 1536), (2560, 3072)],  # the first death was the furthest: each prefill began again at 0
        [(512, 1024), (512, 1024), (1024, 1536)],  # a suspect gets past the position in its trial
    ],
)
def test_three_unrelated_deaths_during_one_long_prefill_condemn_no_sequence(spans: list[Span]) -> None:
    suspicion = Suspicion()
    for span in spans:
        suspicion.trial({"long": span[0]})
        assert not suspicion.died({"long": span}), "each of them is booked"
    assert (suspicion.condemned, suspicion.suspects) == ([], {})


def test_a_poison_in_a_long_prompt_is_found_although_its_chunks_differ() -> None:
    suspicion = Suspicion()
    for span in [(512, 1024), (700, 1100)]:
        suspicion.died({"poison": span, "other": (5, 6)})
    assert suspicion.suspects == {"poison": (700, 1024), "other": (5, 6)}
    suspicion.trial({"poison": 0, "other": 6})
    assert not suspicion.tried({"poison": (188, 700)})
    assert suspicion.tried({"poison": (600, 800)})
    assert suspicion.died({"poison": (600, 800)})
    assert suspicion.condemned == ["poison"]


def test_a_death_in_a_trial_at_other_positions_narrows_nothing_and_counts() -> None:
    suspicion = Suspicion(suspects={"a": (512, 1024)})
    assert not suspicion.died({"a": (0, 512)})
    assert (suspicion.condemned, suspicion.suspects, len(suspicion.deaths)) == ([], {}, 1)


def test_a_trial_that_leaves_one_of_two_is_confirmed_before_anybody_fails() -> None:
    suspicion = Suspicion(suspects={"a": (2, 3), "b": (2, 3)})
    assert suspicion.trial({"a": 2, "b": 2}) == ["a"]
    assert suspicion.died({"a": (2, 3)})
    assert (suspicion.condemned, suspicion.suspects) == ([], {"a": (2, 3)})


def test_a_token_that_is_computed_again_after_a_restart_clears_no_suspect() -> None:
    suspicion = Suspicion()
    suspicion.died({"a": (8, 9), "b": (8, 9)})
    suspicion.died({"a": (0, 9), "b": (11, 12)})  # a is computed again from its ids
    assert suspicion.suspects == {"a": (8, 9)}
    assert suspicion.trial({"a": 8, "b": 12}) == ["a"]  # the front had 8 tokens of a, so the ninth was sampled again
    assert suspicion.trial({"a": 9, "b": 12}) == []


def test_suspects_that_are_not_submitted_again_delay_no_sequence() -> None:
    suspicion = Suspicion(suspects={"a": (2, 3)})
    assert suspicion.trial({"b": 5}) == []
    assert suspicion.trial({"b": 5, "a": 0}) == ["a"]


def test_sequences_that_never_come_back_take_bounded_room() -> None:
    suspicion = Suspicion()
    for number in range(2000):
        for _ in range(3):
            suspicion.died({f"s{number}": (0, 3)})
    assert len(suspicion.condemned) == 1024
    assert suspicion.condemned[-1] == "s1999"
    assert len(suspicion.deaths) == 4
    assert suspicion.suspects == {}

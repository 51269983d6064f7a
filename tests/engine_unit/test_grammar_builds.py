"""A rank waits for grammars: the wait counts as progress, ends by itself, and concerns one grammar alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.errors import GrammarFault
from rayloom_engine.worker.activity import Activity
from rayloom_engine.worker.builds import Build, Builds
from rayloom_engine.worker.forms import Forms
from rt_forms import tiny_vocabulary
from rt_stages import load_stages, stage_config
from rt_tiny import tiny_variant


def test_a_wait_for_a_build_is_progress() -> None:
    builds, activity, release = Builds(), Activity(), threading.Event()

    def report() -> None:
        activity.report()
        if activity.advance == 3:
            release.set()

    builds.report_progress = report
    assert builds.wait_for(builds.start(lambda: release.wait(60))) is True
    assert activity.advance >= 3


def test_a_rank_counts_the_wait_for_a_grammar_as_its_progress(tmp_path: Path) -> None:
    (rank,) = load_stages(stage_config(tiny_variant(tmp_path, "llama")))
    assert rank._forms is not None
    builds, turn = rank._forms._builds, threading.Event()
    before, report = rank.activity.advance, builds.report_progress

    def report_and_release() -> None:
        report()
        turn.set()

    builds.report_progress = report_and_release
    assert builds.wait_for(builds.start(lambda: turn.wait(60))) is True
    assert rank.activity.advance > before


def test_a_build_that_does_not_end_fails_alone() -> None:
    builds, release = Builds(patience_s=0.3), threading.Event()
    stuck = builds.start(lambda: release.wait(60))
    others = [builds.start(lambda number=number: number) for number in range(3)]
    assert [builds.wait_for(build) for build in reversed(others)] == [2, 1, 0]
    for _ in range(2):
        with pytest.raises(GrammarFault, match=r"was not built in 0\.3 s"):
            builds.wait_for(stuck)
    release.set()


def test_a_build_may_have_more_patience_than_others() -> None:
    builds, release, num_slices = Builds(patience_s=0.1), threading.Event(), []

    def report() -> None:
        num_slices.append(1)
        if len(num_slices) == 4:
            release.set()

    builds.report_progress = report
    slow = Build(lambda: release.wait(60), patience=60)
    builds.begin(slow)
    assert builds.wait_for(slow) is True


def test_builds_that_end_in_turn_are_all_waited_for() -> None:
    builds = Builds(patience_s=0.5)
    turns = [threading.Event() for _ in range(8)]
    slow = [builds.start(lambda turn=turn: turn.wait(60)) for turn in turns]

    def release_next() -> None:
        next((turn for turn in turns if not turn.is_set()), turns[0]).set()

    builds.report_progress = release_next  # each slice of 0.1 s lets one build end: 0.8 s in all
    assert builds.wait_for(slow[-1]) is True


def test_a_form_whose_grammar_is_not_built_is_broken_for_good() -> None:
    release = threading.Event()
    forms = Forms(lambda: tiny_vocabulary() if release.wait(60) else None)
    forms._builds._num_slices = 2
    forms._vocabulary.patience = 1
    form = forms.begin(DecodingParams(max_tokens=5, grammar='start: "a"'))
    with pytest.raises(GrammarFault, match="make the grammar simpler"):
        form.allowed(())
    release.set()
    with pytest.raises(GrammarFault, match="make the grammar simpler"):
        form.allowed(())  # a later end of the build changes nothing
    later = forms.begin(DecodingParams(max_tokens=5, grammar='start: "b"'))
    assert later.allowed(()) is not None


def test_kept_grammars_are_limited_by_number_and_length() -> None:
    forms = Forms(tiny_vocabulary)

    def begin(grammar: str) -> None:
        forms.begin(DecodingParams(max_tokens=5, grammar=grammar)).allowed(())

    for number in range(40):
        begin(f'start: "{number}"')
    assert len(forms._matchers) == 32
    for number in range(6):
        begin(f'start: "{number}" // ' + "x" * 60_000)  # 4 of them are 240 KB
    assert len([grammar for grammar in forms._matchers if len(grammar) > 60_000]) == 4
    assert sum(map(len, forms._matchers)) <= 256 * 1024

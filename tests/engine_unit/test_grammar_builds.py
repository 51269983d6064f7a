"""A rank waits for the build of a grammar: the wait counts as progress, has a limit, and affects only this grammar."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
    assert rank.forms is not None
    builds, turn = rank.forms._builds, threading.Event()
    before, report = rank.activity.advance, builds.report_progress

    def report_and_release() -> None:
        report()
        turn.set()

    builds.report_progress = report_and_release
    assert builds.wait_for(builds.start(lambda: turn.wait(60))) is True
    assert rank.activity.advance > before


def compute(cpu_s: float) -> None:
    """Uses CPU time of the calling thread."""
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


def compute_until(release: threading.Event) -> bool:
    """Uses CPU time of the calling thread until `release` is set."""
    while not release.is_set():
        compute(0.001)
    return True


@pytest.mark.parametrize(
    ("limits", "stand", "fault"),
    [
        ({"cpu_s": 0.2}, compute_until, r"was not built in 0\.2 s of CPU time; make the grammar simpler"),
        ({"wall_s": 0.3}, threading.Event.wait, r"was not built in 0\.3 s, in which the thread got 0\.\d s"),
    ],
    ids=["computes", "stands still"],
)
def test_a_build_that_does_not_end_fails_alone(
    limits: dict[str, float], stand: Callable[[threading.Event], bool], fault: str
) -> None:
    builds, release = Builds(**limits), threading.Event()
    stuck = builds.start(lambda: stand(release))
    others = [builds.start(lambda number=number: number) for number in range(3)]
    assert [builds.wait_for(build) for build in reversed(others)] == [2, 1, 0]
    for _ in range(2):
        with pytest.raises(GrammarFault, match=fault):
            builds.wait_for(stuck)
    release.set()


def test_a_build_that_other_work_of_the_machine_makes_slow_is_waited_for() -> None:
    """The build gets no CPU time while another thread computes for longer than the limit.

    Here the waiting thread computes.
    """
    builds, release, num_slices = Builds(cpu_s=0.2), threading.Event(), []

    def work_and_release() -> None:
        compute(0.1)
        num_slices.append(1)
        if len(num_slices) == 5:
            release.set()

    builds.report_progress = work_and_release
    assert builds.wait_for(builds.start(lambda: release.wait(60))) is True
    assert len(num_slices) >= 5, "0.5 s and more have passed"


def test_cpu_time_of_earlier_builds_does_not_count() -> None:
    builds = Builds(cpu_s=0.3)
    slow = [builds.start(lambda number=number: (compute(0.2), number)[1]) for number in range(2)]
    assert [builds.wait_for(build) for build in reversed(slow)] == [1, 0]


def test_a_build_of_the_server_itself_has_no_limit_of_cpu_time() -> None:
    builds = Builds(cpu_s=0.05)
    slow = Build(lambda: compute(0.2), has_cpu_limit=False)
    builds.begin(slow)
    assert builds.wait_for(slow) is None


def test_builds_that_end_in_turn_are_all_waited_for() -> None:
    builds = Builds(wall_s=0.5)
    turns = [threading.Event() for _ in range(8)]
    slow = [builds.start(lambda turn=turn: turn.wait(60)) for turn in turns]

    def release_next() -> None:
        next((turn for turn in turns if not turn.is_set()), turns[0]).set()

    builds.report_progress = release_next  # one build ends in each slice of 0.1 s: 0.8 s in all
    assert builds.wait_for(slow[-1]) is True


def test_a_form_whose_grammar_is_not_built_is_broken_for_good() -> None:
    release = threading.Event()
    forms = Forms(lambda: tiny_vocabulary() if release.wait(60) else None)
    forms._builds._wall_s = 0.2
    form = forms.begin(DecodingParams(max_tokens=5, grammar='start: "a"'))
    with pytest.raises(GrammarFault, match="when the machine has less work"):
        form.allowed(())
    forms._builds._wall_s = 60.0
    next_form = forms.begin(DecodingParams(max_tokens=5, grammar='start: "c"'))
    with pytest.raises(GrammarFault, match=r"was not built in 0\.2 s"):
        next_form.allowed(())  # at once, because the vocabulary's build has failed
    release.set()
    forms._vocabulary.future.result(60)
    with pytest.raises(GrammarFault, match="when the machine has less work"):
        form.allowed(())  # the late end of the build has no effect
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

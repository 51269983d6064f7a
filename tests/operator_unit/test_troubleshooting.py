"""docs/troubleshooting.md has every reason and every condition, and marks the reasons that become Events."""

import re
from pathlib import Path
from typing import get_args

from rayloom_operator.api.rollout.state import FailureReason
from rayloom_operator.api.status import FAULTS, ConditionType, Reason
from rayloom_operator.decide.rollout.phases import RolloutStep

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


OF_ROLLS = {
    *map(str, RolloutStep),
    *get_args(FailureReason),
    *("Moving", "NotRolledBack", "NotPaused", "Suspended", "ScaledToZero"),
}
WORTH_A_LOOK = {"WaitingForCapacity", "RollingBack", "RolledBack", "Halted", "AnalysisFailed", "CrashLoop"}
WORTH_A_LOOK |= {"DeadlineExceeded"}


def rows(head):
    """Returns the table that begins with `head`, as word in the first column -> other columns."""
    table = PAGE.split(head)[1].split("\n\n")[0]
    cells = (line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `"))
    return {re.fullmatch(r"`(\w+)`", first.strip())[1]: [each.strip() for each in rest] for first, *rest in cells}


def test_every_reason_has_a_row_with_its_event_or_none():
    found = rows("| reason | Event |")

    assert found.keys() | rows("| reason of a rollout | Event |").keys() == {str(each) for each in Reason} | OF_ROLLS
    normal = {Reason.SERVING, Reason.HEALTHY}
    for reason in set(Reason) - OF_ROLLS | {Reason.STARTING}:
        event, meaning, _ = found[str(reason)]
        assert event == ("Warning" if reason in FAULTS else "Normal" if reason in normal else ""), reason
        assert meaning


def test_every_fault_has_an_action():
    found = rows("| reason | Event |") | rows("| reason of a rollout | Event |")

    assert [str(reason) for reason in FAULTS | WORTH_A_LOOK if not found[str(reason)][2]] == []


def test_every_step_of_a_roll_is_an_event():
    found = rows("| reason of a rollout | Event |")

    quiet = {"NotRolledBack", "NotPaused", "Suspended"}
    assert {word: event for word, (event, _, _) in found.items()} == {
        word: "Warning" if word in WORTH_A_LOOK else "" if word in quiet else "Normal" for word in found
    }


def test_every_condition_is_explained():
    known = dict.fromkeys([*get_args(ConditionType), "Progressing", "RolledBack", "Paused"])

    assert list(rows("| condition |")) == list(known)

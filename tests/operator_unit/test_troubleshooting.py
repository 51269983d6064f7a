"""The page for when something is wrong has every reason, every condition, and says which are Events."""

import re
from pathlib import Path
from typing import get_args

from rayloom_operator.api_status import FAULTS, ConditionType, Reason

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def rows(head):
    """Of the table that begins with `head`: the word in the first column -> the other columns."""
    table = PAGE.split(head)[1].split("\n\n")[0]
    cells = (line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `"))
    return {re.fullmatch(r"`(\w+)`", first.strip())[1]: [each.strip() for each in rest] for first, *rest in cells}


def test_every_reason_has_a_row_that_says_whether_it_is_an_event():
    found = rows("| reason | Event |")

    assert set(found) == {str(each) for each in Reason}
    normal = {Reason.SERVING, Reason.HEALTHY}
    for reason in Reason:
        event, meaning, _ = found[str(reason)]
        assert event == ("Warning" if reason in FAULTS else "Normal" if reason in normal else ""), reason
        assert meaning


def test_what_is_wrong_has_something_to_do():
    assert [str(reason) for reason in FAULTS if not rows("| reason | Event |")[str(reason)][2]] == []


def test_every_condition_is_explained():
    assert list(rows("| condition |")) == list(get_args(ConditionType))

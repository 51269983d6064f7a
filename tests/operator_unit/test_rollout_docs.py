"""The page about rollouts has every step and every setting, with its default."""

import json
import re
from pathlib import Path

from pydantic import BaseModel

from rayloom_operator.api.rollout.spec import Rollout
from rayloom_operator.decide.rollout.phases import RolloutStep

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rollouts.md").read_text(encoding="utf-8")


def table(head):
    """The cells of the first two columns in the table that begins with `head`."""
    rows = PAGE.split(head)[1].split("\n\n")[0].splitlines()[2:]
    return [tuple(cell.strip() for cell in row.strip("|").split("|")[:2]) for row in rows]


def defaults(part, prefix=""):
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            yield from defaults(value, f"{prefix}{field.alias}.")
        else:
            yield f"`{prefix}{field.alias}`", f"`{json.dumps(value)}`"


def test_every_setting_has_a_row_with_its_default():
    assert table("| field |") == list(defaults(Rollout()))


def test_every_step_has_a_row_or_ends_one():
    named = set(re.findall(r"`([A-Z]\w+)`", PAGE.split("## How it goes")[1].split("\n\n")[1]))

    assert named == {*map(str, RolloutStep), "Moving"}

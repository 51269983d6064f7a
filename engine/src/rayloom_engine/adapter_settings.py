"""AdapterSettings: the type of the setting `adapters`: one NAME=PATH for each LoRA adapter."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _check(adapters: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the adapters. Raises ValueError if an adapter has no name or path, or if two have the same name."""
    names = [given.partition("=")[0] for given in adapters]
    for given in adapters:
        name, _, path = given.partition("=")
        if not name or not path:
            raise ValueError(f"{given!r} has no name or no path; write NAME=PATH, such as sql=/adapters/sql")
        if names.count(name) > 1:
            raise ValueError(f"the name {name!r} is given twice; give each adapter a name of its own")
    return adapters


AdapterSettings = Annotated[tuple[str, ...], AfterValidator(_check)]

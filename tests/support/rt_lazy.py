"""Modules that a test imports when it runs, and not when pytest collects it.

Every process of a run collects all tests, and one process runs those that need such a module.
"""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """`LazyModule("openai").OpenAI` is `openai.OpenAI`; the first attribute imports the module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks every object of a test file for such attributes
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)

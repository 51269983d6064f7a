"""Modules that are imported when a test runs, and not when pytest collects the test.

Every process of a run collects all tests, but only one process runs the tests that need such a module.
"""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """`LazyModule("openai").OpenAI` is `openai.OpenAI`; the first attribute imports the module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest reads such attributes of every object in a test file
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)

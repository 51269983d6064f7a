"""Tool and ToolUse: the functions that a model may call in one request, and whether the model must call one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ToolMode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of the object with the arguments
    is_strict: bool = False  # the arguments always follow the schema
    document: Mapping[str, Any]  # the tool as the client sent it, for the chat template


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request. With a mode other than "none" there is at least one tool."""

    tools: tuple[Tool, ...] = ()
    mode: ToolMode = "none"  # "named": the model calls the only tool in `callable`
    callable: tuple[Tool, ...] = ()  # the tools that the model may call
    is_parallel: bool = True  # the model may call several tools at once

    @property
    def is_forced(self) -> bool:
        """True if the answer must consist of calls."""
        return self.mode in ("required", "named")

    @property
    def shown(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the prompt describes."""
        return tuple(tool.document for tool in self.tools) if self.mode != "none" else ()

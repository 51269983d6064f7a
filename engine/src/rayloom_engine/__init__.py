"""Rayloom's inference engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayloom_engine.llm import LLM as LLM
    from rayloom_engine.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Import lazily: every process of the engine imports this package, and most must not import torch.
    if name == "LLM":
        from rayloom_engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from rayloom_engine.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

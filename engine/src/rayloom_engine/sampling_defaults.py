"""SamplingDefaults: the sampling settings in a model's generation_config.json, for requests that leave them out.

As in vLLM, `do_sample` has no effect. The file's `eos_token_id` is read with the model's shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rayloom_engine.errors import ModelError, RequestError
from rayloom_engine.sampling_params import RANGES, SamplingParams

FILE = "generation_config.json"
_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Default values of SamplingParams. `max_tokens`: for requests that set no limit of their own."""

    settings: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None

    def with_length(
        self, params: SamplingParams, prompts: Sequence[Sequence[int]], max_model_len: int, most: int | None
    ) -> SamplingParams:
        """Returns `params` with the default max_tokens, lowered to the room in the context. `most`: the server's limit.

        If `params` has a max_tokens, or the model has no default, returns `params` unchanged.
        """
        if self.max_tokens is None or params.max_tokens is not None:
            return params
        room = max_model_len - max(map(len, prompts))
        length = max(min(self.max_tokens, room, most or room), params.min_tokens)
        return replace(params, max_tokens=length) if length > 0 else params

    def words(self) -> str:
        """Returns the settings for a log line; empty if there are none."""
        values = {**self.settings, **({} if self.max_tokens is None else {"max_new_tokens": self.max_tokens})}
        return ", ".join(f"{name} {value:g}" for name, value in values.items())


NO_DEFAULTS = SamplingDefaults()


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Returns the defaults in a model folder; NO_DEFAULTS if it has no generation_config.json.

    Raises ModelError if a value cannot be used.
    """
    path = folder / FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return NO_DEFAULTS
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON that can be read: {error}; {_CURE}") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path} must hold an object; {_CURE}")
    settings = {name: _checked(path, document, name, name) for name in _SETTINGS if document.get(name) is not None}
    length = None
    if document.get("max_new_tokens") is not None:
        length = int(_checked(path, document, "max_new_tokens", "max_tokens"))
    return SamplingDefaults(settings=settings, max_tokens=length or None)


_CURE = "repair it, or start with --generation-config none"


def _checked(path: Path, document: Mapping[str, Any], name: str, setting: str) -> float:
    value = document[name]
    try:
        RANGES[setting].check(name, value)
    except RequestError as error:
        raise ModelError(f"{path}: {error}; {_CURE}") from error
    assert isinstance(value, int | float)
    return value

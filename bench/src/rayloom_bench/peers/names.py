"""The names of the engines that can be compared. Pure."""

from __future__ import annotations

from typing import Literal

from rayloom_engine.errors import ConfigError

OURS = "rayloom"
OURS_FP32 = "rayloom-fp32"  # an engine of which only the answers are compared
VLLM = "vllm"
LLAMA_BF16 = "llama.cpp-bf16"
LLAMA_F16 = "llama.cpp-f16"
ALL = (OURS, VLLM, LLAMA_BF16, LLAMA_F16, OURS_FP32)
PEERS = (VLLM, LLAMA_BF16, LLAMA_F16)

Dialect = Literal["vllm", "llama.cpp"]  # the field by which a server returns the token ids of its answer


def parse_engines(names: str) -> tuple[str, ...]:
    """The engines of a list such as `rayloom,vllm`, in the order of ALL. Raises ConfigError for an unknown name."""
    chosen = {name.strip() for name in names.split(",") if name.strip()}
    if not chosen or not chosen <= set(ALL):
        raise ConfigError(f"--engines: {names!r} given; name one or more of {', '.join(ALL)}, with commas between")
    return tuple(name for name in ALL if name in chosen)

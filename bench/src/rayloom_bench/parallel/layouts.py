"""Layouts (divisions of the built-in model into ranks) with their goals, and a checkpoint that two ranks can share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rayloom_bench.variants.rounds import Variant

MODEL = "builtin://smollm2-135m"
NARROW_HEADS = {"num_attention_heads": 18, "num_key_value_heads": 6, "head_dim": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A division of one model into ranks."""

    name: str
    has_narrow_heads: bool = False
    tensor: int = 1
    pipeline: int = 1
    # goal: the most seconds per token, as a multiple of one rank's seconds; None for the layout of one rank
    max_ratio: float | None = None

    def variant(self, model: str, dtype: str) -> Variant:
        """The layout's command line, with weights in `dtype`."""
        sizes = ("--tensor-parallel-size", str(self.tensor), "--pipeline-parallel-size", str(self.pipeline))
        executor = "uni" if self.tensor * self.pipeline == 1 else "mp"
        return Variant(
            name=variant_name(self, dtype), flags=("--model", model, "--dtype", dtype, *sizes, "--executor", executor)
        )


LAYOUTS = (
    Layout(name="1 rank"),
    Layout(name="pipeline 2", pipeline=2, max_ratio=1.4),
    Layout(name="tensor 3", tensor=3, max_ratio=2.2),
)
NARROW_LAYOUTS = (
    Layout(name="1 rank, narrow heads", has_narrow_heads=True),
    Layout(name="tensor 2, narrow heads", has_narrow_heads=True, tensor=2, max_ratio=1.4),
)


def variant_name(layout: Layout, dtype: str) -> str:
    """The name of a layout with one type of weights, such as `pipeline 2, bfloat16`."""
    return f"{layout.name}, {dtype}"


def narrow_heads(source: Path, folder: Path) -> Path:
    """Writes a checkpoint with the matrices of `source`, cut into more and smaller heads, which two ranks can share.

    The checkpoint generates meaningless text at the same cost. Returns `folder`.
    """
    for file in source.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **NARROW_HEADS}), encoding="utf-8")
    return folder

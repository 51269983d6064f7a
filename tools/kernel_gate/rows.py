"""Rows: the configurations of all operations, for each GPU, and the choice of the rows to compile."""

from __future__ import annotations

import ast
import hashlib
import importlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rayloom_engine.kernels
from rayloom_engine.kernels.triton.shipped import Gpu, Shipped

SHARE = 0.1  # share of the unchanged rows that are compiled again


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    shipped: Shipped
    gpu: Gpu

    @property
    def key(self) -> tuple[str, str]:
        return (self.shipped.name, self.gpu)


def all_rows() -> list[Row]:
    """Returns a row for each GPU of each configuration of every operation. Raises ValueError for equal names."""
    folder = Path(rayloom_engine.kernels.__path__[0])
    shipped: list[Shipped] = []
    for path in sorted(folder.glob("*/triton_gpu.py")):
        module = importlib.import_module(f"rayloom_engine.kernels.{path.parent.name}.triton_gpu")
        shipped += module.SHIPPED
    rows = [Row(shipped=each, gpu=gpu) for each in shipped for gpu in each.gpus]
    keys = [row.key for row in rows]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"two configurations have one name: {twice}; put what distinguishes them into their names")
    return rows


def rows_to_compile(
    rows: Sequence[Row], recorded: Mapping[tuple[str, str], str], versions: Mapping[tuple[str, str], str], seed: int
) -> list[Row]:
    """Returns, in order, the rows whose version differs from the recorded version, and a random share of the others."""
    changed = [row for row in rows if recorded.get(row.key) != versions[row.key]]
    same = [row for row in rows if recorded.get(row.key) == versions[row.key]]
    chosen = random.Random(seed).sample(same, round(SHARE * len(same)))
    keys = {row.key for row in (*changed, *chosen)}
    return [row for row in rows if row.key in keys]


def source_version(shipped: Shipped) -> str:
    """Returns a checksum of the kernel's code, of the code that it calls, and of the configuration.

    Comments, docstrings and line numbers do not count.
    """
    parts = [*sorted(_sources(shipped.kernel).items())]
    parts += [("signature", repr(sorted(shipped.signature.items())))]
    parts += [("constants", repr(sorted(shipped.constants.items())))]
    parts += [("launch", repr((shipped.num_warps, shipped.num_stages, sorted(shipped.unaligned))))]
    parts += [] if shipped.fuses_products else [("options", "enable_fp_fusion=False")]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _sources(kernel: Any) -> dict[str, str]:
    """Returns qualified name -> text: for a kernel, its callees, and the constants in the code of these functions."""
    found: dict[str, str] = {}
    waiting = [kernel]
    while waiting:
        function = waiting.pop()
        name = f"{function.fn.__module__}.{function.fn.__qualname__}"
        if name in found:
            continue
        tree = ast.parse(function.src)
        _remove_docstrings(tree)
        found[name] = ast.dump(tree)
        for named, value in _globals_named(tree, function.fn.__globals__):
            if hasattr(value, "fn") and hasattr(value, "src"):
                if not value.fn.__module__.startswith("triton."):  # Triton's version stands for its own code
                    waiting.append(value)
            elif isinstance(getattr(value, "value", value), int | float | str | bool):
                found[f"{function.fn.__module__}.{named}"] = repr(getattr(value, "value", value))
    return found


def _globals_named(tree: ast.AST, scope: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in scope:
            found.append((node.id, scope[node.id]))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in scope:
            value = getattr(scope[node.value.id], node.attr, None)
            found.append((f"{node.value.id}.{node.attr}", value))
    return found


def _remove_docstrings(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]

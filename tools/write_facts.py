"""Writes the facts of published models, which `rayloom-operator plan` uses without an engine: `make facts`.

The facts of a model are the output of `rayloom-engine inspect` for its config.json. tools/model_configs/ holds the
config.json files, as their repositories publish them, without the fields that no engine reads.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from rayloom_engine.models.checkpoint.source import ResolvedModel
from rayloom_engine.models.inspection import facts, inspect_model
from rayloom_engine.models.shape import read_shape

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "tools" / "model_configs"
SHIPPED = ROOT / "operator" / "src" / "rayloom_operator" / "api" / "shipped_facts.json"
EXAMPLES = ROOT / "examples" / "facts"

BUILTIN = ("builtin://smollm2-135m",)
# Name of a file -> the hub's repositories whose config.json gives the facts of this file.
PUBLISHED = {
    "qwen3-0.6b": ("hf://Qwen/Qwen3-0.6B",),
    "qwen3-1.7b": ("hf://Qwen/Qwen3-1.7B",),
    "qwen3-4b": ("hf://Qwen/Qwen3-4B",),
    "qwen3-8b": ("hf://Qwen/Qwen3-8B",),
    "qwen3-14b": ("hf://Qwen/Qwen3-14B",),
    "qwen3-32b": ("hf://Qwen/Qwen3-32B",),
    "llama-3.1-8b": ("hf://meta-llama/Llama-3.1-8B", "hf://meta-llama/Llama-3.1-8B-Instruct"),
    "llama-3.1-70b": ("hf://meta-llama/Llama-3.1-70B", "hf://meta-llama/Llama-3.1-70B-Instruct"),
    "mistral-7b-v0.3": ("hf://mistralai/Mistral-7B-v0.3", "hf://mistralai/Mistral-7B-Instruct-v0.3"),
}
# Example files for `plan --facts`, of models whose facts are not shipped with the operator.
OF_EXAMPLES = ("qwen2.5-72b", "qwen3-8b")


def facts_of(name: str) -> dict[str, Any]:
    """The facts of the model with tools/model_configs/NAME.json."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes((CONFIGS / f"{name}.json").read_bytes())
        resolved = ResolvedModel(path=Path(folder), source="", commit=None)
        return dict(json.loads(facts(resolved, read_shape(Path(folder))).text()))


def files() -> dict[Path, str]:
    """The text of each file."""
    shipped = {source: json.loads(facts(*inspect_model(source, None)).text()) for source in BUILTIN}
    for name, sources in PUBLISHED.items():
        shipped |= dict.fromkeys(sources, facts_of(name))
    lines = ",\n".join(f"{json.dumps(source)}: {json.dumps(found)}" for source, found in shipped.items())
    texts = {SHIPPED: f"{{\n{lines}\n}}\n"}
    for name in OF_EXAMPLES:
        texts[EXAMPLES / f"{name}.json"] = json.dumps(facts_of(name)) + "\n"
    return texts


def main() -> None:
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

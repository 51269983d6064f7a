"""`make facts`: writes the facts of published models. `rayloom-operator plan` uses these facts without an engine.

The facts of a model are the output of `rayloom-engine inspect` for its config.json. If the engine cannot serve the
model, the file has the reason instead. tools/published_models.py names the models.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from published_models import PUBLISHED, config_path
from rayloom_engine.errors import ModelError
from rayloom_engine.models.checkpoint.source import ResolvedModel
from rayloom_engine.models.inspection import facts, inspect_model
from rayloom_engine.models.reading import read_model_shape

ROOT = Path(__file__).resolve().parent.parent
BUILTIN_FACTS = ROOT / "operator" / "src" / "rayloom_operator" / "api" / "builtin_facts.json"
PUBLISHED_FACTS = ROOT / "operator" / "src" / "rayloom_operator" / "api" / "published_facts.json"
EXAMPLES = ROOT / "examples" / "facts"

BUILTIN = ("builtin://smollm2-135m",)
# Example files for `plan --facts`.
OF_EXAMPLES = ("qwen2.5-72b", "qwen3-8b")


def outcome_of(name: str) -> dict[str, Any]:
    """Returns {"facts": ...} of a published model, or {"refusal": why the engine cannot serve it}."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config_path(name).read_bytes())
        resolved = ResolvedModel(path=Path(folder), source="", commit=None)
        try:
            return {"facts": json.loads(facts(resolved, read_model_shape(Path(folder))).text())}
        except ModelError as error:
            return {"refusal": str(error).removeprefix(f"{folder}/config.json: ")}


def builtin_text() -> str:
    """Returns the text of the file about built-in models."""
    return _lines({source: json.loads(facts(*inspect_model(source, None)).text()) for source in BUILTIN})


def published_text(outcomes: dict[str, dict[str, Any]]) -> str:
    """Returns the text of the file about published models. `outcomes`: name -> outcome, for all published models."""
    repositories = {name: [f"hf://{each}" for each in PUBLISHED[name].repositories] for name in PUBLISHED}
    return _lines({name: {"sources": repositories[name], **outcomes[name]} for name in PUBLISHED})


def example_text(name: str, outcome: dict[str, Any]) -> str:
    """Returns the text of examples/facts/NAME.json."""
    return json.dumps(outcome["facts"]) + "\n"


def _lines(document: dict[str, Any]) -> str:
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in document.items())
    return f"{{\n{lines}\n}}\n"


def main() -> None:
    outcomes = {name: outcome_of(name) for name in PUBLISHED}
    texts = {BUILTIN_FACTS: builtin_text(), PUBLISHED_FACTS: published_text(outcomes)}
    texts |= {EXAMPLES / f"{name}.json": example_text(name, outcomes[name]) for name in OF_EXAMPLES}
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

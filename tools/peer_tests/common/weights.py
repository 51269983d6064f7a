"""The checkpoint that all servers of a comparison load: SmolLM2-135M with a default length of answers."""

from __future__ import annotations

import json
from pathlib import Path

from rayloom_engine.models.checkpoint.source import resolve

MODEL = "builtin://smollm2-135m"
# SmolLM2 does not end every answer by itself. A request without a limit would fill the whole context, which takes
# minutes.
DEFAULT_MAX_TOKENS = 512


def limited_checkpoint(parent: Path) -> Path:
    """Returns a folder below `parent` with links to the model's files and a generation_config.json of its own."""
    folder = parent / f"smollm2-135m-max-new-tokens-{DEFAULT_MAX_TOKENS}"
    folder.mkdir(parents=True, exist_ok=True)
    source = resolve(MODEL).path
    for path in source.iterdir():
        link = folder / path.name
        if path.is_file() and path.name != "generation_config.json":
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())
    stored = source / "generation_config.json"
    settings = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    settings["max_new_tokens"] = DEFAULT_MAX_TOKENS
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder

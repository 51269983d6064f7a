"""The manifests in examples/: LLMServices, and other objects that are used together with an LLMService."""

from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[2] / "examples"
SMOLLM2 = FOLDER / "smollm2.yaml"
TWO_REPLICAS = FOLDER / "smollm2-two-replicas.yaml"


def of_services() -> list[Path]:
    """The files that hold an LLMService."""
    return [path for path in sorted(FOLDER.glob("*.yaml")) if _kind(path) == "LLMService"]


def of_others() -> list[Path]:
    """The files with other objects: routes and autoscalers."""
    return [path for path in sorted(FOLDER.glob("*.yaml")) if _kind(path) != "LLMService"]


def _kind(path: Path) -> str:
    (document,) = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    return document["kind"]

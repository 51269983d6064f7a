"""Configurations of published models, and the tool that writes the operator's facts from them."""

import importlib.util
import tempfile
from pathlib import Path

from rayloom_engine.models.shape import read_shape

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "tools" / "model_configs"


def load_tool():
    """tools/write_facts.py as a module."""
    spec = importlib.util.spec_from_file_location("write_facts", ROOT / "tools" / "write_facts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shape_of(name):
    """The engine's shape of tools/model_configs/NAME.json."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes((CONFIGS / f"{name}.json").read_bytes())
        return read_shape(Path(folder))

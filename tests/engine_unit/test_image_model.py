"""The image's stage that converts the built-in model has exactly the modules that the conversion imports."""

import os
import re
import subprocess
import sys
from pathlib import Path

from rt_gguf import write_gguf
from rt_tiny import tiny_variant

ROOT = Path(__file__).parents[2]


def test_the_copied_modules_convert_a_model(tmp_path):
    stage = re.search(
        r"FROM builder AS model\n(.*?)\nFROM ", (ROOT / "docker/engine.Dockerfile").read_text(), re.DOTALL
    )
    source = ROOT / "engine/src"
    copied = re.findall(r"engine/src/(rayloom_engine/[\w/]+\.py)", stage[1])
    for folder in re.findall(r"engine/src/(rayloom_engine/[\w/]+) ", stage[1]):
        copied += [str(path.relative_to(source)) for path in (source / folder).glob("*.py")]
    for name in copied:
        target = tmp_path / "build" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((source / name).read_bytes())
    write_gguf(tmp_path / "tiny.gguf", tiny_variant(tmp_path / "original", "llama"))
    script = (
        "import sys; from rayloom_engine.models.checkpoint.source import resolve;"
        "print(*(resolve(sys.argv[1], keeps_blocks=kept).path for kept in (False, True)), sep='\\n');"
        "print(*sorted(m.__file__ for n, m in sys.modules.items() if n.startswith('rayloom_engine')), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, f"{tmp_path}/tiny.gguf"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}/build", "RAYLOOM_CACHE": f"{tmp_path}/cache"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    dense, quantised, *used = done.stdout.splitlines()
    assert dense != quantised
    assert (Path(dense) / "model.safetensors").exists()
    assert (Path(quantised) / "model.safetensors").exists()
    # source.py imports hub.py, our module for the hub. But hub.py imports the hub's library only for a model of the
    # hub.
    assert sorted(f"{tmp_path}/build/{name}" for name in copied) == used


def test_the_image_has_every_form_of_the_built_in_model_that_engines_ask_for():
    """An engine in a pod cannot write into the image. So an engine would exit if its form of the model were missing."""
    text = (ROOT / "docker/engine.Dockerfile").read_text()
    assert 'resolve("builtin://smollm2-135m", keeps_blocks=kept) for kept in (False, True)' in text

"""Measures a model in a child process, so that a process without a part of the model need not import torch.

`python -m rayloom_engine.models.on_transformers.child FOLDER SHARDS` writes the pickled shape, or the error, to its
standard output. SHARDS is the `num_shards` of `measured_shape`; 0 stands for None.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

from rayloom_engine.errors import ModelError
from rayloom_engine.models.checkpoint.config_json import refuses_broken
from rayloom_engine.models.measured_shape import MeasuredShape

_MAX_LINE = 300  # characters of the last line of a child's output in a message


def measured_in_child(folder: Path, num_shards: int | None = None) -> MeasuredShape:
    """Returns the result of `measured_shape`, or raises its error."""
    command = [sys.executable, "-m", "rayloom_engine.models.on_transformers.child", str(folder), str(num_shards or 0)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ModelError(f"{folder / 'config.json'}: the model cannot be measured: {last[:_MAX_LINE]}")
    result = pickle.loads(done.stdout)  # written by this module
    if isinstance(result, MeasuredShape):
        return result
    message, fault = result
    raise ModelError(message, fault)


def _main(folder: Path, num_shards: int | None) -> None:
    from rayloom_engine.models.on_transformers.measure import measured_shape

    result: object
    try:
        with refuses_broken(folder / "config.json"):
            result = measured_shape(folder, num_shards)
    except ModelError as error:
        result = (str(error), error.fault)
    sys.stdout.buffer.write(pickle.dumps(result))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]) or None)

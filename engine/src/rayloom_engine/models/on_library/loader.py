"""Loads weights from safetensors files for the C library: memory-mapped, each tensor read once, straight to its array.

A rank reads only the tensors of its stage and shard. The loader for torch is models/loader.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rayloom_engine.cpu_library.arrays import copy_elements
from rayloom_engine.models.checkpoint.progress import Progress, no_progress
from rayloom_engine.models.decoder_spec import decoder_spec
from rayloom_engine.models.on_library.decoder import LibraryDecoder
from rayloom_engine.models.on_library.matrix import WeightFormat
from rayloom_engine.models.on_library.tensor_file import TensorFile, part_of
from rayloom_engine.models.on_library.weights import PlainWeights
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.models.weight_files import checked_files
from rayloom_engine.models.weight_packer import WeightPacker
from rayloom_engine.parallel.model_part import ModelPart, whole_part


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDecoder:
    """A decoder with its weights in place."""

    decoder: LibraryDecoder
    num_bytes_read: int  # bytes of weights read from files, in the files' types


def load_decoder(
    folder: Path,
    shape: ModelShape,
    form: WeightFormat,
    *,
    part: ModelPart | None = None,
    progress: Progress = no_progress,
) -> LoadedDecoder:
    """Returns a rank's part of the model in a Hugging Face folder, ready to run; without `part`, the whole model.

    Weights are rounded to the type of the format, then quantised if the format says so. If the files do not fit the
    shape, raises ModelError with the tensors' names before reading any weight.
    """
    files = checked_files(folder, shape)
    part = part or whole_part(shape.num_layers)
    form = replace(form, scheme=shape.scheme)
    weights = PlainWeights(decoder_spec(shape, part, form.cut_unit), form)
    num_bytes_read = _fill(weights, files, progress)
    return LoadedDecoder(decoder=LibraryDecoder(shape, part, weights), num_bytes_read=num_bytes_read)


def _fill(weights: PlainWeights, files: list[Path], progress: Progress) -> int:
    """Copies each tensor to its destination, and finishes the matrices. Returns the bytes read, in the files' types.

    Empties the dict of destinations. Otherwise the dict would keep the plain matrices alive next to the packed copies.
    """
    destinations = weights.destinations
    num_bytes_read = 0
    total = sum(destination.array.nbytes for destination in destinations.values())
    done = 0
    progress("load", done, total, "bytes")
    with WeightPacker(weights.matrices) as packer:
        for path in files:
            for name, whole in TensorFile(path).views(destinations):
                destination = destinations.pop(name)
                stored = part_of(whole, destination.part)
                num_bytes_read += stored.nbytes
                copy_elements(destination.array, stored.reshape(destination.array.shape))
                done += destination.array.nbytes
                del destination, stored  # else these variables would keep alive a matrix that the packer frees
                packer.read(name)
                progress("load", done, total, "bytes")
    return num_bytes_read

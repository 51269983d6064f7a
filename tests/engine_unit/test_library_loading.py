"""Loading of a checkpoint for the C library: types of files, parts, progress and memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayloom_engine.cpu_library.arrays import ELEMENTS
from rayloom_engine.errors import ModelError
from rayloom_engine.models.on_library.loader import load_decoder
from rayloom_engine.models.on_library.tensor_file import TensorFile
from rayloom_engine.models.shape import read_shape
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.parallel.stage import make_stages
from rayloom_engine.worker.library_computation import weight_format
from rt_library import ISAS, library_cache, load_on_library, open_library, to_torch
from rt_stages import stage_config
from rt_tiny import TinySequence, advance, tiny_checkpoint, tiny_variant

TOKEN_IDS = [5, 200, 17, 3, 3, 90, 41]

pytestmark = pytest.mark.skipif(not ISAS, reason="there is no C library")


def stored_as(folder: Path, dtype: torch.dtype, then: torch.dtype | None = None) -> Path:
    """Rounds all tensors of the folder's file to a type. `then`: the type of the stored tensors."""
    tensors = load_file(folder / "model.safetensors")
    rounded = {name: tensor.to(dtype).to(then or dtype) for name, tensor in tensors.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits_of(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = load_on_library(folder, ISAS[0], dtype)
    (logits,) = advance(model, library_cache(model, 1), [(TinySequence(TOKEN_IDS, [0]), len(TOKEN_IDS))])
    return logits


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_a_file_in_a_short_type_gives_the_bits_of_the_same_numbers_in_float32(
    stored: torch.dtype, held: torch.dtype, tmp_path: Path
) -> None:
    short = stored_as(tiny_variant(tmp_path / "short", "qwen3-biases"), stored)
    wide = stored_as(tiny_variant(tmp_path / "wide", "qwen3-biases"), stored, torch.float32)
    assert torch.equal(logits_of(short, held), logits_of(wide, held))


def test_a_part_of_a_tensor_is_read_where_it_lies(tmp_path: Path) -> None:
    folder = stored_as(tiny_variant(tmp_path, "llama"), torch.bfloat16)
    expected = load_file(folder / "model.safetensors")
    file = TensorFile(folder / "model.safetensors")
    assert set(file.names) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(to_torch(file.read(name).copy()), tensor)
    name = "model.layers.0.mlp.down_proj.weight"
    part = (slice(0, 64), slice(32, 48))
    assert torch.equal(to_torch(file.read(name, part).copy()), expected[name][part])


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_stage_reads_its_own_bytes_and_counts_each_once(quantization: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, num_hidden_layers=3, max_shard_size="100KB")
    form = weight_format(open_library(ISAS[0]), "bfloat16", quantization)  # type: ignore[arg-type]
    reports: list[tuple[int, int]] = []
    loaded = load_decoder(
        folder,
        read_shape(folder),
        form,
        part=ModelPart(make_stages(3, 3)[1]),
        progress=lambda phase, done, total, unit: reports.append((done, total)),
    )
    num_elements = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64  # qkv, o, gate, up and down, norms
    total = num_elements * ELEMENTS["bfloat16"].itemsize
    assert (reports[0], reports[-1]) == ((0, total), (total, total))
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert loaded.num_bytes_read == 4 * num_elements, "the file is in float32"


def test_a_checkpoint_that_does_not_fit_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, num_hidden_layers=3)
    shape = read_shape(tiny_checkpoint(tmp_path / "longer", num_hidden_layers=4))
    reports: list[int] = []
    with pytest.raises(ModelError, match=r"missing: model\.layers\.3\.input_layernorm\.weight"):
        load_decoder(
            folder,
            shape,
            weight_format(open_library(ISAS[0]), "float32", "none"),
            part=ModelPart(make_stages(4, 4)[0]),
            progress=lambda phase, done, total, unit: reports.append(done),
        )
    assert reports == []


_LOAD = """
import sys
from pathlib import Path
from rayloom_engine.config import load_config
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.worker.start import find_model, load_rank, part_of
config = load_config(Path(sys.argv[1]))
resolved, shape = find_model(config, no_progress)
load_rank(config, resolved, shape, no_progress, part=part_of(config, shape, 0))
print([name for name in ("torch", "rayloom_engine.parallel.process_link") if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("num_stages", "imported"), [(1, "[]"), (2, "['torch', 'rayloom_engine.parallel.process_link']")]
)
def test_ranks_have_imported_torch_before_they_meet_and_one_rank_never_does(
    num_stages: int, imported: str, tmp_path: Path
) -> None:
    model = tiny_checkpoint(tmp_path / "model")
    config = tmp_path / "config.json"
    config.write_text(stage_config(model, num_stages).model_dump_json())
    command = [sys.executable, "-c", _LOAD, str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == imported, ended.stdout + ended.stderr

"""The model on tensors that claim to be on a CUDA device: all results are complete, and no CPU tensor is used.

Fake tensors carry sizes, types and devices but no memory, so no device is needed, and no value is computed. The sampler
reads values and is left out.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rayloom_engine.kernels.kernel_set import choose_kernels
from rayloom_engine.kernels.target import Target
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.models.empty import empty_model
from rayloom_engine.models.shape import read_shape
from rayloom_engine.parallel.model_part import whole_part
from rayloom_engine.parallel.tensor_group import OneRank
from rt_tiny import VARIANTS, make_batch, tiny_variant

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch is built without CUDA")

CUDA = torch.device("cuda", 0)


def forward(folder: Path, tables_on: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of two decodes, a chunk and a whole prompt in one batch."""
    shape = read_shape(folder)
    kernels = choose_kernels(Target(device=CUDA, compute_dtype=torch.bfloat16))
    model, _ = empty_model(shape, whole_part(shape.num_layers), kernels)
    cache = KvPages.allocate(model.kv_layout, num_blocks=16, block_size=4, dtype=torch.bfloat16, device=CUDA)
    batch = make_batch([1, 1, 5, 6], [9, 3, 12, 6], [[1, 2, 3], [4], [5, 6, 7], [8, 9]])
    batch = dataclasses.replace(
        batch, block_tables_SB=batch.block_tables_SB.to(tables_on), slot_mapping_T=batch.slot_mapping_T.to(CUDA)
    )
    positions_T = torch.zeros(13, dtype=torch.int64, device=CUDA)
    cache.copy_blocks(((10, 11),))
    cache.clear_blocks((12,))
    hidden_TD = model.forward(positions_T, positions_T, batch, cache, OneRank())
    return hidden_TD, model.logits(hidden_TD)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_stays_on_its_device(variant: str, tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, variant)
    with torch.no_grad(), FakeTensorMode():
        hidden_TD, logits_TV = forward(folder, CUDA)
    assert (hidden_TD.device, hidden_TD.dtype, hidden_TD.shape) == (CUDA, torch.bfloat16, (13, 64))
    assert (logits_TV.device, logits_TV.dtype, logits_TV.shape) == (CUDA, torch.float32, (13, 256))


def test_a_tensor_on_another_device_is_found(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "llama")
    mixed = r"same device|Unhandled FakeTensor Device"
    with torch.no_grad(), FakeTensorMode(), pytest.raises(RuntimeError, match=mixed):
        forward(folder, torch.device("cpu"))

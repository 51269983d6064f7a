"""A step on tensors that claim to be on a CUDA device: all results are complete, and no CPU tensor is used.

Fake tensors have sizes, types and devices, but no memory and no values. So the test needs no device. Instead of running
Triton kernels, it checks that all of their tensors are on the device.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rayloom_engine.kernels.attention import triton_gpu as triton_attention
from rayloom_engine.kernels.kernel_set import choose_kernels
from rayloom_engine.kernels.rms_norm import triton_gpu as triton_norm
from rayloom_engine.kernels.target import Backend, Target
from rayloom_engine.kernels.triton import early_start
from rayloom_engine.kv import host_blocks
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.kv.host_blocks import HostBlocks, pin
from rayloom_engine.kv.host_file import HostFile
from rayloom_engine.kv.layout import KvLayout
from rayloom_engine.models.empty import empty_model
from rayloom_engine.models.shape import read_shape
from rayloom_engine.parallel.host_exchange import HostGroup, HostLink
from rayloom_engine.parallel.model_part import whole_part
from rayloom_engine.parallel.tensor_group import OneRank
from rayloom_engine.worker import torch_computation
from rayloom_engine.worker.gpu_sampler import GpuSampler
from rayloom_engine.worker.host_memory import RankHostMemory
from rayloom_engine.worker.torch_computation import TorchComputation, TorchPart
from rt_slots import make_slot
from rt_tiny import VARIANTS, WITH_EXPERTS, make_batch, tiny_variant

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch is built without CUDA")

CUDA = torch.device("cuda", 0)


@contextmanager
def fake_cuda() -> Iterator[list[str]]:
    """Tensors without memory, and launches without a GPU. Yields the names of the kernels that are launched."""
    from triton.runtime.jit import JITFunction

    launched: list[str] = []

    def run(kernel: JITFunction, *arguments: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> None:
        assert all(size > 0 for size in grid), (kernel.fn.__name__, grid)
        for value in (*arguments, *named.values()):
            if isinstance(value, torch.Tensor) and value.device != CUDA:
                raise RuntimeError(f"{kernel.fn.__name__}: expected all tensors on the same device, got {value.device}")
        launched.append(kernel.fn.__name__)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        # Facts of the device that decide how kernels are launched.
        patch.setattr(early_start, "starts_early", lambda device: True)
        patch.setattr(triton_attention, "_family", lambda device: "hopper")
        patch.setattr(triton_attention, "_num_sms", lambda device: 132)
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            yield launched


def forward(
    folder: Path, tables_on: torch.device, backend: Backend = "auto", *, is_single: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of two decodes, a chunk and a whole prompt in one batch; `is_single`: of one decode."""
    shape = read_shape(folder)
    kernels = choose_kernels(Target(device=CUDA, compute_dtype=torch.bfloat16, backend=backend))
    model, _ = empty_model(shape, whole_part(shape.num_layers), kernels)
    cache = KvPages.allocate(model.kv_layout, num_blocks=16, block_size=4, dtype=torch.bfloat16, device=CUDA)
    batch = make_batch([1, 1, 5, 6], [9, 3, 12, 6], [[1, 2, 3], [4], [5, 6, 7], [8, 9]])
    if is_single:
        batch = make_batch([1], [9], [[1, 2, 3]])
    batch = dataclasses.replace(
        batch, block_tables_SB=batch.block_tables_SB.to(tables_on), slot_mapping_T=batch.slot_mapping_T.to(CUDA)
    )
    positions_T = torch.zeros(sum(batch.query_lens), dtype=torch.int64, device=CUDA)
    cache.copy_blocks(((10, 11),))
    cache.clear_blocks((12,))
    hidden_TD = model.forward(positions_T, positions_T, batch, cache, OneRank())
    return hidden_TD, model.logits(hidden_TD)


@pytest.mark.parametrize("backend", ["plain", "auto"])
# Models with experts are left out: the router's values select rows, and fake tensors have no values.
@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - set(WITH_EXPERTS)))
def test_a_step_stays_on_its_device(variant: str, backend: Backend, tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, variant)
    with fake_cuda() as launched:
        hidden_TD, logits_TV = forward(folder, CUDA, backend)
    assert (hidden_TD.device, hidden_TD.dtype, hidden_TD.shape) == (CUDA, torch.bfloat16, (13, 64))
    assert (logits_TV.device, logits_TV.dtype, logits_TV.shape) == (CUDA, torch.float32, (13, 256))
    shape = read_shape(folder)
    num_layers, traits = shape.num_layers, shape.traits
    if backend == "plain":
        assert not launched
        return
    assert launched.count("rms_norm_kernel") == traits.num_norms * num_layers + 1
    assert launched.count("rotary_kv_write_kernel") == num_layers
    assert launched.count("attend_kernel") == 2 * num_layers, "decodes, then chunks"
    assert launched.count("silu_mul_kernel") == (num_layers if traits.activation == "silu" else 0)


def test_a_step_of_one_sequence_stays_on_its_device_and_has_products_of_one_row(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "llama")
    with fake_cuda() as launched:
        hidden_TD, logits_TV = forward(folder, CUDA, is_single=True)
    assert (hidden_TD.device, hidden_TD.dtype, hidden_TD.shape) == (CUDA, torch.bfloat16, (1, 64))
    assert (logits_TV.device, logits_TV.dtype, logits_TV.shape) == (CUDA, torch.float32, (1, 256))
    num_layers = read_shape(folder).num_layers
    assert launched.count("one_row_kernel") == 3 * num_layers + 1, "q, k, v; output of attention; down; the head"
    assert launched.count("gated_row_kernel") == num_layers
    assert launched.count("silu_mul_kernel") == 0


def test_copies_to_and_from_host_memory_gather_blocks_on_the_device() -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=2, head_dim=4)
    copies: list[tuple[str, str, tuple[int, ...], bool]] = []
    with fake_cuda(), pytest.MonkeyPatch.context() as patch:
        cache = KvPages.allocate(layout, num_blocks=4, block_size=4, dtype=torch.bfloat16, device=CUDA)
        host = HostBlocks(memoryview(bytearray(3 * layout.block_bytes(4, 2))), cache, 3, is_pinned=True)
        copy = torch.Tensor.copy_

        def noted(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            copies.append((source.device.type, to.device.type, tuple(to.shape), non_blocking))
            return copy(to, source, non_blocking)

        patch.setattr(torch.Tensor, "copy_", noted)
        host.store(((0, 2), (3, 1)))
        host.load(((1, 2),))
    one_block = (2 * 4 * 2 * 2 * 4,)
    assert copies == [("cuda", "cpu", one_block, True)] * 2 + [("cpu", "cuda", one_block, True)]


@pytest.mark.parametrize(("code", "is_pinned"), [(0, True), (2, False)])
def test_host_memory_that_cuda_does_not_pin_is_reported_and_leaves_no_error(
    code: int, is_pinned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cleared = []
    monkeypatch.setattr(host_blocks, "_clear_last_error", cleared.append)

    class Runtime:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            assert address and (num_bytes, flags) == (4096, 0)
            return code

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    assert pin(memoryview(bytearray(4096))) is is_pinned
    assert ("cannot be pinned (CUDA error 2)" in caplog.text) is not is_pinned
    assert bool(cleared) is not is_pinned


def test_the_last_error_is_cleared_in_the_runtime_that_torch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(cudaGetLastError=lambda: calls.append(path)))
    host_blocks._clear_last_error(
        "7f00-7f01 r--p 0000 08:01 1 /lib/libc.so.6\n"
        "7f02-7f03 r--p 0000 08:01 2 /torch/lib/libcudart-9.so.12\n"
        "7f03-7f04 r-xp 1000 08:01 2 /torch/lib/libcudart-9.so.12\n"
        "7f05-7f06 rw-p 0000 00:00 0 \n"
    )
    assert calls == ["/torch/lib/libcudart-9.so.12"]


def test_host_memory_is_pinned_once_for_all_caches_of_a_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each recovery with another number of blocks makes a new cache. CUDA refuses to pin the same memory twice."""
    pinned = []
    monkeypatch.setattr(torch_computation, "pin", lambda memory: pinned.append(memory) or False)
    layout = KvLayout(num_layers=1, num_kv_heads=2, head_dim=4)
    num_bytes = layout.block_bytes(4, 2)
    with fake_cuda():
        host = RankHostMemory(HostFile.open(None, "", num_bytes, tmp_path), 1)
        for num_blocks in (2, 3):
            cache = KvPages.allocate(layout, num_blocks=num_blocks, block_size=4, dtype=torch.bfloat16, device=CUDA)
            rank = SimpleNamespace(_device=CUDA, _cache=cache)
            TorchComputation.use_host_memory(rank, host)
            rank.store_blocks(((1, 0),))
    assert len(pinned) == 1 and host.is_pinned is False


@pytest.mark.parametrize("backend", ["plain", "auto"])
def test_a_tensor_on_another_device_is_found(backend: Backend, tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path, "llama")
    mixed = r"same device|Unhandled FakeTensor Device"
    with fake_cuda(), pytest.raises(RuntimeError, match=mixed):
        forward(folder, torch.device("cpu"), backend)


def test_a_launch_with_a_tensor_on_another_device_is_found() -> None:
    with fake_cuda(), pytest.raises(RuntimeError, match="rms_norm_kernel: expected all tensors on the same device"):
        triton_norm.rms_norm(torch.empty(2, 8, device=CUDA), torch.empty(8), 1e-5)


def test_a_choice_of_tokens_stays_on_its_device() -> None:
    masked = make_slot(seed=4)
    masked.allowed = np.array([5] * 8, dtype=np.int32)
    slots = [
        make_slot(temperature=0.0),
        make_slot(seed=1, top_p=0.9, logit_bias=((3, 1.0),)),
        make_slot(seed=2, repetition_penalty=1.2, min_tokens=9, stop_token_ids=(2,)),
        make_slot(seed=3, allowed_token_ids=(4, 5)),
        masked,
    ]
    with fake_cuda() as launched:
        sampler = GpuSampler(256, CUDA)
        ids_N = sampler.choose(torch.empty(5, 256, device=CUDA), slots)
        greedy_N = sampler.choose(torch.empty(1, 256, device=CUDA), slots[:1])
    assert (ids_N.device, ids_N.dtype, ids_N.shape) == (CUDA, torch.int64, (5,))
    assert (greedy_N.device, greedy_N.shape) == (CUDA, (1,))
    names = ["scan_kernel", "add_kernel", "adjust_kernel", "thresholds_kernel", "draw_kernel", "reduce_kernel"]
    assert sorted(set(launched)) == sorted(names)
    assert launched[-2:] == ["scan_kernel", "reduce_kernel"], "a greedy row needs two launches"


class HostMemoryOnly:
    """A TensorGroup and a StageLink that accept contiguous CPU tensors alone."""

    def __init__(self) -> None:
        self.num_calls = 0

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        self._accept(part)
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        self._accept(part)
        return torch.cat([part, part], dim=1)

    def receive(self, num_tokens: int) -> torch.Tensor:
        return torch.empty(num_tokens, 8, dtype=torch.bfloat16)

    def send(self, hidden_TD: torch.Tensor) -> None:
        self._accept(hidden_TD)

    def _accept(self, tensor: torch.Tensor) -> None:
        assert tensor.device.type == "cpu" and tensor.is_contiguous()
        self.num_calls += 1


def test_ranks_that_share_a_gpu_exchange_copies_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer may read a copy at once, so a copy to host memory must be complete; the GPU orders copies to itself."""
    copies: list[tuple[str, str, bool]] = []
    copy = torch.Tensor.copy_

    def noted_copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copies.append((source.device.type, target.device.type, non_blocking))
        return copy(target, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", noted_copy)
    with fake_cuda():
        host = HostMemoryOnly()
        group, link = HostGroup(host), HostLink(host, "cuda")
        part_TD = torch.empty(8, 3, device=CUDA, dtype=torch.bfloat16).t()
        assert group.all_reduce(part_TD) is part_TD
        whole_NV = group.gather(torch.empty(3, 5, device=CUDA))
        assert whole_NV is not None
        assert (whole_NV.device, whole_NV.shape) == (CUDA, (3, 10))
        link.send(part_TD)
        hidden_TD = link.receive(3)
        assert (hidden_TD.device, hidden_TD.dtype, hidden_TD.shape) == (CUDA, torch.bfloat16, (3, 8))
    assert host.num_calls == 3
    to_host = ("cuda", "cpu", False)
    assert copies == [to_host, ("cpu", "cuda", True), to_host, to_host]


@pytest.mark.parametrize(
    ("free", "num_sharing", "own_free"),
    [(60, 1, 60), (60, 2, 30), (70, 2, 30), (40, 2, 20)],
)
def test_a_rank_plans_with_its_part_of_the_memory_of_its_gpu(
    free: int, num_sharing: int, own_free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU has 80 bytes, of which torch has reserved 10 in this process."""
    shape = read_shape(tiny_variant(tmp_path, "llama"))
    with fake_cuda():
        kernels = choose_kernels(Target(device=CUDA, compute_dtype=torch.bfloat16, backend="plain"))
        model, _ = empty_model(shape, whole_part(shape.num_layers), kernels)
    part = TorchPart(model=model, num_bytes_read=0, dtype="bfloat16", compute_dtype="bfloat16")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {CUDA: (free, 80)}[device])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: {CUDA: 10}[device])
    assert part.device_type == "cuda"
    assert part.free_bytes(num_sharing) == own_free

"""The kernels of attention that are compiled before requests arrive, and a native model with sinks on them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayloom_engine.kernels.attention import AttentionBatch, triton_gpu, warm_up_attention
from rayloom_engine.kernels.kernel_set import choose_kernels
from rayloom_engine.kernels.kv_write import choose_kv_write
from rayloom_engine.kernels.target import Target
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.kv.layout import KvLayout
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.model import RankModel
from rayloom_engine.models.on_transformers.attention import PagedStep, Scores
from rayloom_engine.models.shape import read_shape
from rayloom_engine.parallel.tensor_group import OneRank
from rt_sinks import sink_model
from rt_tiny import logits_of, make_batch, tiny_variant

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
TARGET = Target(device=DEVICE, compute_dtype=torch.float32, backend="triton")
TOKEN_IDS = [index * 7 % 256 for index in range(35)]
RULES: dict[str, Any] = {
    "": {"soft_cap": None, "sinks_H": None},
    " capped": {"soft_cap": 30.0, "sinks_H": None},
    " with sinks": {"soft_cap": None, "sinks_H": torch.zeros(4, device=DEVICE)},
}


def logits_on_device(model: RankModel, cache: KvPages, token_ids: list[int], cuts: tuple[int, ...]) -> torch.Tensor:
    """The logits [T, V] of a sequence that is computed in these pieces."""
    found = []
    done = 0
    for count in cuts:
        end = done + count
        batch = make_batch([count], [end], [range(cache.num_blocks)], cache.block_size)
        on_device = replace(
            batch,
            block_tables_SB=batch.block_tables_SB.to(DEVICE),
            slot_mapping_T=batch.slot_mapping_T.to(DEVICE),
        )
        inputs = torch.tensor(token_ids[done:end], device=DEVICE)
        hidden_TD = model.forward(inputs, torch.arange(done, end, device=DEVICE), on_device, cache, OneRank())
        found.append(model.logits(hidden_TD))
        done = end
    return torch.cat(found)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are launched, with the constants by which they are compiled."""
    found: list[str] = []
    for name in ("attend_kernel", "combine_kernel"):
        kernel = getattr(triton_gpu.triton_kernels, name)

        class Recording:
            def __getitem__(self, grid: tuple[int, ...], name: str = name, kernel: Any = kernel) -> Any:
                def launch(*arguments: object, **constants: object) -> None:
                    extra = {"CHUNKS": " chunk", "HAS_SOFT_CAP": " capped", "HAS_SINKS": " with sinks"}
                    splits = f" of {constants['SPLITS']}" if "SPLITS" in constants else ""
                    found.append(name + splits + "".join(text for key, text in extra.items() if constants.get(key)))
                    kernel[grid](*arguments, **constants)

                return launch

        monkeypatch.setattr(triton_gpu.triton_kernels, name, Recording())
    return found


@pytest.fixture
def combines(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels that combine few and many splits, both of which a GPU with 132 multiprocessors needs."""
    monkeypatch.setattr(triton_gpu, "_num_sms", lambda device: 132)
    return {"combine_kernel of 8", "combine_kernel of 64"}


@pytest.mark.parametrize("rule", RULES)
def test_a_warm_up_launches_every_kernel(launched: list[str], rule: str, combines: set[str]) -> None:
    pages = torch.zeros((1, 16, 2, 2, 16), device=DEVICE)
    warm_up_attention(TARGET, num_heads=4, pages=pages, **RULES[rule])
    assert set(launched) == {f"attend_kernel{rule}", f"attend_kernel chunk{rule}", *combines}


@pytest.mark.parametrize("rule", RULES)
def test_the_first_token_of_a_transformers_model_compiles_the_kernels_of_later_chunks(
    launched: list[str], rule: str, combines: set[str]
) -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=2, head_dim=16)
    cache = KvPages.allocate(layout, num_blocks=2, block_size=16, dtype=torch.float32, device=DEVICE)
    batch = AttentionBatch(
        query_lens=(1,),
        context_lens=(1,),
        block_tables_SB=torch.zeros((1, 1), dtype=torch.int64, device=DEVICE),
        slot_mapping_T=torch.zeros(1, dtype=torch.int64, device=DEVICE),
    )
    step = PagedStep(choose_kernels(TARGET), choose_kv_write(TARGET))
    query_THD, key_value_T2KD = torch.zeros((1, 4, 16), device=DEVICE), torch.zeros((1, 2, 2, 16), device=DEVICE)
    scores = Scores(scale=0.25, window=None, **RULES[rule])

    step.begin(batch, cache)
    step.attend(0, query_THD, key_value_T2KD, scores)
    assert set(launched) == {f"attend_kernel{rule}", f"attend_kernel chunk{rule}", *combines}
    launched.clear()
    step.attend(0, query_THD, key_value_T2KD, scores)
    assert launched == [f"attend_kernel{rule}"]


@pytest.mark.parametrize("rule", [" capped", " with sinks"])
def test_the_warm_up_of_a_native_model_launches_the_kernels_of_its_steps(
    launched: list[str], rule: str, tmp_path: Path
) -> None:
    if rule == " capped":
        folder = tiny_variant(tmp_path, "gemma2")
        shape = read_shape(folder)
    else:
        ours, _ = sink_model(tmp_path)
        folder, shape = ours.folder, ours.shape
    model = load_model(folder, shape, choose_kernels(TARGET), dtype=torch.float32).model
    cache = KvPages.allocate(model.kv_layout, num_blocks=2, block_size=16, dtype=torch.float32, device=DEVICE)
    model.warm_up(cache)
    compiled = set(launched)
    launched.clear()
    logits_on_device(model, cache, TOKEN_IDS[:6], (5, 1))
    assert set(launched) == {f"attend_kernel{rule}", f"attend_kernel chunk{rule}"}
    assert set(launched) < compiled


def test_a_native_model_with_sinks_has_the_logits_of_transformers(tmp_path: Path) -> None:
    ours, theirs = sink_model(tmp_path)
    model = load_model(ours.folder, ours.shape, choose_kernels(TARGET), dtype=torch.float32).model
    cache = KvPages.allocate(model.kv_layout, num_blocks=3, block_size=16, dtype=torch.float32, device=DEVICE)
    found = logits_on_device(model, cache, TOKEN_IDS, (20, 1, 14))
    torch.testing.assert_close(found.cpu(), logits_of(theirs, TOKEN_IDS), atol=1e-3, rtol=0)

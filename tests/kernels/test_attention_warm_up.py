"""The kernels of attention that are compiled before requests arrive."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from rayloom_engine.kernels.attention import AttentionBatch, triton_gpu, warm_up_attention
from rayloom_engine.kernels.kernel_set import choose_kernels
from rayloom_engine.kernels.kv_write import choose_kv_write
from rayloom_engine.kernels.target import Target
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.kv.layout import KvLayout
from rayloom_engine.models.on_transformers.attention import PagedStep, Scores

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
TARGET = Target(device=DEVICE, compute_dtype=torch.float32, backend="triton")
RULES: dict[str, Any] = {
    "": {"soft_cap": None, "sinks_H": None},
    " capped": {"soft_cap": 30.0, "sinks_H": None},
    " with sinks": {"soft_cap": None, "sinks_H": torch.zeros(4, device=DEVICE)},
}


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
                    found.append(name + "".join(text for key, text in extra.items() if constants.get(key)))
                    kernel[grid](*arguments, **constants)

                return launch

        monkeypatch.setattr(triton_gpu.triton_kernels, name, Recording())
    return found


@pytest.mark.parametrize("rule", RULES)
def test_a_warm_up_launches_every_kernel(launched: list[str], rule: str) -> None:
    pages = torch.zeros((1, 16, 2, 2, 16), device=DEVICE)
    warm_up_attention(TARGET, num_heads=4, pages=pages, **RULES[rule])
    assert set(launched) == {f"attend_kernel{rule}", f"attend_kernel chunk{rule}", "combine_kernel"}


@pytest.mark.parametrize("rule", RULES)
def test_the_first_token_of_a_transformers_model_compiles_the_kernels_of_later_chunks(
    launched: list[str], rule: str
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
    assert set(launched) == {f"attend_kernel{rule}", f"attend_kernel chunk{rule}", "combine_kernel"}
    launched.clear()
    step.attend(0, query_THD, key_value_T2KD, scores)
    assert launched == [f"attend_kernel{rule}"]

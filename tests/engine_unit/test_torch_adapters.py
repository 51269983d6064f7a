"""LoRA adapters on torch: results equal PEFT's in float32, also if a step mixes adapters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rayloom_engine.core.adapter import Adapter
from rayloom_engine.errors import ModelError
from rayloom_engine.models.adapters.peft_config import read_peft_config
from rayloom_engine.models.adapters.peft_folder import adapter_of
from rt_adapters import peft_logits, write_adapter
from rt_tiny import TinySequence, advance, load_tiny, make_cache, tiny_variant, transformers_logits

TOKENS = [5, 9, 17, 33, 65, 129, 200, 3, 77, 12]


def test_sequences_of_one_step_have_their_own_adapters(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path / "model", "llama-biases")
    first = write_adapter(tmp_path / "first", folder, seed=1, rank=8)
    second = write_adapter(
        tmp_path / "second", folder, seed=2, rank=16, matrices=("k_proj", "up_proj"), use_rslora=True
    )
    model = load_tiny(folder)
    model.adapters.load(0, adapter_of(first))
    model.adapters.load(1, adapter_of(second))
    cache = make_cache(model.shape)
    sequences = [TinySequence(TOKENS, range(index * 3, index * 3 + 3)) for index in range(3)]
    model.adapters.begin_step(np.repeat(np.array([1, -1, 0], dtype=np.int32), len(TOKENS)))
    found = advance(model, cache, [(sequence, len(TOKENS)) for sequence in sequences])
    expected = [
        peft_logits(folder, second, TOKENS),
        transformers_logits(folder, TOKENS),
        peft_logits(folder, first, TOKENS),
    ]
    for logits, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    assert (expected[0] - expected[1]).abs().max() > 0.1


def test_an_adapter_that_cannot_be_loaded_gives_no_token_of_the_plain_model(tmp_path: Path) -> None:
    folder = tiny_variant(tmp_path / "model", "llama-biases")
    model = load_tiny(folder)
    usable = adapter_of(write_adapter(tmp_path / "adapter", folder, seed=1, rank=8))
    with pytest.raises(ModelError, match="have changed"):
        model.adapters.load(0, Adapter(usable.path, bytes(16)))
    sequences = [TinySequence(TOKENS, range(index * 3, index * 3 + 3)) for index in range(2)]
    model.adapters.begin_step(np.repeat(np.array([0, -1], dtype=np.int32), len(TOKENS)))
    with_it, without = advance(model, make_cache(model.shape), [(sequence, len(TOKENS)) for sequence in sequences])
    assert with_it.isnan().all()
    torch.testing.assert_close(without, transformers_logits(folder, TOKENS), rtol=1e-4, atol=1e-4)
    model.adapters.load(0, usable)
    model.adapters.begin_step(np.zeros(len(TOKENS), dtype=np.int32))
    (again,) = advance(model, make_cache(model.shape), [(TinySequence(TOKENS, range(3)), len(TOKENS))])
    torch.testing.assert_close(again, peft_logits(folder, Path(usable.path), TOKENS), rtol=1e-4, atol=1e-4)


def test_an_adapter_that_belongs_to_changed_matrices_is_refused(tmp_path: Path) -> None:
    """PEFT changes the model's own matrices before it trains such an adapter."""
    folder = tiny_variant(tmp_path / "model", "llama")
    for start in ("pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga"):
        adapter = write_adapter(tmp_path / start, folder, init_lora_weights=start)
        with pytest.raises(ModelError, match=f"init_lora_weights is '{start}', and such an adapter belongs to changed"):
            read_peft_config(adapter)
    for start in (True, False, "gaussian", "eva", "orthogonal"):
        read_peft_config(write_adapter(tmp_path / f"plain-{start}", folder, init_lora_weights=start))

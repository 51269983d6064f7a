"""A rank on a GPU whose weights are random: a model's sizes are enough, and no checkpoint is read."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from rayloom_engine.config import BLOCK_SIZE
from rayloom_engine.kernels.backend import Backend
from rayloom_engine.kernels.kernel_set import choose_kernels
from rayloom_engine.kernels.target import Target
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.models.empty import empty_model
from rayloom_engine.models.model import RankModel
from rayloom_engine.models.shape import ModelShape, read_shape
from rayloom_engine.parallel.model_part import whole_part
from rayloom_engine.worker.torch_computation import DecodeLimits, TorchComputation

_LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
    "tie_word_embeddings": False,
}
_SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
SHAPES = {"llama-3.1-8b": _LLAMA_3_1_8B, "smollm2-135m": _SMOLLM2_135M}


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRank:
    shape: ModelShape
    model: RankModel
    cache: KvPages

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a decode step reads. An untied embedding is left out: a step reads few of its rows."""
        num = self.shape.num_parameters
        if not self.shape.tie_word_embeddings:
            num -= self.shape.vocab_size * self.shape.hidden_size
        return num * 2

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of the keys and values of `num_tokens` tokens."""
        return self.shape.kv_bytes_per_token(2) * num_tokens

    def computation(self, limits: DecodeLimits | None) -> TorchComputation:
        """Returns the rank's computation: with CUDA graphs for steps within the limits, or without."""
        return TorchComputation(self.model, self.cache, limits)


def make_rank(name: str, *, num_tokens: int, device: torch.device, backend: Backend = "auto") -> RandomRank:
    """Returns a rank in bfloat16 with a cache of at least `num_tokens` tokens. `name`: one of SHAPES."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]), encoding="utf-8")
        shape = read_shape(Path(folder))
    kernels = choose_kernels(Target(device=device, compute_dtype=torch.bfloat16, backend=backend))
    model, destinations = empty_model(shape, whole_part(shape.num_layers), kernels)
    generator = torch.Generator(device).manual_seed(0)
    for tensor_name, destination in destinations.items():
        if tensor_name.endswith("norm.weight"):
            destination.tensor.fill_(1.0)
        else:
            destination.tensor.normal_(std=0.02, generator=generator)
    for scheme in model.schemes:
        scheme.finish()
    cache = KvPages.allocate(
        model.kv_layout,
        num_blocks=-(-num_tokens // BLOCK_SIZE) + 1,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        device=device,
    )
    return RandomRank(shape=shape, model=model, cache=cache)

"""A tiny model with attention sinks: the attention of gpt-oss with the MLP of Llama.

The attention is that of transformers' gpt-oss: sinks, biases, layers with and without a window in turn, and YaRN whose
bounds are not rounded. So its logits are a reference for a native decoder, without experts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rayloom_engine.kernels.backend import Backend
from rayloom_engine.models.checkpoint.config_json import ConfigJson
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.model import RankModel
from rayloom_engine.models.on_library.loader import load_decoder
from rayloom_engine.models.rope.parameters import read_rope
from rayloom_engine.models.shape import ModelShape
from rayloom_engine.models.traits import Traits
from rayloom_engine.parallel.model_part import ModelPart
from rayloom_engine.worker.library_computation import weight_format
from rt_tiny import VOCAB_SIZE, cpu_kernels

if TYPE_CHECKING:
    from rt_library import LibraryModel

NUM_LAYERS = 3
HIDDEN_SIZE = 64
INTERMEDIATE_SIZE = 96
MAX_POSITIONS = 1024


@dataclass(frozen=True, kw_only=True)
class Heads:
    query: int = 4
    key_value: int = 2
    dim: int = 64
    window: int = 8  # of the first and the last layer


GPT_OSS_LIKE = Heads()


@dataclass(frozen=True, kw_only=True)
class SinkModel:
    folder: Path  # has only the weights
    shape: ModelShape

    def without_sinks(self, folder: Path) -> SinkModel:
        """The same model without its sinks."""
        weights = {name: each for name, each in self.weights.items() if not name.endswith("sinks")}
        traits = dataclasses.replace(self.shape.traits, has_sinks=False)
        return _saved(folder, weights, dataclasses.replace(self.shape, traits=traits))

    def with_weights(self, folder: Path, suffix: str, value: float) -> SinkModel:
        """The same model with this value in all weights whose names end with `suffix`."""
        changed = {name: torch.full_like(each, value) for name, each in self.weights.items() if name.endswith(suffix)}
        return self.with_tensors(folder, changed)

    def with_tensors(self, folder: Path, changed: dict[str, torch.Tensor]) -> SinkModel:
        """The same model with some other tensors."""
        return _saved(folder, {**self.weights, **changed}, self.shape)

    def with_cap(self, cap: float) -> SinkModel:
        """The same model with a soft cap of the scores."""
        traits = dataclasses.replace(self.shape.traits, score_cap=cap)
        return dataclasses.replace(self, shape=dataclasses.replace(self.shape, traits=traits))

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.folder / "model.safetensors")

    def on_torch(
        self,
        dtype: torch.dtype = torch.float32,
        backend: Backend = "plain",
        part: ModelPart | None = None,
        compute_dtype: torch.dtype = torch.float32,
    ) -> RankModel:
        """The model with weights that are rounded to `dtype`."""
        return load_model(self.folder, self.shape, cpu_kernels(compute_dtype, backend), dtype=dtype, part=part).model

    def on_library(
        self, isa: str, dtype: torch.dtype = torch.float32, num_threads: int = 2, part: ModelPart | None = None
    ) -> LibraryModel:
        from rt_library import LibraryModel, open_library, type_name

        form = weight_format(open_library(isa, num_threads), type_name(dtype), "none")
        return LibraryModel(load_decoder(self.folder, self.shape, form, part=part).decoder)


def sink_model(folder: Path, heads: Heads = GPT_OSS_LIKE) -> tuple[SinkModel, Any]:
    """A model whose weights are written into `folder`, and the same model in transformers' modules."""
    from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    class Mlp(LlamaMLP):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return super().forward(x), None  # gpt-oss also returns scores of the router

    config = GptOssConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=heads.query,
        num_key_value_heads=heads.key_value,
        head_dim=heads.dim,
        sliding_window=heads.window,
        max_position_embeddings=MAX_POSITIONS,
        num_local_experts=1,
        num_experts_per_tok=1,
        initializer_range=0.2,
        # In rounded bounds, the blend of the frequencies would end at pair 8 instead of 7.5 if a head has 64 elements.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "truncate": False,
        },
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = GptOssForCausalLM(config)
    of_mlp = LlamaConfig(hidden_size=HIDDEN_SIZE, intermediate_size=INTERMEDIATE_SIZE)
    for layer in model.model.layers:
        layer.mlp = Mlp(of_mlp)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp" in name:
                parameter.normal_(0.0, 0.2)
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.uniform_(-0.5, 0.5)
            elif name.endswith("sinks"):
                # The highest scores of a head are about 3 to 10.
                parameter.copy_(torch.linspace(-2.0, 15.0, heads.query))
    return _saved(folder, model.state_dict(), _shape(config, heads)), model.eval()


def _shape(config: Any, heads: Heads) -> ModelShape:
    values = ConfigJson(path=Path("config.json"), values=config.to_dict())
    return ModelShape(
        architecture="GptOssForCausalLM",
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_heads=heads.query,
        num_kv_heads=heads.key_value,
        head_dim=heads.dim,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        rope=read_rope(values, heads.dim, MAX_POSITIONS),
        layer_windows=(heads.window, None, heads.window),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=False,
        checkpoint_dtype="float32",
        eos_token_ids=(),
        traits=Traits(has_sinks=True),
    )


def _saved(folder: Path, weights: dict[str, torch.Tensor], shape: ModelShape) -> SinkModel:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return SinkModel(folder=folder, shape=shape)

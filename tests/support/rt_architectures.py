"""Tiny random checkpoints of many architectures, made by transformers, and the greedy tokens that it generates."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 256
NUM_TOKENS = 20

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # With random weights of this size, no second token is nearly as likely as the most likely token.
    "initializer_range": 0.2,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_num_experts": 4,
    "moe_k": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 32,
    "head_dim": 16,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_ALTERNATING = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}


@dataclass(frozen=True, slots=True)
class TinyArchitecture:
    """`model_type` of transformers, and settings that differ from the common settings of tiny models."""

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)


def _plain(*model_types: str) -> dict[str, TinyArchitecture]:
    return {model_type: TinyArchitecture(model_type) for model_type in model_types}


def _with(settings: dict[str, Any], *model_types: str) -> dict[str, TinyArchitecture]:
    return {model_type: TinyArchitecture(model_type, settings) for model_type in model_types}


ARCHITECTURES: dict[str, TinyArchitecture] = {
    **_plain("llama", "mistral", "qwen2", "qwen3"),
    **_plain("apertus", "arcee", "biogpt", "bitnet", "cohere", "gemma", "gpt_neox", "granite", "hyperclovax"),
    **_plain("jais2", "olmo", "olmo2", "opt", "persimmon", "phi", "phi3", "smollm3", "stablelm", "starcoder2"),
    **_with({"head_dim": 16}, "ernie4_5", "glm", "glm4", "hunyuan_v1_dense", "ministral3", "nanochat", "nemotron"),
    **_with({"head_dim": 16}, "helium", "seed_oss"),
    **_with({"head_dim": 16, **_ALTERNATING}, "cohere2", "cwm", "exaone4", "gemma2", "gemma3_text", "granite_swa"),
    **_with({"head_dim": 16, **_ALTERNATING}, "ministral", "olmo3", "vaultgemma"),
    **_with({"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256}, "gpt2", "gpt_bigcode"),
    **_with(
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            **_ALTERNATING,
        }
        | {"vocab_size_per_layer_input": VOCAB_SIZE},
        "gemma4_text",
    ),
    **_with(_EXPERTS, "ernie4_5_moe", "flex_olmo", "glm4_moe", "granitemoe", "granitemoeshared", "hunyuan_v1_moe"),
    **_with(_EXPERTS, "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "solar_open", "dots1"),
    **_with({**_EXPERTS, **_ALTERNATING}, "afmoe", "exaone_moe", "gpt_oss"),
    **_with({**_EXPERTS, **_LATENT, "head_dim": 8}, "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    **_with({**_LATENT, "head_dim": 8}, "minicpm3", "youtu"),
    "modernbert-decoder": TinyArchitecture("modernbert-decoder", {"local_attention": 16}),
}

# Models that the engine refuses, one or two for each reason: model type -> other settings in config.json.
REFUSED: dict[str, dict[str, Any]] = {
    "t5": {},
    "bart": {},
    "mamba": {},
    "jamba": {},
    "rwkv": {},
    "qwen3_next": {},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "bloom": {},
    "falcon": {},
    "gptj": {},
    "mpt": {},
    "bert": {"num_hidden_layers": 2, "is_decoder": False},
    "doge": {"num_hidden_layers": 2},
    "diffllama": {"num_hidden_layers": 2},
    "llama4_text": {"num_hidden_layers": 2},
}


def config_alone(folder: Path, architecture: TinyArchitecture) -> Path:
    """Writes the config.json of the architecture's tiny checkpoint into `folder`, without weights."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = _config(architecture)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)
    return folder


def architecture_checkpoint(folder: Path, architecture: TinyArchitecture) -> Path:
    """A checkpoint in float32 with random weights, written into `folder`. Equal architectures give equal weights."""
    import transformers

    config = _config(architecture)
    torch.manual_seed(zlib.crc32(architecture.model_type.encode()))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)  # random, because the default would hide a missing norm
            elif name.endswith(("bias", "sinks")):
                parameter.uniform_(-0.5, 0.5)
    model.to(torch.float32).save_pretrained(folder)
    return folder


def _config(architecture: TinyArchitecture) -> Any:
    import transformers

    settings = {**_COMMON, **architecture.settings}
    if "n_embd" in settings:
        for alias in ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
            del settings[alias]
    return transformers.AutoConfig.for_model(architecture.model_type, **settings)


def greedy_tokens(folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """The greedy tokens that transformers generates after each prompt, one prompt at a time, in float32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    found = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        found.append(ids[0, len(prompt) :].tolist())
    return found

"""Tiny models with random weights: checkpoints written by transformers, and batches and caches to run them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rayloom_engine.kernels.attention import AttentionBatch
from rayloom_engine.kernels.backend import Backend
from rayloom_engine.kernels.kernel_set import KernelSet, choose_kernels
from rayloom_engine.kernels.target import Target
from rayloom_engine.kv.cache import KvPages
from rayloom_engine.kv.layout import KvLayout
from rayloom_engine.models.loader import load_model
from rayloom_engine.models.model import RankModel
from rayloom_engine.models.shape import ModelShape, read_shape
from rayloom_engine.parallel.tensor_group import OneRank

VOCAB_SIZE = 256
BLOCK_SIZE = 4

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # With random weights of this size, the logits of two positions differ by far more than the tolerance of the tests.
    "initializer_range": 0.2,
}
_GEMMA: dict[str, Any] = {"head_dim": 32, "tie_word_embeddings": True}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# variant -> (architecture, differences from the common config)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-head-each": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama-wide-heads": ("LlamaForCausalLM", {"head_dim": 32}),
    "llama3-rope": ("LlamaForCausalLM", {"rope_parameters": _LLAMA3_ROPE, "num_hidden_layers": 3}),
    "llama-linear-rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama-yarn": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 8}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-some-windows": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    # Half of each head is rotated. From five tokens on, a prompt has the long factors.
    "phi3": (
        "Phi3ForCausalLM",
        {
            "sliding_window": 12,
            "original_max_position_embeddings": 4,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0] * 4,
                "long_factor": [1.0, 1.5, 3.0, 8.0],
                "attention_factor": 1.1,
            },
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.5,
            "attention_bias": True,
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **_GEMMA,
            "sliding_window": 6,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "sliding_window": 6,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
            },
        },
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # The model has a layer without experts and a layer with a shared expert.
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 128,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3-biases": ("Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "swiglu_limit": 1.5,  # so low that gates and ups are clamped
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "truncate": False,
            },
        },
    ),
}
WITH_EXPERTS = ("mixtral", "qwen2-moe", "gpt-oss")
# Not in VARIANTS, because their layers cannot be divided between ranks: a norm of queries or keys covers all heads.
WIDE_NORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("Olmo2ForCausalLM", {"num_key_value_heads": 1, "attention_bias": True}),
}


def tiny_checkpoint(
    folder: Path, architecture: str = "LlamaForCausalLM", *, max_shard_size: str = "5GB", **overrides: Any
) -> Path:
    """A checkpoint in float32 with random weights, written into `folder`. Equal arguments give equal weights."""
    import transformers

    config_class = getattr(transformers, architecture).config_class
    settings = {**_COMMON, **overrides}
    torch.manual_seed(zlib.crc32(repr((architecture, sorted(settings.items()))).encode()))
    model = getattr(transformers, architecture)(config_class(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)  # random, because the default of 1 would hide a missing norm
            elif name.endswith((".bias", "_bias", ".sinks")):
                parameter.uniform_(-0.5, 0.5)
    model.to(torch.float32).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def slow_checkpoint(folder: Path) -> Path:
    """A checkpoint of one layer, with a tokenizer. Attention takes nearly all of its computing time.

    Attention costs 16,384 floating-point operations for each token and position. So one thread needs seconds for a
    chunk of 4,096 tokens.
    """
    tiny_tokenizer(folder)
    return tiny_checkpoint(
        folder,
        hidden_size=512,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=64,
        max_position_embeddings=32_768,
    )


def tiny_variant(folder: Path, variant: str) -> Path:
    architecture, overrides = (VARIANTS | WIDE_NORMS)[variant]
    return tiny_checkpoint(folder, architecture, **overrides)


def tiny_tokenizer(folder: Path, *, has_tools: bool = False, opens_reasoning: bool = False) -> Path:
    """A byte-level tokenizer for a tiny checkpoint: ids 0 to 3 are special (2 ends a text), then printable ASCII.

    `has_tools`: the chat template names tools in a few tokens. Otherwise the server describes them in a long message.
    `opens_reasoning`: answers begin inside the reasoning, which `</think>` ends.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    specials = ["<pad>", "<bos>", "<eos>", "<turn>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB_SIZE - len(specials)]
    vocabulary = {token: token_id for token_id, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tools = "{% for tool in tools or [] %}<turn><tool_call>{{ tool.function.name | tojson }}<eos>{% endfor %}"
    template = (tools if has_tools else "") + (
        "{% for message in messages %}<turn>{{ message['role'] }}:{{ message['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<turn>assistant:"
        + ("<think>{# </think> #}" if opens_reasoning else "")
        + "{% endif %}"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def transformers_logits(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits of every position, [T, V], float32, by transformers' eager attention."""
    return logits_of(transformers_model(folder), token_ids)


def transformers_model(folder: Path) -> Any:
    """The model in float32, with eager attention."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def logits_of(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits of every position, [T, V], by a model of transformers."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits


def cpu_kernels(compute_dtype: torch.dtype = torch.float32, backend: Backend = "auto") -> KernelSet:
    return choose_kernels(Target(device=torch.device("cpu"), compute_dtype=compute_dtype, backend=backend))


def load_tiny(folder: Path, backend: Backend = "auto") -> RankModel:
    return load_model(folder, read_shape(folder), cpu_kernels(backend=backend), dtype=torch.float32).model


def make_cache(shape: ModelShape, num_blocks: int = 64, block_size: int = BLOCK_SIZE) -> KvPages:
    return KvPages.allocate(
        KvLayout(num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim),
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def make_batch(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int = BLOCK_SIZE,
) -> AttentionBatch:
    """A batch whose slots are computed from its block tables."""
    width = max(len(table) for table in block_tables)
    slots = [
        table[position // block_size] * block_size + position % block_size
        for query_len, context_len, table in zip(query_lens, context_lens, block_tables, strict=True)
        for position in range(context_len - query_len, context_len)
    ]
    padded = [list(table) + [0] * (width - len(table)) for table in block_tables]
    return AttentionBatch(
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
        block_tables_SB=torch.tensor(padded, dtype=torch.int64),
        slot_mapping_T=torch.tensor(slots, dtype=torch.int64),
    )


@dataclass
class TinySequence:
    """One sequence of a test: its tokens, its blocks (not contiguous), and the number of computed tokens."""

    token_ids: Sequence[int]
    block_table: Sequence[int]
    num_computed: int = 0


def advance(model: RankModel, cache: KvPages, steps: Sequence[tuple[TinySequence, int]]) -> list[torch.Tensor]:
    """Computes more tokens of each sequence in one forward call. Returns for each sequence its logits, [tokens, V]."""
    query_lens = [count for _, count in steps]
    context_lens = [sequence.num_computed + count for sequence, count in steps]
    batch = make_batch(query_lens, context_lens, [sequence.block_table for sequence, _ in steps], cache.block_size)
    spans = [(sequence, range(sequence.num_computed, sequence.num_computed + count)) for sequence, count in steps]
    token_ids = torch.tensor([sequence.token_ids[position] for sequence, span in spans for position in span])
    positions = torch.tensor([position for _, span in spans for position in span])
    logits = model.logits(model.forward(token_ids, positions, batch, cache, OneRank()))
    for (sequence, count), context_len in zip(steps, context_lens, strict=True):
        assert context_len <= len(sequence.token_ids), (count, context_len)
        sequence.num_computed = context_len
    return list(logits.split(query_lens))

"""Published models whose config.json is in tools/model_configs/, each with its repositories on the hub.

The files have the fields that determine sizes, with the values that the repositories publish. Fields that no engine
reads are left out. A file in gguf/ is the config.json that the engine writes for a GGUF file. `billions` and `active`
are the numbers of parameters on the model's card. Tests compare these numbers with those that the engine and
transformers count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CONFIGS = Path(__file__).resolve().parent / "model_configs"


@dataclass(frozen=True, slots=True)
class Published:
    repositories: tuple[str, ...]  # owner/name on the hub; all have the same sizes
    billions: float
    active: float | None = None  # billions of parameters that a token uses in a mixture-of-experts model


def _one(repository: str, billions: float, active: float | None = None) -> Published:
    return Published((repository,), billions, active)


def _chat(repository: str, billions: float, active: float | None = None, suffix: str = "-Instruct") -> Published:
    """A base model and its chat model, whose name has a suffix."""
    return Published((repository, repository + suffix), billions, active)


_LLAMA_RED_HAT = "RedHatAI/Meta-Llama-3.1"
_LLAMA_HUGGING_QUANTS = "hugging-quants/Meta-Llama-3.1"

PUBLISHED: Mapping[str, Published] = {
    "llama-3.1-8b": _chat("meta-llama/Llama-3.1-8B", 8.03),
    "llama-3.1-70b": Published(
        ("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"), 70.55
    ),
    "llama-3.1-405b": _chat("meta-llama/Llama-3.1-405B", 405.85),
    "llama-4-scout": _one("meta-llama/Llama-4-Scout-17B-16E-Instruct", 108.64, 17.0),
    "deepseek-llm-67b": Published(("deepseek-ai/deepseek-llm-67b-base", "deepseek-ai/deepseek-llm-67b-chat"), 67.42),
    "falcon3-10b": Published(("tiiuae/Falcon3-10B-Base", "tiiuae/Falcon3-10B-Instruct"), 10.31),
    "yi-1.5-9b": _chat("01-ai/Yi-1.5-9B", 8.83, suffix="-Chat"),
    "yi-1.5-34b": _chat("01-ai/Yi-1.5-34B", 34.39, suffix="-Chat"),
    "mistral-7b-v0.3": Published(("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"), 7.25),
    "mistral-nemo-12b": _one("mistralai/Mistral-Nemo-Instruct-2407", 12.25),
    "mistral-small-24b": Published(
        ("mistralai/Mistral-Small-24B-Base-2501", "mistralai/Mistral-Small-24B-Instruct-2501"), 23.57
    ),
    "mistral-small-3.1-24b": _one("mistralai/Mistral-Small-3.1-24B-Instruct-2503", 24.01),
    "mistral-large-123b": _one("mistralai/Mistral-Large-Instruct-2411", 122.61),
    "mixtral-8x7b": Published(("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"), 46.70, 12.9),
    "mixtral-8x22b": _one("mistralai/Mixtral-8x22B-v0.1", 140.62, 39.0),
    "qwen2.5-7b": _one("Qwen/Qwen2.5-7B-Instruct", 7.62),
    "qwen2.5-14b": _one("Qwen/Qwen2.5-14B-Instruct", 14.77),
    "qwen2.5-32b": _one("Qwen/Qwen2.5-32B-Instruct", 32.76),
    "qwen2.5-72b": _one("Qwen/Qwen2.5-72B-Instruct", 72.71),
    "qwen3-0.6b": _one("Qwen/Qwen3-0.6B", 0.596),
    "qwen3-1.7b": _one("Qwen/Qwen3-1.7B", 1.72),
    "qwen3-4b": _one("Qwen/Qwen3-4B", 4.02),
    "qwen3-8b": _one("Qwen/Qwen3-8B", 8.19),
    "qwen3-14b": _one("Qwen/Qwen3-14B", 14.77),
    "qwen3-32b": _one("Qwen/Qwen3-32B", 32.76),
    "qwen3-30b-a3b": _one("Qwen/Qwen3-30B-A3B", 30.53, 3.3),
    "qwen3-235b-a22b": _one("Qwen/Qwen3-235B-A22B", 235.09, 22.0),
    "qwen3-coder-480b-a35b": _one("Qwen/Qwen3-Coder-480B-A35B-Instruct", 480.15, 35.0),
    "qwen3-next-80b-a3b": _one("Qwen/Qwen3-Next-80B-A3B-Instruct", 81.3, 3.0),
    "deepseek-v2-lite": _chat("deepseek-ai/DeepSeek-V2-Lite", 15.71, 2.4, suffix="-Chat"),
    "deepseek-v2": _chat("deepseek-ai/DeepSeek-V2", 235.74, 21.0, suffix="-Chat"),
    "deepseek-v3": Published(("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1"), 671.03, 37.0),
    "deepseek-v3-bf16": Published(("unsloth/DeepSeek-V3-bf16", "unsloth/DeepSeek-R1-BF16"), 671.03, 37.0),
    "gpt-oss-20b": _one("openai/gpt-oss-20b", 20.91, 3.6),
    "gpt-oss-20b-bf16": _one("unsloth/gpt-oss-20b-BF16", 20.91, 3.6),
    "gpt-oss-120b": _one("openai/gpt-oss-120b", 116.83, 5.1),
    "gpt-oss-120b-bf16": _one("unsloth/gpt-oss-120b-BF16", 116.83, 5.1),
    "gemma-2-9b": _chat("google/gemma-2-9b", 9.24, suffix="-it"),
    "gemma-2-27b": _chat("google/gemma-2-27b", 27.23, suffix="-it"),
    "gemma-3-12b": _one("google/gemma-3-12b-it", 12.19),
    "gemma-3-27b": _one("google/gemma-3-27b-it", 27.43),
    "command-r7b": _one("CohereForAI/c4ai-command-r7b-12-2024", 8.03),
    "command-r-32b": _one("CohereForAI/c4ai-command-r-08-2024", 32.30),
    "command-r-35b": _one("CohereForAI/c4ai-command-r-v01", 34.98),
    "command-r-plus-104b": _one("CohereForAI/c4ai-command-r-plus", 103.81),
    "command-a-111b": _one("CohereForAI/c4ai-command-a-03-2025", 111.06),
    "exaone-4.0-32b": _one("LGAI-EXAONE/EXAONE-4.0-32B", 32.00),
    "falcon-40b": _chat("tiiuae/falcon-40b", 41.3, suffix="-instruct"),
    "glm-4-9b": _one("zai-org/glm-4-9b-chat-hf", 9.40),
    "glm-4-32b": _one("zai-org/GLM-4-32B-0414", 32.57),
    "glm-4.5-air": _one("zai-org/GLM-4.5-Air", 106.85, 12.0),
    "granite-3.1-8b": Published(("ibm-granite/granite-3.1-8b-base", "ibm-granite/granite-3.1-8b-instruct"), 8.17),
    "olmo-2-7b": _chat("allenai/OLMo-2-1124-7B", 7.30),
    "olmo-2-13b": _chat("allenai/OLMo-2-1124-13B", 13.72),
    "olmo-2-32b": _chat("allenai/OLMo-2-0325-32B", 32.23),
    "phi-4": _one("microsoft/phi-4", 14.66),
    "seed-oss-36b": Published(("ByteDance-Seed/Seed-OSS-36B-Base", "ByteDance-Seed/Seed-OSS-36B-Instruct"), 36.15),
    "llama-3.1-8b-fp8": _one(f"{_LLAMA_RED_HAT}-8B-Instruct-FP8", 8.03),
    "llama-3.1-8b-w8a8": _one(f"{_LLAMA_RED_HAT}-8B-Instruct-quantized.w8a8", 8.03),
    "llama-3.1-70b-fp8-dynamic": _one(f"{_LLAMA_RED_HAT}-70B-Instruct-FP8-dynamic", 70.55),
    "llama-3.1-70b-w8a8": _one(f"{_LLAMA_RED_HAT}-70B-Instruct-quantized.w8a8", 70.55),
    "llama-3.1-70b-w4a16": _one(f"{_LLAMA_RED_HAT}-70B-Instruct-quantized.w4a16", 70.55),
    "llama-3.1-70b-awq": _one(f"{_LLAMA_HUGGING_QUANTS}-70B-Instruct-AWQ-INT4", 70.55),
    "llama-3.1-405b-fp8": _one("meta-llama/Llama-3.1-405B-Instruct-FP8", 405.85),
    "llama-3.1-405b-fp8-dynamic": _one(f"{_LLAMA_RED_HAT}-405B-Instruct-FP8-dynamic", 405.85),
    "llama-3.1-405b-awq": _one(f"{_LLAMA_HUGGING_QUANTS}-405B-Instruct-AWQ-INT4", 405.85),
    "mistral-small-24b-fp8-dynamic": _one("RedHatAI/Mistral-Small-24B-Instruct-2501-FP8-dynamic", 23.57),
    "mixtral-8x7b-awq": _one("TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ", 46.70, 12.9),
    "gemma-2-9b-fp8": _one("RedHatAI/gemma-2-9b-it-FP8", 9.24),
    "phi-4-w4a16": _one("RedHatAI/phi-4-quantized.w4a16", 14.66),
    "qwen2.5-32b-gptq-int4": _one("Qwen/Qwen2.5-32B-Instruct-GPTQ-Int4", 32.76),
    "qwen2.5-32b-gptq-int8": _one("Qwen/Qwen2.5-32B-Instruct-GPTQ-Int8", 32.76),
    "qwen3-8b-fp8": _one("Qwen/Qwen3-8B-FP8", 8.19),
    "qwen3-32b-fp8": _one("Qwen/Qwen3-32B-FP8", 32.76),
    "qwen3-32b-awq": _one("Qwen/Qwen3-32B-AWQ", 32.76),
    # Llama 3.1 8B as GGUF files, with the types that llama.cpp gives to tensors. They are files, not repositories.
    "llama-3.1-8b-q8_0": Published((), 8.03),
    "llama-3.1-8b-q4_k_m": Published((), 8.03),
    "qwen3-30b-a3b-fp8": _one("Qwen/Qwen3-30B-A3B-FP8", 30.53, 3.3),
}


def config_path(name: str) -> Path:
    """Returns the config.json of a model: tools/model_configs/FAMILY/NAME.json."""
    (found,) = CONFIGS.glob(f"*/{name}.json")
    return found

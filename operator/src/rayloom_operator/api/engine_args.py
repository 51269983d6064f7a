"""EngineArgs: the engine's own settings in a spec, `spec.engine.args`."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from rayloom_operator.api.base import Part, rules

ROOT_PATH = r"^(/[A-Za-z0-9._~-]+)*$"

_NGRAM_MIN, _NGRAM_MAX = 2, 5  # the engine's defaults
_NGRAM_IN_WORDS = (
    f"ngramMin (default {_NGRAM_MIN}) is more than ngramMax (default {_NGRAM_MAX}): lower it, or raise the other"
)
_COPIES_IN_WORDS = (
    "kvHostMemoryBytes is for copies of cached blocks, but enablePrefixCaching is false: remove one of the two"
)
_BACKEND_IN_WORDS = (
    "quantization int8 needs the engine's own decoder, and modelBackend is transformers: remove one of the two"
)


class EngineArgs(Part):
    """Settings that are passed to the engine unchanged. For a setting that is left out, the engine has a default."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"(has(self.ngramMin) ? self.ngramMin : {_NGRAM_MIN}) <= "
                f"(has(self.ngramMax) ? self.ngramMax : {_NGRAM_MAX})",
                _NGRAM_IN_WORDS,
            ),
            (
                "!has(self.kvHostMemoryBytes) || self.kvHostMemoryBytes == 0 || !has(self.enablePrefixCaching) || "
                "self.enablePrefixCaching",
                _COPIES_IN_WORDS,
            ),
            (
                "!has(self.quantization) || self.quantization != 'int8' || !has(self.modelBackend) || "
                "self.modelBackend != 'transformers'",
                _BACKEND_IN_WORDS,
            ),
        )
    )

    device: Literal["auto", "cpu", "cuda"] | None = Field(
        None,
        description="Device of the ranks. auto, the default: in a cluster, cuda with `accelerator`, and cpu without.",
    )
    quantization: Literal["auto", "none", "int8"] | None = Field(
        None,
        description="Form of the weights in memory. auto, the default: the checkpoint's; quantised weights stay "
        "quantised on a CPU; those of a GGUF file only if `dtype` is auto as well. none: `dtype`. int8: one byte each, "
        "made from the checkpoint at the start; only on CPU.",
    )
    model_backend: Literal["auto", "native", "transformers"] | None = Field(
        None,
        description="Code of the model. native: the engine's own decoder, the fastest, for some architectures. "
        "transformers: the modules of the library transformers, for nearly all decoder-only models. "
        "auto, the default: native where it has the architecture, else transformers.",
    )
    async_scheduling: bool | None = Field(
        None,
        description="Send the rank its next step before the result of the last one is read. A new request may wait one "
        "step longer. No effect with several ranks, or with speculation.",
    )
    speculation: Literal["off", "ngram", "draft"] | None = Field(
        None,
        description="ngram: draft next tokens from repetitions in a sequence's own text, and verify several in one "
        "step while that saves time. draft: let the draft model in model.draft propose them; the default with "
        "model.draft. The tokens are the same on the CPU library, and in float32; otherwise rounding can change a "
        "token, as batching can. Default without model.draft: off.",
    )
    num_speculative_tokens: int | None = Field(
        None, ge=1, le=64, description="Most draft tokens of a sequence in a step; 7 by default."
    )
    ngram_min: int | None = Field(
        None, ge=1, le=32, description="A draft needs at least this many equal tokens in a row before it; 2 by default."
    )
    ngram_max: int | None = Field(
        None,
        ge=1,
        le=32,
        description="Of several places, the one with the most equal tokens counts, up to this number; 5 by default.",
    )
    max_loras: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="LoRA adapters in memory at once; requests for others wait; 8 by default. No effect without "
        "model.adapters.",
    )
    max_lora_rank: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Highest LoRA rank of an adapter; 16 by default. Memory is kept free for maxLoras of this rank.",
    )
    max_num_seqs: int | None = Field(None, ge=1, le=4096, description="Most sequences in one step.")
    max_num_batched_tokens: int | None = Field(None, ge=1, description="Token budget of one step.")
    max_queued_requests: int | None = Field(
        None, ge=1, description="Sequences that may wait; further requests get 429 with Retry-After."
    )
    enable_priority: bool | None = Field(
        None,
        description="Obey the field `priority` of requests: of two requests with the same API key, the one with the "
        "lower number runs first.",
    )
    enable_prompt_embeds: bool | None = Field(
        None,
        description="Accept prompts of embeddings: the field `prompt_embeds` of /v1/completions, which is usually "
        "larger than a text; see maxBodyBytes.",
    )
    kv_cache_memory_bytes: int | None = Field(None, ge=1, description="Bytes for KV blocks.")
    num_kv_blocks: int | None = Field(None, ge=2, description="Number of KV blocks of 16 tokens.")
    kv_host_memory_bytes: int | None = Field(
        None,
        ge=0,
        description="Bytes of host memory of each rank for copies of KV blocks: blocks that were evicted, or lost with "
        "a rank, are loaded again instead of computed. 0, the default: no copies. The memory is allocated at the start "
        "and added to the memory request and /dev/shm of the worker pods; if you set a memory request or limit "
        "yourself, add these bytes for each rank of a pod.",
    )
    enable_prefix_caching: bool | None = Field(None, description="Reuse KV blocks of equal prompt prefixes.")
    threads: int | None = Field(None, ge=1, description="Compute threads of each rank.")
    cors_allowed_origins: tuple[str, ...] | None = Field(
        None, strict=False, description="Origins from which browsers may call the API; * for all."
    )
    max_body_bytes: int | None = Field(None, ge=1024, description="Largest request body; a larger one gets 413.")
    max_output_tokens: int | None = Field(None, ge=1, description="Upper bound of a request's max_tokens.")
    max_logprobs: int | None = Field(
        None,
        ge=-1,
        description="Most alternatives of a token that a request may ask for, 20 by default; -1: the whole vocabulary.",
    )
    enable_force_include_usage: bool | None = Field(
        None, description="Every chunk of a stream has `usage`, also if the request did not ask for it."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None,
        description="Log-probabilities name tokens as `token_id:N`, unless the request sets the field of this name.",
    )
    repeat_seconds: int | None = Field(
        None,
        ge=0,
        le=600,
        description="Seconds for which an answer is kept, and still computed, for a client that repeats its request "
        "after a broken connection; 30 by default, 0: not at all.",
    )
    ui: bool | None = Field(
        None,
        description="Serve the built-in page at /ui of the API port. Default: on on this machine, off in a cluster.",
    )
    generation_config: Literal["auto", "none"] | None = Field(
        None,
        description="auto, the default: settings that a request leaves out have the values of the model's "
        "generation_config.json. none: those of the API.",
    )
    tool_parser: (
        Literal["hermes", "qwen3_xml", "llama3_json", "pythonic", "mistral", "granite", "internlm", "harmony"] | None
    ) = Field(None, description="Format of the model's tool calls. Default: found from the chat template.")
    reasoning_parser: Literal["none", "qwen3", "deepseek_r1", "mistral", "seed_oss", "granite"] | None = Field(
        None,
        description="Format of the model's reasoning; none leaves it in the content. Default: found from the chat "
        "template.",
    )
    root_path: str | None = Field(
        None,
        pattern=ROOT_PATH,
        description="Path in front of the API, such as /llm, behind a proxy that does not remove it.",
    )
    metrics_prefix: Literal["rayloom", "vllm"] | None = Field(
        None, description="vllm: metrics that vLLM has, too, get its names, for dashboards and autoscalers."
    )
    log_level: Literal["debug", "info", "warning", "error"] | None = Field(
        None, description="Lowest level that is logged."
    )

    @model_validator(mode="after")
    def _ngram_sizes_fit(self) -> EngineArgs:
        if (self.ngram_min or _NGRAM_MIN) > (self.ngram_max or _NGRAM_MAX):
            raise ValueError(_NGRAM_IN_WORDS)
        return self

    @model_validator(mode="after")
    def _copies_have_a_cache(self) -> EngineArgs:
        if self.kv_host_memory_bytes and self.enable_prefix_caching is False:
            raise ValueError(_COPIES_IN_WORDS)
        return self

    @model_validator(mode="after")
    def _decoder_has_int8_weights(self) -> EngineArgs:
        if self.quantization == "int8" and self.model_backend == "transformers":
            raise ValueError(_BACKEND_IN_WORDS)
        return self

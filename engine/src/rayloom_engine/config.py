"""EngineConfig: a document with all settings of an engine.

The operator writes it, `rayloom-engine --config FILE` reads it, and every field is also a flag (`max_model_len` is
`--max-model-len`). Its JSON schema is `schemas/engine-config.v1.json`, written by `make schemas`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rayloom_engine.adapter_settings import AdapterSettings
from rayloom_engine.cache_settings import HostMemoryBytes
from rayloom_engine.errors import ConfigError
from rayloom_engine.loopback import is_loopback
from rayloom_engine.setting_conflicts import check_conflicts
from rayloom_engine.setting_types import ModelSource, RayResources
from rayloom_engine.tls_settings import TlsMode, TlsPaths, tls_paths

DType = Literal["auto", "bfloat16", "float16", "float32"]
Quantization = Literal["auto", "none", "int8"]
ModelBackend = Literal["auto", "native", "transformers"]
ToolParser = Literal["hermes", "qwen3_xml", "llama3_json", "pythonic", "mistral", "granite", "internlm", "harmony"]
ReasoningParser = Literal["none", "qwen3", "deepseek_r1", "mistral", "seed_oss", "granite"]
Executor = Literal["auto", "uni", "mp", "ray", "external"]

BLOCK_SIZE = 16  # tokens in a KV block
INT8_GROUP = 32  # the activations of this many inputs of an int8 matrix share a scale; kGroup in csrc/cpu/int8.h


class EngineConfig(BaseModel):
    """All settings of an engine. Frozen: built once at start."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal["v1"] = Field("v1", description="Version of this document.")

    model: ModelSource = Field(
        "builtin://smollm2-135m",
        description="builtin://NAME, hf://ORG/NAME, file:///PATH, a local path (folder or .gguf file) or a hub id.",
    )
    revision: str | None = Field(None, description="Hub revision (branch, tag or commit). Default: main.")
    served_model_name: str | None = Field(
        None, min_length=1, description="Name in the API. Default: the last part of `model`."
    )
    dtype: DType = Field(
        "auto", description="Weights' type. auto: the checkpoint's own, where the device can compute in it."
    )
    quantization: Quantization = Field(
        "auto",
        description="Form of the weights in memory. auto: the checkpoint's; quantised weights stay quantised on a "
        "CPU; those of a GGUF file only if `dtype` is auto as well. none: `dtype`. int8: one byte each, made from the "
        "checkpoint at the start; only on CPU.",
    )
    model_backend: ModelBackend = Field(
        "auto",
        description="Code of the model. native: our own decoder, the fastest, for some architectures. transformers: "
        "the modules of the library transformers, for nearly all decoder-only models. "
        "auto: native where it has the architecture, else transformers.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where one is present, else cpu.")
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="Longest prompt + output in tokens. Default: the limit of the model's config, or the longest that"
        " fits.",
    )

    adapters: AdapterSettings = Field(
        (),
        strict=False,
        description="LoRA adapters as NAME=PATH: a folder in PEFT's format, or hf://ORG/NAME or hf://ORG/NAME@REVISION "
        "of the hub. Requests name one in `model`. Only on CPU.",
    )
    max_loras: int = Field(
        8,
        ge=1,
        le=1024,
        description="Adapters in memory at once; requests for others wait. No effect without adapters.",
    )
    max_lora_rank: int = Field(
        16,
        ge=1,
        le=256,
        description="Highest LoRA rank (`r`) of an adapter. Memory is kept free for max_loras of this rank.",
    )
    allow_runtime_lora_updating: bool = Field(
        False,
        description="Whoever may use the API may load and unload adapters by POST /v1/load_lora_adapter and "
        "/v1/unload_lora_adapter.",
    )
    managed_adapters: bool = Field(
        False,
        description="Whoever may use the admin port sets the adapters by PUT /adapters there. An adapter that cannot "
        "be loaded is then reported in /status, and does not end the server.",
    )

    tensor_parallel_size: int = Field(
        1, ge=1, description="Ranks that share each layer; which numbers work depends on the model's heads."
    )
    pipeline_parallel_size: int = Field(1, ge=1, description="Stages that share the layers.")
    ranks_per_gpu: int = Field(
        1,
        ge=1,
        description="Ranks that share a GPU, to try a model in parts on fewer GPUs than it has ranks. They divide the "
        "GPU's memory, and exchange through host memory, which is slow. No effect on CPU.",
    )
    executor: Executor = Field(
        "auto",
        description="Starter of ranks: uni = in the core's process (one rank), mp = as processes of this machine, "
        "ray = as Ray actors, external = by torchrun. auto: external or ray where the environment or ray_address names "
        "one, uni for one rank, else mp.",
    )
    ray_address: str | None = Field(
        None,
        min_length=1,
        description="HOST:PORT of a Ray cluster. Default: the environment's RAY_ADDRESS, else Ray is started here.",
    )
    ray_runtime_env: dict[str, Any] | None = Field(
        None, description="Ray's runtime environment of every rank, a JSON object."
    )
    ray_resources_per_rank: RayResources | None = Field(
        None,
        description='Ray resources that a rank takes, a JSON object such as {"CPU": 1, "GPU": 1, "a100": 0.01}; names '
        "of your own choose among mixed nodes. Default: a CPU, and where it computes on a GPU 1 / ranks_per_gpu of it.",
    )
    ray_placement_strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = Field(
        "SPREAD", description="Ray's strategy of placing stages on nodes; the ranks of a stage always share a node."
    )
    placement_seconds: float = Field(
        2.0, gt=0, strict=False, description="Seconds for which Ray may search room for every rank at the first start."
    )
    rank_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port at which ranks reach the core; 0 picks a free one, external: MASTER_PORT + 1.",
    )
    heartbeat_seconds: float = Field(
        0.5, ge=0.05, strict=False, description="Interval of a rank's sign of life; at most half of hang_seconds."
    )
    hang_seconds: float = Field(
        10.0,
        ge=1,
        strict=False,
        description="A process that shows no sign of life for so long, or a rank that neither advances nor computes, "
        "is replaced.",
    )
    rebuild_seconds: float = Field(
        600.0,
        ge=1,
        strict=False,
        description="Seconds after which the engine gives up if lost ranks have not attached again.",
    )

    async_scheduling: bool = Field(
        False,
        description="Send the rank its next step before the result of the last one is read. A new request may wait one "
        "step longer. No effect with several ranks, with executor uni, or with speculation.",
    )
    speculation: Literal["off", "ngram", "draft"] = Field(
        "off",
        description="ngram: draft next tokens from repetitions in a sequence's own text; draft: let `draft_model` "
        "propose them. Several are verified in one step while that saves time. The tokens are the same on the CPU "
        "library, and in float32; otherwise rounding can change a token, as batching can.",
    )
    draft_model: ModelSource | None = Field(
        None,
        description="Model that proposes draft tokens, written like `model`. It has the same tokenizer and is much "
        "smaller. The rank that samples holds all of it. Needs speculation draft.",
    )
    draft_revision: str | None = Field(None, description="Hub revision of the draft model. Default: main.")
    draft_quantization: Quantization = Field(
        "auto", description="Form of the draft model's weights in memory, as `quantization` is for the model."
    )
    num_speculative_tokens: int = Field(7, ge=1, le=64, description="Most draft tokens of a sequence in a step.")
    ngram_min: int = Field(
        2, ge=1, le=32, description="A draft needs at least this many equal tokens in a row before it."
    )
    ngram_max: int = Field(
        5, ge=1, le=32, description="Of several places, the one with the most equal tokens counts, up to this number."
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Most sequences in one step.")
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Token budget of one step; contexts beyond 16384 tokens get less. "
        "Default: 512 on CPU, 8192 on GPU.",
    )
    max_queued_requests: int = Field(
        1024, ge=1, description="Sequences that may wait; further requests get 429 with Retry-After."
    )
    enable_priority: bool = Field(
        False,
        description="Obey the field `priority` of requests: among those of one API key the lower number runs first. "
        "Without it a request with a priority other than 0 is refused.",
    )
    enable_prompt_embeds: bool = Field(
        False,
        description="Accept prompts of embeddings: the field `prompt_embeds` of /v1/completions. A request of 1000 "
        "positions has some megabytes, see max_body_bytes.",
    )
    kv_cache_memory_bytes: int | None = Field(
        None, ge=1, description="Bytes for KV blocks. Default: computed from free memory (cgroup limit respected)."
    )
    num_kv_blocks: int | None = Field(
        None,
        ge=2,
        description=f"Number of KV blocks of {BLOCK_SIZE} tokens; overrides kv_cache_memory_bytes. "
        "Default: as many as it holds.",
    )
    kv_host_memory_bytes: HostMemoryBytes = 0
    enable_prefix_caching: bool = Field(True, description="Reuse KV blocks of equal prompt prefixes.")
    threads: int | None = Field(
        None, ge=1, description="Compute threads. Default: the cores this process may use (affinity and cgroup quota)."
    )
    engines_on_host: int = Field(
        1,
        ge=1,
        description="Engines on this machine, this one included. Each takes its share of the cores, and on CPU of the "
        "memory for KV blocks, where `threads` and kv_cache_memory_bytes are not set.",
    )

    host: str = Field("127.0.0.1", description="Address of the API port.")
    port: int = Field(8000, ge=0, le=65535, description="API port; 0 picks a free one.")
    admin_host: str = Field("127.0.0.1", description="Address of the admin port.")
    admin_port: int = Field(8001, ge=0, le=65535, description="Admin port (/status, /drain); 0 picks a free one.")
    admin_token_file: str | None = Field(
        None, description="File with the admin port's bearer token. Required when admin_host is not loopback."
    )
    front_host: str = Field("127.0.0.1", description="Address of the port for gateways.")
    front_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port at which gateways reach the core; 0 picks a free one. Default: no such port.",
    )
    front_key_file: str | None = Field(
        None,
        description="File with the key that gateways and the core prove to each other. Required with front_port.",
    )
    front_tls_cert_file: str | None = Field(
        None,
        description="File with the certificate of the port for gateways, PEM. Needs front_tls_key_file and "
        "front_tls_ca_file; all three are read again when they change.",
    )
    front_tls_key_file: str | None = Field(None, description="File with the private key of front_tls_cert_file, PEM.")
    front_tls_ca_file: str | None = Field(
        None, description="File with the certificates of the CA that signs the gateways' certificates, PEM."
    )
    front_tls_mode: TlsMode = Field(
        "strict",
        description="With front_tls_cert_file. strict: gateways without TLS are refused; permissive: accepted.",
    )
    api_key_file: str | None = Field(
        None,
        description="File with accepted API keys, one a line, read again when it changes. RAYLOOM_API_KEYS "
        "(comma-separated) adds to it.",
    )
    cors_allowed_origins: tuple[str, ...] = Field(
        (), strict=False, description="Origins that browsers may call from; * for all."
    )
    ui: bool | None = Field(
        None,
        description="Serve the built-in page at /ui of the API port. Default: on if `host` is a loopback address, "
        "else off.",
    )
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="Largest request body; more gets 413.")
    max_output_tokens: int | None = Field(
        None, ge=1, description="Upper bound of a request's max_tokens. Default: the rest of the context."
    )
    max_logprobs: int = Field(
        20,
        ge=-1,
        description="Most alternatives of a token that a request may ask for, in the answer and in the prompt; -1: the "
        "whole vocabulary.",
    )
    enable_force_include_usage: bool = Field(
        False,
        description="Every chunk of a stream has `usage`, as if the request had set include_usage and "
        "continuous_usage_stats.",
    )
    return_tokens_as_token_ids: bool = Field(
        False,
        description="Log-probabilities name tokens as `token_id:N`, unless the request sets the field of this name.",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="auto: settings that a request leaves out have the values of the model's generation_config.json "
        "(temperature, top_p, top_k, min_p, penalties, and in chats max_new_tokens). none: those of the API.",
    )
    root_path: str = Field(
        "",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="Path in front of the API, such as /llm, behind a proxy that does not remove it. Paths without it "
        "work, too.",
    )
    metrics_prefix: Literal["rayloom", "vllm"] = Field(
        "rayloom", description="vllm: metrics that vLLM has, too, get its names, for dashboards and autoscalers."
    )
    tool_parser: ToolParser | None = Field(
        None, description="Format of the model's tool calls. Default: found from the chat template."
    )
    reasoning_parser: ReasoningParser | None = Field(
        None,
        description="Format of the model's reasoning; none leaves it in the content. Default: found from the chat "
        "template.",
    )
    drain_seconds: float = Field(
        30.0,
        ge=0,
        strict=False,
        description="Seconds for which requests may finish after SIGTERM before they are aborted.",
    )
    repeat_seconds: float = Field(
        30.0,
        ge=0,
        le=600,
        strict=False,
        description="Seconds for which an answer is kept, and still computed, for a client that repeats its request "
        "after a broken connection; 0: not at all.",
    )
    restart_budget: int = Field(
        5,
        ge=0,
        description="Restarts of a process, or losses of ranks, within 10 minutes before the engine gives up.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def takes_adapters(self) -> bool:
        """True if the engine may get a request with an adapter."""
        return bool(self.adapters) or self.allow_runtime_lora_updating or self.managed_adapters

    @property
    def parallelism(self) -> str:
        """Returns the two sizes whose product is the number of ranks, as text for messages."""
        return (
            f"tensor_parallel_size {self.tensor_parallel_size} x pipeline_parallel_size {self.pipeline_parallel_size}"
        )

    @property
    def front_tls_paths(self) -> TlsPaths | None:
        """The TLS files of the port for gateways; None: clear text. Raises ConfigError if only some files are given."""
        return tls_paths("front_tls", self.front_tls_cert_file, self.front_tls_key_file, self.front_tls_ca_file)

    @property
    def has_ui(self) -> bool:
        """True if the API port serves the built-in page."""
        return is_loopback(self.host) if self.ui is None else self.ui

    @property
    def api_model_name(self) -> str:
        """The model's name in the API: served_model_name, or the last part of `model`."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")


def parse_config(document: object) -> EngineConfig:
    """Returns the EngineConfig in a decoded JSON document.

    Raises ConfigError that names each wrong field, what was given and what is allowed.
    """
    try:
        config = EngineConfig.model_validate(document)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            field = ".".join(str(part) for part in item["loc"]) or "(document)"
            hint = " (remove it, or check its spelling)" if item["type"] == "extra_forbidden" else ""
            reason = item["msg"].removeprefix("Value error, ")  # pydantic writes this before our own sentences
            lines.append(f"{field}: {reason}, given {item['input']!r}{hint}")
        raise ConfigError("EngineConfig: " + "; ".join(lines)) from error
    check_conflicts(config)
    return config


def load_config(path: Path) -> EngineConfig:
    """Returns the EngineConfig in a JSON file. Raises ConfigError if the file cannot be read or used."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the config file {path} is not JSON: {error}") from error
    return parse_config(document)

"""The operator writes exactly the fields that the engine reads."""

from itertools import product
from pathlib import Path

import pytest

from rayloom_engine.config import EngineConfig, parse_config
from rayloom_engine.errors import ConfigError
from rayloom_engine.front.gateway.gateway_config import FRONT_FIELDS, parse_gateway_config
from rayloom_operator.api.engine_args import EngineArgs
from rayloom_operator.api.spec import parse
from rayloom_operator.errors import SpecError
from rayloom_operator.local.plan import GATEWAY_FIELDS, Ports, plan_processes, shareable_numbers
from rayloom_operator.objects.engine_config import engine_config, pod_engine_config
from rayloom_operator.resolve.resolved import resolve

# No manifest sets these fields. On one machine the engine chooses its executor and the ranks' port itself. A manifest
# cannot name files with secrets (API keys come from the environment, the admin port is on loopback). The number of
# engines on a machine is known to the program that starts them. Only the operator changes the adapters of a serving
# engine. Each rank of a pod has a GPU; only `local --ranks-per-gpu` lets ranks share one.
NOT_IN_MANIFESTS = {
    "executor",
    "ray_address",
    "ray_runtime_env",
    "ray_resources_per_rank",
    "ray_placement_strategy",
    "placement_seconds",
    "rank_port",
    "front_host",
    "front_port",
    "front_key_file",
    "front_tls_cert_file",
    "front_tls_key_file",
    "front_tls_ca_file",
    "front_tls_mode",
    "engines_on_host",
    "ranks_per_gpu",
    "managed_adapters",
    "allow_runtime_lora_updating",
    "heartbeat_seconds",
    "api_key_file",
    "admin_token_file",
}

ARGS = {
    "device": "cpu",
    "maxLoras": 3,
    "maxLoraRank": 64,
    "maxNumSeqs": 8,
    "maxNumBatchedTokens": 256,
    "maxQueuedRequests": 100,
    "enablePriority": True,
    "enablePromptEmbeds": True,
    "kvCacheMemoryBytes": 1_000_000,
    "numKvBlocks": 64,
    "kvHostMemoryBytes": 0,  # more would need the prefix cache
    "quantization": "none",
    "modelBackend": "native",
    "enablePrefixCaching": False,
    "asyncScheduling": True,
    "speculation": "draft",
    "numSpeculativeTokens": 4,
    "ngramMin": 3,
    "ngramMax": 6,
    "threads": 2,
    "corsAllowedOrigins": ["https://example.org"],
    "maxBodyBytes": 4096,
    "maxOutputTokens": 128,
    "maxLogprobs": 100,
    "enableForceIncludeUsage": True,
    "returnTokensAsTokenIds": True,
    "repeatSeconds": 5,
    "ui": False,
    "generationConfig": "none",
    "toolParser": "hermes",
    "reasoningParser": "none",
    "rootPath": "/llm",
    "metricsPrefix": "vllm",
    "logLevel": "debug",
}


def manifest(**spec):
    return parse(
        {"apiVersion": "rayloom.dev/v1alpha1", "kind": "LLMService", "metadata": {"name": "chat"}, "spec": spec}
    )


FULL = {
    "model": {
        "source": "hf://Qwen/Qwen3-8B",
        "revision": "v2",
        "servedName": "qwen3-8b",
        "dtype": "float16",
        "maxModelLen": 4096,
        "adapters": [{"name": "sql", "source": "file:///data/adapters/sql"}],
        "draft": {"source": "hf://Qwen/Qwen3-0.6B", "revision": "v1", "quantization": "none"},
    },
    "parallelism": {"tensor": 1, "pipeline": 2},
    "drainSeconds": 7,
    "recovery": {"hangSeconds": 20, "rebuildSeconds": 300, "restartBudget": 3},
    "engine": {"args": ARGS},
}


def test_every_field_of_a_full_manifest_arrives():
    document = engine_config(manifest(**FULL), host="0.0.0.0", port=9000, admin_port=9001)

    assert parse_config(document) == EngineConfig(
        model="hf://Qwen/Qwen3-8B",
        revision="v2",
        quantization="none",
        served_model_name="qwen3-8b",
        dtype="float16",
        max_model_len=4096,
        pipeline_parallel_size=2,
        drain_seconds=7,
        device="cpu",
        model_backend="native",
        async_scheduling=True,
        speculation="draft",
        draft_model="hf://Qwen/Qwen3-0.6B",
        draft_revision="v1",
        draft_quantization="none",
        num_speculative_tokens=4,
        ngram_min=3,
        ngram_max=6,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_queued_requests=100,
        enable_priority=True,
        enable_prompt_embeds=True,
        kv_cache_memory_bytes=1_000_000,
        num_kv_blocks=64,
        kv_host_memory_bytes=0,
        adapters=("sql=/data/adapters/sql",),
        max_loras=3,
        max_lora_rank=64,
        enable_prefix_caching=False,
        threads=2,
        cors_allowed_origins=("https://example.org",),
        max_body_bytes=4096,
        max_output_tokens=128,
        max_logprobs=100,
        enable_force_include_usage=True,
        return_tokens_as_token_ids=True,
        repeat_seconds=5,
        generation_config="none",
        tool_parser="hermes",
        reasoning_parser="none",
        root_path="/llm",
        metrics_prefix="vllm",
        hang_seconds=20,
        rebuild_seconds=300,
        restart_budget=3,
        log_level="debug",
        host="0.0.0.0",
        port=9000,
        admin_port=9001,
        ui=False,
    )


def test_a_full_manifest_sets_every_field_that_manifests_may_set():
    document = engine_config(manifest(**FULL), host="127.0.0.1", port=9000, admin_port=9001)

    assert set(document) == set(EngineConfig.model_fields) - NOT_IN_MANIFESTS
    assert len(ARGS) == len(EngineArgs.model_fields)


def test_a_short_manifest_leaves_the_engines_defaults():
    service = manifest(model={"source": "builtin://smollm2-135m"})
    document = engine_config(service, host="127.0.0.1", port=8000, admin_port=8001)

    assert parse_config(document) == EngineConfig(served_model_name="chat", ui=True)


def test_an_engine_in_a_pod_reads_its_keys_and_a_claims_model_from_files():
    auth = {"apiKeySecretRef": {"name": "s", "key": "k"}}
    found = parse_config(pod_engine_config(resolve(manifest(model={"source": "pvc://claim/m"}, auth=auth), "")))

    assert (found.model, found.api_key_file) == ("file:///models/m", "/etc/rayloom-keys/keys")


def test_an_engine_in_a_pod_reads_its_draft_model_from_a_mount():
    model = {"source": "builtin://smollm2-135m", "draft": {"source": "pvc://drafts/team/d"}}
    found = parse_config(pod_engine_config(resolve(manifest(model=model), "")))

    assert (found.speculation, found.draft_model) == ("draft", "file:///draft-model/team/d")


def test_the_page_is_on_on_this_machine_and_off_in_a_pod():
    service = manifest(model={"source": "builtin://smollm2-135m"})
    here = parse_config(engine_config(service, host="0.0.0.0", port=8000, admin_port=8001))

    assert here.has_ui
    assert not parse_config(pod_engine_config(resolve(service, ""))).has_ui


def test_a_manifest_turns_the_page_on_in_a_pod_and_off_on_this_machine():
    source = {"source": "builtin://smollm2-135m"}
    on, off = (manifest(model=source, engine={"args": {"ui": ui}}) for ui in (True, False))

    assert parse_config(pod_engine_config(resolve(on, ""))).has_ui
    assert not parse_config(engine_config(off, host="127.0.0.1", port=8000, admin_port=8001)).has_ui


def test_an_engine_in_a_pod_uses_ray_and_opens_its_ports_with_a_token():
    service = manifest(model={"source": "builtin://smollm2-135m"}, parallelism={"pipeline": 2})

    assert parse_config(pod_engine_config(resolve(service, ""))) == EngineConfig(
        served_model_name="chat",
        pipeline_parallel_size=2,
        device="cpu",
        executor="ray",
        placement_seconds=3600,
        rank_port=8002,
        host="0.0.0.0",
        port=8000,
        admin_host="0.0.0.0",
        admin_port=8001,
        admin_token_file="/etc/rayloom/admin/token",
    )


@pytest.mark.parametrize("draft", [None, "auto", "int8"])
@pytest.mark.parametrize("quantization", [None, "none", "int8"])
def test_int8_weights_are_refused_in_a_manifest_exactly_if_the_engine_refuses_its_settings(quantization, draft):
    for dtype, device in product(("auto", "bfloat16", "float16", "float32"), ("auto", "cpu", "cuda")):
        source = "builtin://smollm2-135m"
        document = {"model": source, "dtype": dtype, "device": device, "quantization": quantization}
        model = {"source": source, "dtype": dtype}
        if draft is not None:
            document |= {"speculation": "draft", "draft_model": source, "draft_quantization": draft}
            model |= {"draft": {"source": source, "quantization": draft}}
        document = {name: value for name, value in document.items() if value is not None}
        args = {"device": device} | ({} if quantization is None else {"quantization": quantization})
        if "int8" in (quantization, draft) and (dtype == "float16" or device == "cuda"):
            with pytest.raises(ConfigError, match="'int8' works"):
                parse_config(document)
            with pytest.raises(SpecError, match="quantization int8 works"):
                manifest(model=model, engine={"args": args})
        else:
            parse_config(document)
            manifest(model=model, engine={"args": args})


def test_a_manifest_cannot_let_ranks_share_a_gpu():
    with pytest.raises(SpecError, match="ranksPerGpu"):
        manifest(model={"source": "builtin://smollm2-135m"}, engine={"args": {"ranksPerGpu": 2}})


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (6, 1), (1, 4), (4, 3), (3, 4)])
def test_local_advises_only_numbers_of_ranks_per_gpu_that_the_engine_accepts(sizes):
    tensor, pipeline = sizes
    for number in range(2, tensor * pipeline + 2):
        document = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "ranks_per_gpu": number}
        if number in shareable_numbers(tensor, pipeline):
            assert parse_config(document).ranks_per_gpu == number
        else:
            with pytest.raises(ConfigError, match="ranks_per_gpu"):
                parse_config(document)


def test_several_engines_on_this_machine_and_their_gateway_read_their_documents():
    places = [Ports(host="127.0.0.1", port=port, admin_port=port + 1, front_port=port + 2) for port in (9000, 9010)]
    service = manifest(**{**FULL, "replicas": 2})
    *engines, gateway = plan_processes(service, folder=Path("/f"), gateway=places[0], engines=places, devices=())
    found = [parse_config(plan.document) for plan in engines]
    config = parse_gateway_config(gateway.document)

    assert [(each.port, each.front_port, each.engines_on_host) for each in found] == [(9000, 9002, 2), (9010, 9012, 2)]
    assert config.gateway.engines == {"engine-0": "127.0.0.1:9002", "engine-1": "127.0.0.1:9012"}
    assert {name: getattr(config.front, name) for name in GATEWAY_FIELDS} == {
        name: getattr(found[0], name) for name in GATEWAY_FIELDS
    }
    assert set(GATEWAY_FIELDS) == set(FRONT_FIELDS) - NOT_IN_MANIFESTS

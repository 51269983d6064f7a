"""Builds the GatewayConfig document (version v1), which `rayloom-engine gateway --config FILE` reads.

The operator never imports the engine; `schemas/gateway-config.v1.json` is the contract, and `tests/contract/` checks
both sides.
"""

from __future__ import annotations

from typing import TypeAlias

from rayloom_operator import names
from rayloom_operator.api.gateway.spec import Gateway
from rayloom_operator.api.spec import LLMService

_CACHE_FOLDER = "/tmp/rayloom-gateway"  # in the emptyDir of the pod, so a restarted container finds its tokenizers
# Settings of spec.engine.args that concern HTTP, text and the queue, and so the gateway.
GATEWAY_ARGS = (
    *("cors_allowed_origins", "ui", "max_body_bytes", "max_output_tokens", "max_queued_requests", "enable_priority"),
    *("generation_config", "root_path", "metrics_prefix", "tool_parser", "reasoning_parser", "log_level"),
    *("max_logprobs", "enable_force_include_usage", "return_tokens_as_token_ids", "repeat_seconds"),
)

JsonValue: TypeAlias = str | int | bool | list[str]


def gateway_config(service: LLMService, gateway: Gateway) -> dict[str, JsonValue]:
    """The GatewayConfig v1 document for a gateway pod of the service."""
    keys: dict[str, JsonValue] = {"api_key_file": f"{names.KEYS_FOLDER}/{names.KEYS_FILE}"}
    given = service.spec.engine.args.model_dump(mode="json", include=set(GATEWAY_ARGS), exclude_none=True)
    return {
        "version": "v1",
        "served_model_name": service.served_name,
        # The short name is found in the first domain of the pod's search list, so each lookup is one request. The full
        # name would need the cluster's domain, which the operator does not know.
        "engines_dns": f"{names.engines_name(service.metadata.name)}:{names.FRONT_PORT}",
        "key_file": names.FRONT_KEY_FILE,
        "cache_dir": _CACHE_FOLDER,
        "hold_seconds": gateway.hold_seconds,
        "host": "0.0.0.0",
        "port": names.API_PORT,
        "admin_host": "0.0.0.0",
        "admin_port": names.ADMIN_PORT,
        "admin_token_file": names.ADMIN_TOKEN_FILE,
        "drain_seconds": service.spec.drain_seconds,
        **(keys if service.spec.auth is not None else {}),
        **given,
    }

"""Builds the GatewayConfig document (version v1), which `rayloom-engine gateway --config FILE` reads.

The operator never imports the engine; `schemas/gateway-config.v1.json` is the contract, and `tests/contract/` checks
both sides.
"""

from __future__ import annotations

from typing import TypeAlias

from rayloom_operator import names
from rayloom_operator.api.gateway.spec import Gateway
from rayloom_operator.api.spec import LLMService
from rayloom_operator.objects.tls.files import TlsMode, gateway_tls

_CACHE_FOLDER = "/tmp/rayloom-gateway"  # folder in the pod's emptyDir, so a restarted container finds its tokenizers
# Settings of spec.engine.args that a gateway has, too: they concern HTTP, text and the queue.
GATEWAY_ARGS = (
    *("cors_allowed_origins", "ui", "max_body_bytes", "max_output_tokens", "max_queued_requests", "enable_priority"),
    *("generation_config", "root_path", "metrics_prefix", "tool_parser", "reasoning_parser", "log_level"),
    *("max_logprobs", "enable_force_include_usage", "return_tokens_as_token_ids", "repeat_seconds"),
    "enable_prompt_embeds",
)

JsonValue: TypeAlias = str | int | bool | list[str]


def engines_dns(service: str) -> str:
    """Returns the DNS name and port of the engines of a service, for a pod in its namespace.

    The short name is found in the first domain of the pod's search list, so each lookup is one request. The full name
    would need the cluster's domain, which the operator does not know.
    """
    return f"{names.engines_name(service)}:{names.FRONT_PORT}"


def pod_settings(hold_seconds: int, drain_seconds: int) -> dict[str, JsonValue]:
    """The settings of every gateway pod: version, folder, times, addresses and the admin token."""
    return {
        "version": "v1",
        "cache_dir": _CACHE_FOLDER,
        "hold_seconds": hold_seconds,
        "host": "0.0.0.0",
        "port": names.API_PORT,
        "admin_host": "0.0.0.0",
        "admin_port": names.ADMIN_PORT,
        "admin_token_file": names.ADMIN_TOKEN_FILE,
        "drain_seconds": drain_seconds,
    }


def gateway_config(service: LLMService, gateway: Gateway, tls: TlsMode = "off") -> dict[str, JsonValue]:
    """The GatewayConfig v1 document for a gateway pod of the service."""
    keys: dict[str, JsonValue] = {"api_key_file": f"{names.KEYS_FOLDER}/{names.KEYS_FILE}"}
    given = service.spec.engine.args.model_dump(mode="json", include=set(GATEWAY_ARGS), exclude_none=True)
    return {
        **pod_settings(gateway.hold_seconds, service.spec.drain_seconds),
        "served_model_name": service.served_name,
        "engines_dns": engines_dns(service.metadata.name),
        "key_file": names.FRONT_KEY_FILE,
        **(keys if service.spec.auth is not None else {}),
        **gateway_tls(tls, service.metadata.namespace),
        **given,
    }

"""The fields of the GatewayConfig that the operator writes are the fields that the gateway reads."""

import json
from pathlib import Path

import pytest

from rayloom_engine.front.gateway.gateway_config import FRONT_FIELDS, GatewaySettings, parse_gateway_config
from rayloom_operator.api.engine_args import EngineArgs
from rayloom_operator.objects.gateway.config import gateway_config
from rt_operator import make_service

ARGS = {
    "corsAllowedOrigins": ["https://example.org"],
    "ui": True,
    "maxBodyBytes": 4096,
    "maxOutputTokens": 128,
    "maxQueuedRequests": 100,
    "enablePriority": True,
    "generationConfig": "none",
    "rootPath": "/llm",
    "metricsPrefix": "vllm",
    "toolParser": "hermes",
    "reasoningParser": "none",
    "logLevel": "debug",
    "maxLogprobs": 100,
    "enableForceIncludeUsage": True,
    "returnTokensAsTokenIds": True,
    "enablePromptEmbeds": True,
    "repeatSeconds": 60,
}


def document(**spec):
    service = make_service(**{"gateway": {}, **spec})
    return gateway_config(service, service.spec.gateway)


def test_every_setting_arrives():
    made = document(
        engine={"args": ARGS},
        gateway={"holdSeconds": 60},
        drainSeconds=7,
        auth={"apiKeySecretRef": {"name": "keys", "key": "all"}},
    )

    config = parse_gateway_config(made)
    assert config.gateway.hold_seconds == 60
    assert config.gateway.engines_dns == "chat-engines:8003"
    front = config.front.model_dump(mode="json")
    assert {name: front[name] for name in FRONT_FIELDS} == {name: made[name] for name in FRONT_FIELDS}


def test_each_argument_of_the_engine_that_a_gateway_has_is_passed_on():
    of_both = set(FRONT_FIELDS) & set(EngineArgs.model_fields)

    assert of_both <= document(engine={"args": ARGS}).keys()


def test_a_short_manifest_leaves_the_defaults_to_the_gateway():
    made = document()

    assert parse_gateway_config(made).front.port == 8000
    assert not {"ui", "tool_parser", "api_key_file"} & made.keys()


@pytest.mark.parametrize("name", ["hold_seconds", "cache_dir", "key_file"])
def test_the_schema_knows_each_field(name):
    schema = json.loads((Path(__file__).resolve().parents[2] / "schemas/gateway-config.v1.json").read_text("utf-8"))

    assert name in schema["properties"]
    assert name in GatewaySettings.model_fields

"""The gateway can read the documents that the operator writes for the gateway pods of an LLMGateway."""

import json
from pathlib import Path

import pytest

from rayloom_engine.front.gateway.gateway_config import FRONT_FIELDS, GatewaySettings, parse_gateway_config
from rayloom_engine.front.gateway.models.models_document import MODEL_SETTINGS, parse_models
from rayloom_operator.api.llmgateway.spec import parse_gateway
from rayloom_operator.objects.gateway.companions import front_key
from rayloom_operator.objects.gateway.config import GATEWAY_ARGS
from rayloom_operator.objects.llmgateway.deployment import gateway_config
from rayloom_operator.objects.llmgateway.models_file import MODEL_ARGS, ModelEntry, models_document
from rt_llmgateway import make_gateway_document

SCHEMA = Path(__file__).resolve().parents[2] / "schemas/gateway-config.v1.json"


def document():
    return gateway_config(parse_gateway(make_gateway_document(holdSeconds=60, drainSeconds=7, rootPath="/llm")))


def test_a_gateway_of_several_models_takes_the_document():
    config = parse_gateway_config(document())

    assert config.gateway.models_file == "/etc/rayloom-models/models.json"
    assert (config.gateway.hold_seconds, config.front.drain_seconds, config.front.root_path) == (60, 7, "/llm")


def test_the_schema_knows_each_field():
    assert document().keys() <= json.loads(SCHEMA.read_text("utf-8"))["properties"].keys()


@pytest.mark.parametrize("previous_key", [b"", b"the key before"])
def test_a_gateway_takes_the_models_file(previous_key):
    chat = ModelEntry(served_name="chat", service="chat", namespace="team", uid="uid-chat", auth=None)
    usable = parse_models(models_document([chat], [], b"the key", previous_key))
    assert usable.problems == ()
    found = usable.document.models["chat"]

    assert found.key == front_key(b"the key", "team", "uid-chat")
    assert found.previous_key == (front_key(previous_key, "team", "uid-chat") if previous_key else None)


def test_a_gateway_takes_the_names_of_adapters():
    uids = {"namespace": "team", "uid": "uid", "auth": None}
    adapted = ModelEntry(served_name="chat", service="chat", adapters=("poems", "sql"), **uids)
    plain = ModelEntry(served_name="plain", service="plain", **uids)
    found = parse_models(models_document([adapted, plain], [], b"the key")).document

    assert [found.declared_adapters(name) for name in ("chat", "plain")] == [("poems", "sql"), ()]


def test_every_other_field_is_a_setting_of_gateways():
    assert document().keys() - {"models_file"} <= {*GatewaySettings.model_fields, *FRONT_FIELDS}


def test_a_model_has_each_setting_of_gateways_that_a_gateway_accepts_for_one_model():
    assert set(MODEL_ARGS) == set(MODEL_SETTINGS) & set(GATEWAY_ARGS)

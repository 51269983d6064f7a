"""The operator reads the `/status` of a gateway with several models: it shows the models file that the gateway uses."""

import json

import pytest

from rayloom_engine.front.gateway.models import gateway_status as engine
from rayloom_operator.decide.llmgateway.missing_keys import LISTED_NAMES
from rayloom_operator.engines.gateway_status import gateway_status
from rayloom_operator.engines.request import MAX_BYTES
from rayloom_operator.engines.status import GatewayReport, UnusableKeys
from rayloom_operator.errors import EngineUnavailable
from rayloom_operator.objects.llmgateway.models_file import content_hash, models_text


def document(**parts):
    file = {"hash": "0123456789abcdef", "refusal": "no JSON", "problems": ["models.a: wrong"]}
    keys = [{"name": "chat", "problem": "cannot read /keys", "accepted": 0}]
    fields = {"state": "serving", "reason": "", "in_flight": 3, "uptime_seconds": 4.5, "models_file": file}
    return engine.GatewayStatus.model_validate({"version": "v1", **fields, "unusable_keys": keys, **parts})


def read(found):
    return gateway_status(200, found.model_dump_json(exclude_defaults=True).encode())


def test_the_operator_reads_what_the_gateway_says_about_its_models_file():
    found = read(document())

    assert (found.state, found.uptime_seconds, found.ranks) == ("serving", 4.5, ())
    assert found.gateway == GatewayReport(
        models_hash="0123456789abcdef",
        refusal="no JSON",
        problems=("models.a: wrong",),
        unusable_keys=(UnusableKeys(name="chat", accepted=0),),
    )


def test_a_gateway_without_problems_is_read_from_its_minimal_document():
    found = read(document(models_file={}, unusable_keys=[]))

    assert found.gateway == GatewayReport(models_hash="", refusal="", problems=(), unusable_keys=())


def test_both_sides_name_a_file_by_the_same_hash():
    text = models_text({"version": "v1", "models": {"é": {"key": "k"}}})

    assert content_hash(text) == engine.content_hash(text.encode())


def test_the_largest_minimal_document_is_one_that_the_operator_takes():
    longest = engine.shortened("é" * 10_000)
    keys = [{"name": "n" * 256, "problem": longest, "accepted": 1 << 20}] * engine.MAX_NAMES
    file = {"hash": "f" * 16, "refusal": longest, "problems": [longest] * engine.MAX_PROBLEMS}
    found = document(models_file=file, unusable_keys=keys)

    assert len(found.model_dump_json().encode()) < MAX_BYTES
    assert len(read(found).gateway.unusable_keys) == engine.MAX_NAMES


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": None}, "version None"),
        ({"models_file": None}, "models_file"),
        ({"unusable_keys": [{"name": "n" * 257, "problem": "", "accepted": 0}]}, "unusable_keys.0.name"),
    ],
)
def test_another_document_is_refused(change, words):
    body = json.dumps(json.loads(document().model_dump_json()) | change)

    with pytest.raises(EngineUnavailable, match=words):
        gateway_status(200, body.encode())


def test_the_operator_knows_how_many_names_a_report_lists():
    assert engine.MAX_NAMES == LISTED_NAMES

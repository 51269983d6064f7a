"""The models file and the keys that the gateway pods of an LLMGateway have read: decisions, and pods that answer."""

import asyncio
import base64
import contextlib
from dataclasses import replace

import pytest
from aiohttp import web

from rayloom_operator.api.llmgateway.spec import parse_gateway
from rayloom_operator.decide.conditions.accepted import VALID
from rayloom_operator.decide.llmgateway import plan
from rayloom_operator.decide.llmgateway.missing_keys import LISTED_NAMES
from rayloom_operator.decide.llmgateway.plan import UNREAD_S, reapply_after_s, requeue_after_s
from rayloom_operator.decide.llmgateway.situation import GatewaySituation, names_of, with_closed_names
from rayloom_operator.decide.llmgateway.status import gateway_status
from rayloom_operator.decide.requeue import REAPPLY_S, REGULAR_S
from rayloom_operator.engines.status import GatewayReport, UnusableKeys
from rayloom_operator.kube.client import KubeError
from rayloom_operator.objects.llmgateway.models_file import content_hash, models_text
from rayloom_operator.observe import poller as engine_poller
from rayloom_operator.observe.observed import DeploymentProgress
from rayloom_operator.observe.verdict import STALE_S
from rayloom_operator.reconcile.apply import objects
from rayloom_operator.times import Now
from rt_fake_kube import FakeKube
from rt_llmgateway import make_gateway_document, make_service_document, with_gateways
from rt_operator import CLOCK, SETTINGS, make_pod, make_reading, make_said

KEYS = {"apiKeySecretRef": {"name": "keys", "key": "all"}}
OWN_KEYS = {"apiKeySecretRef": {"name": "own", "key": "some"}}
CHAT = make_service_document()
ALIAS = {"name": "assistant", "targets": [{"service": "chat"}]}
COMPLETE = DeploymentProgress(is_seen=True, num_pods=2, num_updated=2)
REPLACING = DeploymentProgress(is_seen=True, num_pods=3, num_updated=1)
HASH = "0123456789abcdef"
PRESENT = "the hash of the present file"


def report(models_hash=PRESENT, *, refusal="", problems=(), **unusable):
    """A report about the models file. `unusable`: name whose keys cannot be read -> number of valid keys."""
    keys = tuple(UnusableKeys(name=name, accepted=accepted) for name, accepted in unusable.items())
    return GatewayReport(models_hash=models_hash, refusal=refusal, problems=problems, unusable_keys=keys)


def answers(*reports, at=100.0):
    """The readings of the gateway pods gateway-0, gateway-1 and so on."""
    said = [make_said(nodes=()).model_copy(update={"gateway": each}) for each in reports]
    return {f"gateway-{index}": make_reading(each, at=at) for index, each in enumerate(said)}


def situation(readings, *, progress=COMPLETE, services=(CHAT,), mono=100.0, previous=None, **spec):
    gateway = parse_gateway(make_gateway_document(**spec))
    members, aliases = names_of(gateway, services)
    found = GatewaySituation(
        now=Now(CLOCK, mono),
        settings=SETTINGS,
        generation=1,
        previous=previous or {},
        gateway=gateway,
        accepted=VALID,
        members=members,
        aliases=aliases,
        pods=tuple(make_pod(f"gateway-{index}", is_head=False) for index in range(2)),
        progress=progress,
    )
    present = found.models_hash
    for name, each in readings.items():
        gateway_report = None if each.status is None else each.status.gateway
        if gateway_report is not None and gateway_report.models_hash == PRESENT:
            said = gateway_report.model_copy(update={"models_hash": present})
            readings[name] = make_reading(each.status.model_copy(update={"gateway": said}), at=each.at)
    return with_closed_names(replace(found, readings=readings))


def shown(*args, **facts):
    """The status as a tuple: name and state of each pod; type -> status, reason and message of each condition."""
    status = gateway_status(situation(*args, **facts))
    conditions = {each.type: (each.status, str(each.reason), each.message) for each in status.conditions}
    return [(each.name, each.models) for each in status.pods], conditions


def test_pods_that_have_read_the_present_list_are_complete():
    pods, conditions = shown(answers(report(), report()))

    assert pods == [("gateway-0", "Current"), ("gateway-1", "Current")]
    assert conditions["Progressing"] == (
        "False",
        "Complete",
        "Every gateway pod has the present settings and the present list of models.",
    )


def test_a_pod_with_an_earlier_list_is_named():
    pods, conditions = shown(answers(report(), report(HASH)))

    assert pods == [("gateway-0", "Current"), ("gateway-1", "Outdated")]
    assert conditions["Progressing"][:2] == ("True", "ReadingModels")
    assert "1 of 2 gateway pods have read the present list of models." in conditions["Progressing"][2]
    assert "gateway-1" in conditions["Progressing"][2]
    assert conditions["Degraded"][0] == "False", "the kubelet needs some time"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (report(HASH, refusal="cache_dir: cannot write"), "serves by the one before: cache_dir: cannot write"),
        (report(problems=("models.a: no",)), "does not serve a part of the list of models: models.a: no"),
    ],
)
def test_a_refused_list_is_a_fault_with_the_sentence_of_the_pod(said, words):
    pods, conditions = shown(answers(said, report()))

    assert pods == [("gateway-0", "Refused"), ("gateway-1", "Current")]
    assert conditions["Degraded"][:2] == ("True", "ModelsRefused")
    assert "gateway-0: " in conditions["Degraded"][2] and words in conditions["Degraded"][2]
    assert "spec.image" in conditions["Degraded"][2]
    assert conditions["Progressing"][:2] == ("False", "Complete")


def test_pods_that_cannot_be_asked_are_unknown_and_no_fault():
    failed = make_reading(None, failing_since=90.0, error="no connection to 10.0.0.1:8001")
    pods, conditions = shown({"gateway-0": failed, **dict(list(answers(report(), report()).items())[1:])})

    assert pods == [("gateway-0", "Unknown"), ("gateway-1", "Current")]
    assert conditions["Progressing"][:2] == ("False", "Complete")
    assert "cannot ask gateway-0" in conditions["Progressing"][2]
    assert conditions["Degraded"][0] == "False"
    said = make_said(nodes=()).model_copy(update={"gateway": report(HASH)})
    waiting = situation({"gateway-0": make_reading(said, at=100.0, failing_since=101.0)}, mono=102.0)
    assert requeue_after_s(waiting) == STALE_S - 2.0
    assert requeue_after_s(situation(answers(report(), report()), mono=102.0)) > STALE_S
    stale, _ = shown(answers(report(), report()), mono=100.0 + STALE_S + 1)
    assert stale == [("gateway-0", "Unknown"), ("gateway-1", "Unknown")]


def test_a_name_without_keys_in_every_pod_is_closed_and_the_secret_is_named():
    services = (make_service_document(auth=KEYS),)
    found = gateway_status(situation(answers(report(chat=0), report(chat=0)), services=services))
    (model,) = found.models
    _, conditions = shown(answers(report(chat=0), report(chat=0)), services=services)

    assert (model.state, str(model.reason), found.serving) == ("Closed", "KeysMissing", "0/1")
    assert model.message == (
        "Gateway pods find no API keys of 'chat'. Requests for it are refused until the Secret keys has a key 'all' "
        "with one API key a line: create it in this namespace, or change spec.auth of the LLMService chat."
    )
    assert conditions["Available"] == ("False", "KeysMissing", f"No selected service serves. chat: {model.message}")
    assert conditions["Degraded"] == ("True", "KeysMissing", model.message)


def test_a_pod_that_still_knows_the_keys_keeps_the_name_open():
    for said in ((report(chat=0), report()), (report(chat=1), report(chat=1))):
        found = gateway_status(situation(answers(*said), services=(make_service_document(auth=KEYS),)))
        _, conditions = shown(answers(*said), services=(make_service_document(auth=KEYS),))
        assert found.models[0].state == "Serving"
        assert conditions["Available"][0] == "True"
        assert conditions["Degraded"][:2] == ("True", "KeysMissing")


def test_a_name_is_closed_only_if_every_pod_that_takes_requests_has_answered():
    silent = make_reading(None, failing_since=90.0, error="no connection to 10.0.0.1:8001")
    readings = answers(report(chat=0)) | {"gateway-1": silent}
    found = gateway_status(situation(readings, services=(make_service_document(auth=KEYS),)))
    assert found.models[0].state == "Serving"


def test_names_beyond_the_limit_of_a_report_share_the_answer_of_their_secret():
    names = [f"m{number:02}" for number in range(40)]
    services = tuple(make_service_document(name, auth=KEYS) for name in names)
    cut = report(**dict.fromkeys(names[:LISTED_NAMES], 0))
    found = gateway_status(situation(answers(cut, cut), services=services))
    assert {each.state for each in found.models} == {"Closed"} and len(found.models) == 40


def test_what_the_last_status_says_of_pods_stays_until_a_new_operator_has_asked_them():
    services = (make_service_document(auth=KEYS),)
    last = gateway_status(situation(answers(report(chat=0), report(chat=0)), services=services))
    new = situation({}, services=services, previous=last.model_dump(mode="json", by_alias=True))
    found = gateway_status(new)
    assert (found.models, found.pods) == (last.models, last.pods)
    assert found.models[0].state == "Closed"


@pytest.mark.parametrize(
    ("spec", "field", "secret"),
    [
        ({"aliases": [ALIAS | {"auth": OWN_KEYS}]}, "auth of the alias assistant in spec.aliases.", "own"),
        ({"aliases": [ALIAS], "auth": OWN_KEYS}, "spec.auth.", "own"),
        ({"aliases": [ALIAS]}, "spec.auth of the LLMServices behind the alias.", "keys"),
    ],
)
def test_the_keys_of_an_alias_are_named_by_their_field(spec, field, secret):
    readings = answers(report(assistant=0), report(assistant=0))
    found = gateway_status(situation(readings, services=(make_service_document(auth=KEYS),), **spec))
    (alias,) = found.aliases

    assert (alias.state, str(alias.reason)) == ("Closed", "KeysMissing")
    assert alias.message.endswith(field) and f"the Secret {secret} has" in alias.message
    assert found.models[0].state == "Serving"


def test_a_new_secret_is_no_fault_while_pods_are_replaced():
    readings = answers(report(chat=0), report(chat=0))
    _, conditions = shown(readings, services=(make_service_document(auth=KEYS),), progress=REPLACING)

    assert conditions["Degraded"][0] == "False", "only the new pods have the Secret"


def test_the_status_follows_the_answers_of_the_pods(monkeypatch):
    """Both pods have the same address, so they give the same answer."""
    monkeypatch.setattr(engine_poller, "_MIN_SERVING_INTERVAL_S", 0.02)
    monkeypatch.setattr(engine_poller, "_MIN_INTERVAL_S", 0.01)
    file = {"hash": HASH}

    async def answer(request):
        assert request.path_qs == "/status" and request.headers["Prefer"] == "return=minimal"
        assert request.headers["Authorization"].startswith("Bearer ")
        return web.json_response({"version": "v1", "state": "serving", "reason": "", "models_file": file})

    async def story(world):
        async with listening(monkeypatch, answer):
            await world.until(lambda: world.kube.named("Deployment"))
            world.show_pods(2, ip="127.0.0.1")
            await world.until(lambda: world.condition("Progressing").get("reason") == "ReadingModels")
            assert [each["modelsHash"] for each in world.status["pods"]] == [HASH, HASH]
            present = world.status["modelsHash"]
            assert present == content_hash(models_text(world.models_file))
            # A changed label makes the kubelet update a pod's files.
            await world.until(lambda: world.labels("rayloom.dev/models") == [present, present])
            labelled = [call for call in world.kube.calls if "/pods/" in call[1]]
            assert len(labelled) == 2, "each pod is labelled once"
            file["hash"] = present
            await world.until(lambda: world.condition("Progressing").get("reason") == "Complete")
            file["refusal"] = "models_file: no object"
            await world.until(lambda: world.condition("Degraded").get("reason") == "ModelsRefused")
            world.kube.remove(world.kube.path("LLMGateway"))
            await world.until(lambda: world.controller._poller.num_engines == 0)

    with_gateways(
        story, prepare=lambda world: world.kube.put(make_gateway_document()), services=[make_service_document()]
    )


def test_a_label_that_is_refused_is_no_fault_of_the_gateway(monkeypatch, caplog):
    monkeypatch.setattr(engine_poller, "_MIN_SERVING_INTERVAL_S", 0.02)
    document = {"version": "v1", "state": "serving", "reason": "", "models_file": {"hash": HASH}}

    async def answer(request):
        return web.json_response(document)

    async def story(world):
        world.kube.refusals["patch", "/pods/gateway-0"] = KubeError(403, "a policy forbids it")
        async with listening(monkeypatch, answer):
            await world.until(lambda: world.kube.named("Deployment"))
            world.show_pods(2, ip="127.0.0.1")
            await world.until(lambda: "cannot set rayloom.dev/models" in caplog.text)
            await world.until(lambda: world.condition("Progressing").get("reason") == "ReadingModels")
            assert world.condition("Accepted")["status"] == "True"

    with_gateways(
        story, prepare=lambda world: world.kube.put(make_gateway_document()), services=[make_service_document()]
    )


@pytest.mark.parametrize(
    ("said", "unread_s", "reapply_s", "requeue_s"),
    [
        (report(), None, REAPPLY_S, REGULAR_S),
        (report(HASH), 30.0, REAPPLY_S, UNREAD_S - 30.0),
        (report(HASH), UNREAD_S, UNREAD_S, UNREAD_S),
        (report(HASH, refusal="no object"), UNREAD_S, UNREAD_S, UNREAD_S),
        (report(refusal="no object"), UNREAD_S, UNREAD_S, UNREAD_S),
        (report(problems=("models.a: no",)), None, REAPPLY_S, REGULAR_S),
    ],
)
def test_objects_are_applied_again_if_a_pod_does_not_get_the_present_list(said, unread_s, reapply_s, requeue_s):
    found = replace(situation(answers(report(), said)), unread_s=unread_s)
    assert found.has_unread is (unread_s is not None)
    assert (reapply_after_s(found), requeue_after_s(found)) == (reapply_s, requeue_s)


def test_a_models_file_that_somebody_has_changed_is_written_again(monkeypatch):
    """The pods read the Secret at once, so their answers show its content."""
    monkeypatch.setattr(engine_poller, "_MIN_SERVING_INTERVAL_S", 0.02)
    monkeypatch.setattr(plan, "UNREAD_S", 0.05)
    monkeypatch.setattr(objects, "_LEAST_S", 0.05)
    kube = FakeKube()

    def secret():
        return kube.objects[kube.path("Secret")]

    async def answer(request):
        text = base64.b64decode(secret()["data"]["models.json"]).decode()
        file = {"hash": content_hash(text)}
        return web.json_response({"version": "v1", "state": "serving", "reason": "", "models_file": file})

    async def settle(world):
        async with listening(monkeypatch, answer):
            await world.until(lambda: world.kube.named("Deployment"))
            world.show_pods(2, ip="127.0.0.1")
            await world.until(lambda: world.condition("Progressing").get("reason") == "Complete")
            await world.rest()

    async def repair(world):
        async with listening(monkeypatch, answer):
            await world.until(lambda: secret()["data"] == wanted)
            await world.until(lambda: world.condition("Progressing").get("reason") == "Complete")

    services = [make_service_document()]
    with_gateways(settle, prepare=lambda world: kube.put(make_gateway_document()), kube=kube, services=services)
    wanted = secret()["data"]
    edited = base64.b64encode(b'{"models": {}}').decode()
    kube.put(secret() | {"data": wanted | {"models.json": edited}})  # while no operator runs
    with_gateways(repair, kube=kube, services=services)


@contextlib.asynccontextmanager
async def listening(monkeypatch, answer):
    """An admin port on loopback, which replaces the admin port of every pod."""
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(engine_poller, "ADMIN_PORT", runner.addresses[0][1])
    try:
        yield
    finally:
        await asyncio.shield(runner.cleanup())

"""The names that an LLMGateway serves: tables and invariants for selected services, conflicts, aliases and targets."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_operator.api.llmgateway.spec import parse_gateway
from rayloom_operator.decide.llmgateway.situation import names_of
from rt_llmgateway import make_gateway_document, make_service_document

KEYS = {"apiKeySecretRef": {"name": "keys", "key": "all"}}
OTHER_KEYS = {"apiKeySecretRef": {"name": "other", "key": "all"}}
CHAT = make_service_document()
NEXT = make_service_document("chat-next", created="2026-01-02T00:00:00Z")


def names(*services, **spec):
    return names_of(parse_gateway(make_gateway_document(**spec)), services)


def models(*services, **spec):
    """(served name, service, state, reason) of each selected service."""
    return [(each.name, each.service, each.state, str(each.reason)) for each in names(*services, **spec)[0]]


def alias(*services, targets=({"service": "chat"},), name="assistant", gateway=None, **parts):
    (found,) = names(*services, aliases=[{"name": name, "targets": list(targets), **parts}], **gateway or {})[1]
    return found


def without_gateway(document):
    found = copy.deepcopy(document)
    del found["spec"]["gateway"]
    return found


def without_status(document):
    return {name: part for name, part in document.items() if name != "status"}


def with_reason(reason, document):
    """The document with this reason in status.gateway."""
    return document | {"status": document["status"] | {"gateway": {"replicas": 0, "reason": reason}}}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (CHAT, ("Serving", "Serving")),
        (make_service_document(available="GatewayNotReady"), ("Serving", "Serving")),
        (make_service_document(available="Starting"), ("Waiting", "Starting")),
        (make_service_document(available="ScaledToZero"), ("Waiting", "ScaledToZero")),
        (make_service_document(available="OfANewerOperator"), ("Waiting", "EngineFailed")),
        (without_status(CHAT), ("Waiting", "Starting")),
        # The engines of the earlier revision have no port for gateways yet.
        (CHAT | {"status": {"conditions": CHAT["status"]["conditions"]}}, ("Waiting", "Starting")),
        (with_reason("NoPort", CHAT), ("Waiting", "Starting")),
        (with_reason("NoPort", make_service_document(available="GatewayNotReady")), ("Waiting", "GatewayNotReady")),
        (without_gateway(CHAT), ("Absent", "NoGatewayPort")),
        (make_service_document(auth={"apiKeySecretRef": {}}), ("Absent", "InvalidSpec")),
        # Another part of the spec is wrong: the engines of the earlier spec continue to run.
        (make_service_document(replicas=-1), ("Serving", "Serving")),
    ],
)
def test_the_state_of_a_service_follows_its_own_status(document, expected):
    assert models(document) == [("chat", "chat", *expected)]


def test_a_service_without_the_port_is_told_what_to_add():
    (member,) = names(without_gateway(CHAT))[0]

    assert member.entry is None
    assert "add `gateway: {replicas: 0}` to the spec of the LLMService" in member.message


@pytest.mark.parametrize("name", ["my chat", "tschüss", "chat\n", "a" * 257])
def test_a_name_that_gateway_pods_cannot_serve_is_absent_alone(name):
    odd = make_service_document("odd", model={"source": "builtin://smollm2-135m", "servedName": name})
    found = names(odd, CHAT)[0]

    assert [(each.name, each.state) for each in found] == [("chat", "Serving"), (name, "Absent")]
    absent = found[1]
    assert (absent.entry, str(absent.reason)) == (None, "InvalidSpec")
    assert "use 1 to 256 letters, digits and signs of ASCII, without spaces" in absent.message
    assert "Change spec.model.servedName of the service." in absent.message


@pytest.mark.parametrize("name", ["acme/Chat-7B:v2", "a" * 256, "!~"])
def test_a_name_of_visible_ascii_is_served(name):
    assert models(make_service_document(model={"source": "builtin://smollm2-135m", "servedName": name})) == [
        (name, "chat", "Serving", "Serving")
    ]


def test_only_selected_services_are_listed_and_the_oldest_is_first():
    others = make_service_document("private", labels={"public": "no"})

    assert [each[1] for each in models(NEXT, others, CHAT)] == ["chat", "chat-next"]


def test_the_served_name_is_that_of_the_model():
    served = {"model": {"source": "builtin://smollm2-135m", "servedName": "smollm2"}}

    assert models(make_service_document(**served)) == [("smollm2", "chat", "Serving", "Serving")]


@pytest.mark.parametrize(("created", "owner"), [("2026-01-02T00:00:00Z", "b"), ("2026-01-01T00:00:00Z", "a")])
def test_of_two_services_with_one_name_the_older_has_it_then_the_first_by_name(created, owner):
    served = {"model": {"source": "builtin://smollm2-135m", "servedName": "smollm2"}}
    a = make_service_document("a", created=created, **served)
    b = make_service_document("b", created="2026-01-01T00:00:00Z", **served)

    found = names(a, b)[0]
    assert [each.service for each in found if each.entry is not None] == [owner]
    (refused,) = [each for each in found if each.entry is None]
    assert refused.reason == "NameConflict"
    assert f"The older service {owner} has the served name 'smollm2'" in refused.message


def test_an_alias_shares_requests_by_weight():
    found = alias(CHAT, NEXT, targets=[{"service": "chat", "weight": 90}, {"service": "chat-next", "weight": 10}])

    assert (found.state, found.message) == ("Serving", "")
    assert found.entry.targets == (("chat", 90), ("chat-next", 10))
    assert found.entry.is_sticky
    assert not alias(CHAT, stickyBy="none").entry.is_sticky


def test_the_name_of_a_service_wins_over_an_alias():
    found = alias(CHAT, name="chat")

    assert (found.state, found.reason, found.entry) == ("Absent", "NameConflict", None)
    assert found.message.startswith("The service chat has the served name 'chat', and services come before aliases")


def test_an_alias_serves_with_the_rest_of_its_targets():
    found = alias(CHAT, targets=[{"service": "chat"}, {"service": "gone"}])

    assert (found.state, found.reason) == ("Serving", "TargetMissing")
    assert found.entry.targets == (("chat", 1),)
    assert found.message == (
        "spec.services selects no LLMService gone: add its labels to the service, or remove the target from the alias. "
        "The other targets get its requests."
    )


@pytest.mark.parametrize(
    "targets",
    [[{"service": "gone"}], [{"service": "gone"}, {"service": "chat", "weight": 0}]],
    ids=["none", "weight 0"],
)
def test_an_alias_without_a_target_that_is_drawn_is_not_served(targets):
    found = alias(CHAT, targets=targets)

    assert (found.state, found.reason, found.entry) == ("Absent", "TargetMissing", None)
    assert found.message.endswith(" No target with a weight above 0 is left, so the alias is not served.")
    assert "The other targets" not in found.message


def test_an_alias_waits_while_none_of_its_services_serves():
    found = alias(make_service_document(available="Starting"))

    assert (found.state, found.reason, found.message) == ("Waiting", "Starting", "No engine serves for chat.")


@pytest.mark.parametrize(
    ("gateway", "parts", "services", "secret"),
    [
        ({}, {}, (None, None), None),
        ({}, {}, (KEYS, KEYS), "keys"),
        ({}, {"auth": OTHER_KEYS}, (KEYS, None), "other"),
        ({"auth": OTHER_KEYS}, {}, (KEYS, None), "other"),
        ({"auth": OTHER_KEYS}, {"auth": KEYS}, (None, None), "keys"),
    ],
)
def test_the_keys_of_an_alias(gateway, parts, services, secret):
    documents = [
        make_service_document(name, **({"auth": auth} if auth else {}))
        for name, auth in zip(("chat", "chat-next"), services, strict=True)
    ]
    found = alias(*documents, targets=[{"service": "chat"}, {"service": "chat-next"}], gateway=gateway, **parts)

    assert (found.entry.auth.api_key_secret_ref.name if found.entry.auth else None) == secret


@pytest.mark.parametrize("other", [None, OTHER_KEYS])
def test_an_alias_opens_no_service_with_the_keys_of_another(other):
    second = make_service_document("chat-next", **({"auth": other} if other else {}))
    found = alias(make_service_document(auth=KEYS), second, targets=[{"service": "chat"}, {"service": "chat-next"}])

    assert (found.state, found.reason, found.entry) == ("Absent", "KeysDiffer", None)
    assert "give the alias keys of its own in `auth`" in found.message


NAMES = st.sampled_from(["a", "b", "c", "d"])
SERVICES = st.lists(
    st.builds(
        lambda name, served, day, has_port, is_selected, auth: {
            **(make_service_document if has_port else lambda *a, **k: without_gateway(make_service_document(*a, **k)))(
                name,
                labels={"public": "yes"} if is_selected else {},
                created=f"2026-01-0{day}T00:00:00Z",
                model={"source": "builtin://smollm2-135m", "servedName": served},
                **({"auth": auth} if auth else {}),
            )
        },
        NAMES,
        NAMES,
        st.integers(1, 3),
        st.booleans(),
        st.booleans(),
        st.sampled_from([None, KEYS, OTHER_KEYS]),
    ),
    unique_by=lambda document: document["metadata"]["name"],
    max_size=4,
)
ALIASES = st.lists(
    st.builds(
        lambda name, targets: {"name": name, "targets": [{"service": each, "weight": 1} for each in targets]},
        st.sampled_from(["a", "x", "y"]),
        st.lists(NAMES, min_size=1, max_size=3, unique=True),
    ),
    unique_by=lambda found: found["name"],
    max_size=3,
)


@settings(max_examples=150, deadline=None)
@given(SERVICES, ALIASES, st.randoms())
def test_whatever_is_selected_each_name_has_one_owner_and_its_own_keys(services, aliases, random):
    found, alias_states = names(*services, aliases=aliases)
    shuffled = list(services)
    random.shuffle(shuffled)

    assert names(*shuffled, aliases=aliases) == (found, alias_states)  # the order of a list does not matter
    served = [each.name for each in found if each.entry is not None]
    assert len(served) == len(set(served))
    selected = {each["metadata"]["name"] for each in services if each["metadata"]["labels"]}
    assert {each.service for each in found} == selected
    keys = {each.name: each.entry.auth for each in found if each.entry is not None}
    for each in alias_states:
        if each.entry is None:
            assert each.message
            continue
        assert each.name not in {member.name for member in found}
        assert {model for model, _ in each.entry.targets} <= keys.keys()
        assert {keys[model] for model, _ in each.entry.targets} == {each.entry.auth}

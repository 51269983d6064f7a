"""The digest of Secrets: which Secrets, and which of their entries, it covers."""

from dataclasses import replace
from datetime import timedelta

import pytest

from rayloom_operator.decide.changes.gateway import gateway_objects
from rayloom_operator.objects.secret_digest import SECRETS_ANNOTATION, has_digest, with_digest_of, without_digest
from rayloom_operator.objects.tls.certificates import PERIOD
from rt_llmgateway import make_service_document, objects_of_gateway
from rt_operator import CLOCK, SETTINGS, make_serving, turn
from rt_secret_digest import BEHIND, ENGINES, OPERATOR_KEY, SECRETS, TLS, changed, digest


def of_service(settings, wall):
    before = turn(BEHIND, [make_serving(BEHIND)]).document
    found = turn(BEHIND, [make_serving(BEHIND)], previous=before).situation
    return list(gateway_objects(replace(found, settings=settings, now=replace(found.now, wall=wall)), BEHIND))


def of_llmgateway(settings, wall):
    return objects_of_gateway(make_service_document(), settings=settings, wall=wall)


@pytest.mark.parametrize(
    ("make", "holder"),
    [(of_service, ("Service", "chat-engines")), (of_llmgateway, ("ServiceAccount", "public-llmgateway"))],
)
def test_one_object_that_users_do_not_edit_has_the_digest(make, holder):
    found = make(TLS, CLOCK)
    assert [(each["kind"], each["metadata"]["name"]) for each in found if has_digest(each)] == [holder]
    assert digest(found) == digest(make(TLS, CLOCK + timedelta(seconds=1)))


@pytest.mark.parametrize("make", [of_service, of_llmgateway])
@pytest.mark.parametrize(
    ("settings", "wall"),
    [
        (TLS, CLOCK + PERIOD),
        (replace(TLS, previous_key=b"p" * 16), CLOCK),
        (replace(TLS, operator_key=b"k" * 16), CLOCK),
        (SETTINGS, CLOCK),
    ],
    ids=["renewed", "previous key", "key", "without TLS"],
)
def test_the_digest_covers_certificates(make, settings, wall):
    before, after = make(TLS, CLOCK), make(settings, wall)
    certificates = [
        [each["data"] for each in found if each.get("type") == "kubernetes.io/tls"] for found in (before, after)
    ]
    assert certificates[0] != certificates[1]
    assert digest(before) != digest(after)


def test_each_entry_of_each_secret_changes_the_digest():
    found = {digest([with_digest_of(SECRETS, ENGINES, OPERATOR_KEY)])}
    for number, secret in enumerate(SECRETS):
        for field in secret["data"]:
            others = [*SECRETS[:number], changed(secret, field), *SECRETS[number + 1 :]]
            found.add(digest([with_digest_of(others, ENGINES, OPERATOR_KEY)]))
        found.add(digest([with_digest_of([*SECRETS[:number], *SECRETS[number + 1 :]], ENGINES, OPERATOR_KEY)]))
    # The digest itself, 2 + 3 + 3 entries, and three Secrets that are missing.
    assert len(found) == 1 + 8 + 3


def test_a_reader_of_the_digest_cannot_check_a_guess_of_a_secret():
    ours, theirs = (digest([with_digest_of(SECRETS, ENGINES, key)]) for key in (OPERATOR_KEY, b""))
    assert ours != theirs


def test_other_annotations_of_the_object_stay():
    theirs = ENGINES | {"metadata": ENGINES["metadata"] | {"annotations": {"team": "a"}}}
    found = with_digest_of(SECRETS, theirs, OPERATOR_KEY)
    assert found["metadata"]["annotations"] == {"team": "a", SECRETS_ANNOTATION: digest([found])}
    assert without_digest(found)["metadata"]["annotations"] == {"team": "a", SECRETS_ANNOTATION: ""}
    assert not has_digest(without_digest(found))

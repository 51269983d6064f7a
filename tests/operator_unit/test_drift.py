"""Who else changed an object, and what of that matters; a default of the operator's that changes."""

import asyncio
from dataclasses import replace

import pytest

from rayloom_operator.drift import Drift
from rayloom_operator.revision import revision, with_kept_image
from rt_fake_kube import FakeKube
from rt_operator import make_resolved

KEY = ("team", "chat")


def service(version="1", uid="u", kind="Service"):
    labels = {"rayloom.dev/service": "chat"}
    meta = {"name": "chat", "namespace": "team", "uid": uid, "resourceVersion": version, "labels": labels}
    return {"apiVersion": "v1", "kind": kind, "metadata": meta}


@pytest.mark.parametrize(
    ("wrote", "events", "is_drift"),
    [
        (["1"], [], False),
        (["1"], [("ADDED", "1")], False),
        (["1"], [("MODIFIED", "2")], True),
        (["1"], [("DELETED", "1")], True),
        (["1", "2"], [("ADDED", "1"), ("MODIFIED", "2")], False),
        ([], [("ADDED", "1")], False),
    ],
)
def test_only_what_somebody_else_did_is_drift(wrote, events, is_drift):
    async def story():
        drift = Drift(FakeKube(), lambda _: None)
        teller = drift.reflectors[0]
        # News may come before the answer to the request that made it.
        for kind, version in events:
            teller._take(kind, service(version))
        for version in wrote:
            drift.wrote(KEY, service(version))
        assert drift.take(KEY) is is_drift
        assert drift.take(KEY) is False

    asyncio.run(story())


def test_each_of_its_objects_that_changes_has_the_service_looked_at():
    async def story():
        told = []
        teller = Drift(FakeKube(), told.append).reflectors[0]
        teller._take("MODIFIED", service())
        teller._take("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
        assert told == [KEY]

    asyncio.run(story())


def test_a_new_default_image_counts_once_the_spec_changes_otherwise():
    first = make_resolved(image="engine:1")
    same = make_resolved(image="engine:2")
    changed = make_resolved(image="engine:2", drainSeconds=7)
    explicit = make_resolved(image="engine:2", engine={"image": "engine:2"})

    assert with_kept_image(same, "engine:1", revision(first)) == replace(same, image="engine:1")
    assert with_kept_image(changed, "engine:1", revision(first)) == changed
    assert with_kept_image(explicit, "engine:1", revision(first)) == explicit
    assert with_kept_image(same, "", "") == same

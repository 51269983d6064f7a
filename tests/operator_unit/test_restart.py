"""A change of `spec.restartedAt` makes a new revision. Specs that were stored without the field keep their revision.

Not covered: the rollout, which does not depend on the changed field.
"""

import pytest

from rayloom_operator.api.shipped_facts import builtin_facts
from rayloom_operator.errors import SpecError
from rayloom_operator.objects.old_spec import old_spec, resolved_of
from rayloom_operator.resolve.resolved import Hub, resolve
from rayloom_operator.resolve.revision import revision
from rt_operator import make_resolved, make_service
from rt_shapes import LLAMA31_8B, LLAMA31_70B

DOCUMENT = {"metadata": {"name": "chat", "namespace": "team", "uid": "uid-1"}}
TIME = "2026-11-24T08:00:00Z"
HINT = "is not a time; use a time such as 2026-11-24T08:00:00Z, as `date -u +%FT%TZ` prints it"
SMOLLM2 = {"source": "builtin://smollm2-135m"}
SMALL = {"resources": {"requests": {"cpu": "250m", "memory": "1Gi"}}}
# Revisions from the last commit without the field, with the image rayloom/engine:0.1.0.
REVISIONS = {
    "20046229": ("smollm2", {"model": SMOLLM2}, None),
    "b761edad": (
        "smollm2-pp2",
        {"model": SMOLLM2 | {"dtype": "float32"}, "parallelism": {"pipeline": 2}, "engine": SMALL},
        None,
    ),
    "fdc472c0": (
        "smollm2-two-replicas",
        {"model": SMOLLM2 | {"dtype": "float32"}, "replicas": 2, "engine": SMALL},
        None,
    ),
    "d57ebfdb": (
        "from-claim",
        {
            "model": {"source": "pvc://models/smollm2"},
            "scheduling": {"tolerations": [{"key": "dedicated", "value": "llm", "effect": "NoSchedule"}]},
        },
        None,
    ),
    "f95e6175": (
        "private-chat",
        {
            "model": {
                "source": "hf://my-org/my-private-model",
                "revision": "v1.0",
                "servedName": "chat",
                "tokenSecretRef": {"name": "hf-token", "key": "token"},
                "cache": {"persistentVolumeClaim": "model-cache"},
            },
            "auth": {"apiKeySecretRef": {"name": "chat-keys", "key": "keys"}},
            "engine": {
                "image": "registry.example.com/rayloom/engine:0.1.0",
                "imagePullSecrets": [{"name": "registry"}],
            },
            "scheduling": {"nodeSelector": {"kubernetes.io/arch": "amd64"}},
        },
        None,
    ),
    "2d58ad96": (
        "llama3-8b",
        {
            "model": {"source": "hf://meta-llama/Llama-3.1-8B-Instruct", "maxModelLen": 32768},
            "accelerator": {"resource": "nvidia.com/gpu", "memory": "24Gi"},
        },
        LLAMA31_8B,
    ),
    "6e3b6df3": (
        "llama3-70b",
        {
            "model": {"source": "hf://meta-llama/Llama-3.1-70B-Instruct", "maxModelLen": 131072},
            "parallelism": {"tensor": 8, "pipeline": 2},
            "sizing": {"minConcurrentRequests": 16},
            "accelerator": {"resource": "nvidia.com/gpu", "perNode": 8, "memory": "80Gi"},
        },
        LLAMA31_70B,
    ),
}


@pytest.mark.parametrize("expected", REVISIONS)
def test_a_spec_that_was_stored_before_the_field_keeps_its_revision(expected):
    name, spec, facts = REVISIONS[expected]
    service = make_service(name, **spec)
    facts = facts or builtin_facts(service.spec.model)

    assert revision(resolve(service, "rayloom/engine:0.1.0", facts)) == expected


def test_another_time_is_another_revision_and_the_same_time_is_not():
    never, once = revision(make_resolved()), revision(make_resolved(restartedAt=TIME))
    again = revision(make_resolved(restartedAt="2026-11-24T08:00:01Z"))

    assert len({never, once, again}) == 3
    assert revision(make_resolved(restartedAt=TIME)) == once


def test_engines_of_a_restarted_revision_can_be_recreated():
    resolved = make_resolved(restartedAt=TIME)
    kept = old_spec(resolved, revision(resolved), None)
    read = resolved_of(kept, DOCUMENT, Hub())

    assert kept["data"]["spec"]["restartedAt"] == TIME
    assert revision(read) == revision(resolved)


def test_a_revision_that_was_stored_before_the_field_is_still_readable():
    kept = old_spec(make_resolved(), "00000000", None)

    assert "restartedAt" not in kept["data"]["spec"]
    assert revision(resolved_of(kept, DOCUMENT, Hub())) == revision(make_resolved())


@pytest.mark.parametrize(
    "time",
    [
        TIME,
        "2026-11-24T08:00:00+02:00",
        "2026-11-24T08:00:00.123456789Z",
        "2024-02-29T23:59:59-12:30",
    ],
)
def test_a_time_may_have_a_zone_and_fractions(time):
    assert make_service(restartedAt=time).spec.restarted_at == time


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "2026-11-24",
        "2026-11-24 08:00:00Z",
        "2026-11-24T08:00:00",
        "2026-13-01T00:00:00Z",
        "2026-02-30T00:00:00Z",
        "2026-11-24T24:00:00Z",
        "2026-11-24T08:00:00Z\n",
    ],
)
def test_text_that_is_not_a_time_is_refused_with_an_example(text):
    with pytest.raises(SpecError) as caught:
        make_service(restartedAt=text)

    assert caught.value.problems == (f"spec.restartedAt: {text!r} {HINT}",)

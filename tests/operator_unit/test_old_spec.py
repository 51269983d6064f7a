"""The resolved spec of a revision can be read back from its ControllerRevision.

For unreadable data, the result is None.
"""

import asyncio

import pytest

from rayloom_operator.api.status import InspectedModel
from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.names import path_of
from rayloom_operator.objects.old_spec import old_spec, resolved_of
from rayloom_operator.reconcile.gather.old_specs import OldSpecs
from rayloom_operator.reconcile.gather.sizer import Sizer
from rayloom_operator.resolve.resolved import Hub, resolve
from rayloom_operator.resolve.revision import revision
from rt_fake_kube import FakeKube
from rt_operator import make_resolved, make_service
from rt_shapes import SMOLLM2

KEY = ("team", "chat")
DOCUMENT = {"metadata": {"name": "chat", "namespace": "team", "uid": "uid-1"}}
GPU = {"resource": "nvidia.com/gpu", "perNode": 2, "memory": "80Gi"}
FACTS = SMOLLM2


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"replicas": 3, "drainSeconds": 0, "parallelism": {"pipeline": 2}},
        {
            "engine": {
                "args": {"maxNumSeqs": 9},
                "env": [{"name": "A", "value": "1"}],
                "resources": {"limits": {"cpu": "2"}},
            }
        },
        {"rollout": {"maxSurge": 0, "maxUnavailable": 1, "analysis": {"maxTtftRatio": 2.5}}},
        {"scheduling": {"nodeSelector": {"a": "b"}}, "auth": {"apiKeySecretRef": {"name": "keys", "key": "k"}}},
    ],
)
def test_an_old_spec_makes_the_same_engines_again(spec):
    resolved = make_resolved(image="engine:of-then", **spec)
    read = resolved_of(old_spec(resolved, revision(resolved), None), DOCUMENT, Hub())

    assert revision(read) == revision(resolved)
    assert (read.image, read.shape, read.service.spec) == ("engine:of-then", resolved.shape, resolved.service.spec)


def test_the_computed_numbers_of_a_hub_model_are_kept_with_its_commit():
    service = make_service(model={"source": "hf://a/b", "revision": "main"}, accelerator=GPU)
    facts = InspectedModel(source="hf://a/b", revision="main", **dict(FACTS.model_copy(update={"commit": "c0ffee"})))
    resolved = resolve(service, "engine:1", facts)
    read = resolved_of(old_spec(resolved, revision(resolved), facts), DOCUMENT, Hub())

    assert read.commit == "c0ffee"
    assert revision(read) == revision(resolved)


def test_an_unreadable_revision_creates_no_engine():
    found = old_spec(make_resolved(), "00000000", None)

    assert resolved_of(found | {"data": {"image": "a"}}, DOCUMENT, Hub()) is None
    assert resolved_of(found | {"data": found["data"] | {"spec": {"ofALaterVersion": 1}}}, DOCUMENT, Hub()) is None


def test_old_specs_are_read_once_and_another_services_never():
    async def story():
        kube, resolved = FakeKube(), make_resolved(engine={"args": {"threads": 2}})
        name = revision(resolved)
        kept = kube.put(old_spec(resolved, name, None))
        specs = OldSpecs(kube, Hub(), Permissions(), Sizer())
        assert list(await specs.of(KEY, DOCUMENT, [name, "00000000"])) == [name]
        kube.remove(path_of(kept))
        assert list(await specs.of(KEY, DOCUMENT, [name])) == [name]
        # The spec is not read for another LLMService of this name. It is also not read after the rollouts that need it.
        other = {"metadata": DOCUMENT["metadata"] | {"uid": "uid-2"}}
        assert await specs.of(KEY, other, [name]) == {}
        assert await specs.of(KEY, DOCUMENT, []) == {}
        assert await specs.of(KEY, DOCUMENT, [name]) == {}
        kube.put(old_spec(resolved, name, None))
        assert await specs.of(KEY, other, [name]) == {}

    asyncio.run(story())

"""`spec.podTemplate` in the revision of a service and in its stored spec."""

from pathlib import Path

import pytest

from rayloom_operator.api.manifest import load_service
from rayloom_operator.api.shipped_facts import builtin_facts
from rayloom_operator.api.spec import parse
from rayloom_operator.objects.old_spec import old_spec, resolved_of
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.resolve.resolved import Hub, resolve
from rayloom_operator.resolve.revision import revision
from rt_operator import make_resolved
from rt_pod_template import REVISION
from rt_shapes import LLAMA31_8B

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCUMENT = {"metadata": {"name": "chat", "namespace": "team", "uid": "uid-1"}}
# Revisions of the examples, computed with the last version without pod templates.
REVISIONS = {
    "private-hub-model.yaml": "beb61b51",
    "pvc-model.yaml": "a81006c6",
    "qwen2.5-72b-tp8-pp2.yaml": "664a7527",
    "qwen3-8b-gpu.yaml": "56a99ffd",
    "smollm2-pp2.yaml": "d75c983a",
    "smollm2-tp3.yaml": "04183dea",
    "smollm2-two-replicas.yaml": "4a4dc1f7",
    "smollm2.yaml": "5584056f",
}


@pytest.mark.parametrize(("name", "before"), REVISIONS.items())
def test_objects_that_were_stored_before_pod_templates_roll_nothing(name, before):
    service = load_service(EXAMPLES / name)
    facts = builtin_facts(service.spec.model) or LLAMA31_8B.model_copy(update={"commit": "c" * 40})
    image = service.spec.engine.image or "rayloom/engine:1"

    assert revision(resolve(service, image, facts)) == before
    document = {"apiVersion": "rayloom.dev/v1alpha1", "kind": "LLMService", "metadata": {"name": service.metadata.name}}
    spec = service.spec.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
    # The template holds only the defaults of the definition, or is an empty map.
    empty = {"user": "Operator", "head": {"metadata": {}, "spec": {}}, "worker": {}}
    stored = parse(document | {"spec": spec | {"podTemplate": empty}})
    assert revision(resolve(stored, image, facts)) == before


def test_a_template_is_part_of_the_revision_and_of_its_stored_spec():
    template = {"worker": {"spec": {"volumes": [{"name": "a", "emptyDir": {}}], "hostIPC": True}}}
    resolved = make_resolved(podTemplate=template)
    read = resolved_of(old_spec(resolved, revision(resolved), None), DOCUMENT, Hub())

    assert revision(resolved) != revision(make_resolved())
    assert revision(read) == revision(resolved)
    assert ray_cluster(read, REVISION) == ray_cluster(resolved, REVISION)
    other = {"worker": {"spec": {"volumes": [{"name": "a", "emptyDir": {"medium": "Memory"}}], "hostIPC": True}}}
    assert revision(make_resolved(podTemplate=other)) != revision(resolved)

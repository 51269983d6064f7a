"""The fields of the spec whose change recreates engines: this file and the docs list each field of the schema.

If the schema has a new field, the first test fails until CHANGES has the effect of a change of this field. The last
test fails until the page has the field.
"""

import re
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from rayloom_operator.api.pod_template.template import PodTemplates
from rayloom_operator.api.shipped_facts import builtin_facts
from rayloom_operator.api.spec import Spec
from rayloom_operator.resolve.resolved import resolve
from rayloom_operator.resolve.revision import revision
from rt_operator import make_service
from rt_shapes import LLAMA31_8B, SMOLLM2

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "what-rolls.md").read_text(encoding="utf-8")
IMAGE = "rayloom/engine:1"
MAIN, OTHER = "c" * 40, "d" * 40
COMMITS = {None: MAIN, "main": MAIN, MAIN: MAIN, "v2": OTHER}  # revision on the hub -> commit
HUB: dict[str, Any] = {"model": {"source": "hf://a/b"}, "accelerator": {"memory": "80Gi", "perNode": 8}}
CPU: dict[str, Any] = {"model": {"source": "builtin://smollm2-135m"}}
ADAPTED = CPU | {"model": {"source": "builtin://smollm2-135m", "adapters": [{"name": "sql", "source": "pvc://a/b"}]}}
DRAFTED = CPU | {"model": {"source": "builtin://smollm2-135m", "draft": {"source": "hf://a/b"}}}
# A given maxModelLen is not shortened to fit. If one GPU is too small, the model gets several GPUs.
LONG = HUB | {"model": {"source": "hf://a/b", "maxModelLen": 131_072}}
CUT = HUB | {"accelerator": {"memory": "24Gi"}}  # 54560 tokens fit
STAGES = HUB | {"parallelism": {"tensor": 2, "pipeline": 4}}
AUTOSCALED = CPU | {"autoscaling": {"maxReplicas": 4}}
BEHIND_GATEWAYS = CPU | {"gateway": {"replicas": 1}}
BY_HTTP_ROUTE = CPU | {"gateway": {"route": {"httpRoute": {"parentRefs": [{"name": "a"}], "hostnames": ["a.com"]}}}}
BY_INGRESS = CPU | {"gateway": {"route": {"ingress": {"host": "a.com"}}}}
TAINT = {"key": "k", "operator": "Equal", "value": "v", "effect": "NoExecute", "tolerationSeconds": 1}
TAINTED = CPU | {"scheduling": {"tolerations": [TAINT]}}
SIMPLY_TAINTED = CPU | {"scheduling": {"tolerations": [{"key": "k"}]}}


@dataclass(frozen=True)
class Change:
    """The change of a field of `spec` from one value to another. None: the field is omitted."""

    before: Any
    after: Any
    rolls: bool
    spec: dict[str, Any] = field(default_factory=lambda: CPU)


def yes(before, after, spec=CPU):
    return Change(before, after, True, spec)


def no(before, after, spec=CPU):
    return Change(before, after, False, spec)


def models_in(annotation):
    """The pydantic model in a field's type, and whether it is in a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for each in get_args(annotation):
        model, is_list = models_in(each)
        if model is not None:
            return model, is_list or getattr(annotation, "__origin__", None) is tuple
    return None, False


def fields(model, prefix=""):
    """The path, as in manifests, of every field whose value is not a pydantic model."""
    for name, each in model.model_fields.items():
        path = prefix + (each.alias or name)
        inner, is_list = models_in(each.annotation)
        if inner is None:
            yield path
        else:
            yield from fields(inner, f"{path}[]." if is_list else f"{path}.")


CHANGES: dict[str, tuple[Change, ...]] = {
    "model.source": (yes("hf://a/b", "hf://a/c", HUB),),
    "model.revision": (no(None, "main", HUB), no("main", MAIN, HUB), yes("main", "v2", HUB)),
    "model.tokenSecretRef.name": (yes("a", "b", HUB | {"model": {**HUB["model"], "tokenSecretRef": {"key": "k"}}}),),
    "model.tokenSecretRef.key": (yes("a", "b", HUB | {"model": {**HUB["model"], "tokenSecretRef": {"name": "n"}}}),),
    "model.cache.persistentVolumeClaim": (yes("a", "b", HUB),),
    "model.cache.hostPath": (yes("/a", "/b", HUB),),
    "model.servedName": (no(None, "chat"), yes(None, "other")),
    "model.dtype": (yes("auto", "float32"),),
    "model.maxModelLen": (no(None, 54_560, CUT), yes(None, 4096, CUT)),
    "model.adapters[].name": (no("a", "b", ADAPTED),),
    "model.adapters[].source": (
        no("pvc://a/sql", "pvc://a/poems", ADAPTED),
        no("file:///a/sql", "file:///a/poems", ADAPTED),
        yes("pvc://a/sql", "pvc://b/sql", ADAPTED),
        yes("file:///a/sql", "file:///b/sql", ADAPTED),
        no("hf://a/sql", "hf://b/sql@v2", ADAPTED),
        yes("pvc://a/sql", "hf://b/sql", ADAPTED),
    ),
    "model.draft.source": (yes("hf://a/b", "hf://a/c", DRAFTED),),
    "model.draft.revision": (no(None, "main", DRAFTED), no("main", MAIN, DRAFTED), yes("main", "v2", DRAFTED)),
    "model.draft.quantization": (yes(None, "none", DRAFTED),),
    "parallelism.tensor": (no(None, 1), yes(None, 3)),
    "parallelism.pipeline": (no(None, 1), yes(None, 2)),
    "sizing.minConcurrentRequests": (no(1, 2, LONG), yes(1, 16, LONG)),
    "accelerator.resource": (yes("nvidia.com/gpu", "amd.com/gpu", HUB),),
    "accelerator.perNode": (no(8, 16, STAGES), yes(8, 2, STAGES)),
    "accelerator.memory": (no("80Gi", "81Gi", LONG), yes("80Gi", "24Gi", LONG)),
    "replicas": (no(1, 5),),
    "autoscaling.minReplicas": (no(1, 2, AUTOSCALED),),
    "autoscaling.maxReplicas": (no(4, 5, AUTOSCALED),),
    "autoscaling.goal.ttftSeconds": (no(2, 5, AUTOSCALED),),
    "autoscaling.idleSeconds": (no(600, 60, AUTOSCALED),),
    "gateway.replicas": (no(1, 2, BEHIND_GATEWAYS), no(2, 0, BEHIND_GATEWAYS)),
    "gateway.image": (no(None, "rayloom/gateway:2", BEHIND_GATEWAYS),),
    "gateway.resources.requests": (no({"cpu": "1"}, {"cpu": "2"}, BEHIND_GATEWAYS),),
    "gateway.resources.limits": (no({"cpu": "1"}, {"cpu": "2"}, BEHIND_GATEWAYS),),
    "gateway.holdSeconds": (no(300, 60, BEHIND_GATEWAYS),),
    "gateway.route.httpRoute.path": (no("/", "/v1", BY_HTTP_ROUTE),),
    "gateway.route.httpRoute.annotations": (no(None, {"a": "b"}, BY_HTTP_ROUTE),),
    "gateway.route.httpRoute.labels": (no(None, {"a": "b"}, BY_HTTP_ROUTE),),
    "gateway.route.httpRoute.parentRefs[].name": (no("a", "b", BY_HTTP_ROUTE),),
    "gateway.route.httpRoute.parentRefs[].namespace": (no(None, "b", BY_HTTP_ROUTE),),
    "gateway.route.httpRoute.parentRefs[].sectionName": (no(None, "b", BY_HTTP_ROUTE),),
    "gateway.route.httpRoute.parentRefs[].port": (no(None, 443, BY_HTTP_ROUTE),),
    "gateway.route.httpRoute.hostnames": (no(["a.com"], ["b.com"], BY_HTTP_ROUTE),),
    "gateway.route.ingress.path": (no("/", "/v1", BY_INGRESS),),
    "gateway.route.ingress.annotations": (no(None, {"a": "b"}, BY_INGRESS),),
    "gateway.route.ingress.labels": (no(None, {"a": "b"}, BY_INGRESS),),
    "gateway.route.ingress.className": (no(None, "b", BY_INGRESS),),
    "gateway.route.ingress.host": (no("a.com", "b.com", BY_INGRESS),),
    "gateway.route.ingress.tlsSecretName": (no(None, "b", BY_INGRESS),),
    "drainSeconds": (no(30, 31),),
    "restartedAt": (yes(None, "2026-11-24T08:00:00Z"), yes("2026-11-24T08:00:00Z", "2026-11-24T08:00:01Z")),
    "recovery.hangSeconds": (no(10, 7),),
    "recovery.rebuildSeconds": (no(600, 70),),
    "recovery.nodeLossSeconds": (no(15, 7),),
    "recovery.restartBudget": (no(5, 7),),
    "recovery.backoffBaseSeconds": (no(10, 1),),
    "recovery.backoffMaxSeconds": (no(300, 20),),
    "rollout.maxSurge": (no(1, 2),),
    "rollout.maxUnavailable": (no(0, 1),),
    "rollout.analysis.holdSeconds": (no(60, 5),),
    "rollout.analysis.minRequests": (no(20, 5),),
    "rollout.analysis.maxErrorPercent": (no(1, 5),),
    "rollout.analysis.maxTtftRatio": (no(2, 5),),
    "rollout.progressDeadlineSeconds": (no(1800, 60),),
    "rollout.autoRollback": (no(True, False),),
    "rollout.paused": (no(False, True),),
    "engine.image": (no(None, IMAGE), yes(None, "rayloom/engine:2")),
    "engine.imagePullPolicy": (no("IfNotPresent", "Always"),),
    "engine.imagePullSecrets[].name": (yes("a", "b"),),
    "engine.resources.requests": (yes({"cpu": "1"}, {"cpu": "2"}),),
    "engine.resources.limits": (yes({"cpu": "1"}, {"cpu": "2"}),),
    "engine.args.device": (no(None, "cpu"), no(None, "cuda", HUB), yes(None, "cuda")),
    "engine.args.quantization": (yes(None, "int8"),),
    "engine.args.modelBackend": (yes(None, "transformers"),),
    "engine.args.maxLoras": (yes(None, 4),),
    "engine.args.maxLoraRank": (yes(None, 64),),
    "engine.args.maxNumSeqs": (yes(None, 4),),
    "engine.args.maxNumBatchedTokens": (yes(None, 512),),
    "engine.args.maxQueuedRequests": (yes(None, 4),),
    "engine.args.enablePriority": (yes(None, True),),
    "engine.args.enablePromptEmbeds": (yes(None, True),),
    "engine.args.kvCacheMemoryBytes": (yes(None, 1 << 30),),
    "engine.args.numKvBlocks": (yes(None, 4096),),
    "engine.args.kvHostMemoryBytes": (yes(None, 1 << 30), yes(None, 1 << 30, HUB)),
    "engine.args.enablePrefixCaching": (yes(None, False),),
    "engine.args.asyncScheduling": (yes(None, True),),
    "engine.args.speculation": (yes(None, "ngram"), no(None, "draft", DRAFTED)),
    "engine.args.numSpeculativeTokens": (yes(None, 3),),
    "engine.args.ngramMin": (yes(None, 1),),
    "engine.args.ngramMax": (yes(None, 6),),
    "engine.args.threads": (yes(None, 2),),
    "engine.args.corsAllowedOrigins": (yes(None, ["*"]),),
    "engine.args.maxBodyBytes": (yes(None, 4096),),
    "engine.args.maxOutputTokens": (yes(None, 64),),
    "engine.args.maxLogprobs": (yes(None, 100),),
    "engine.args.enableForceIncludeUsage": (yes(None, True),),
    "engine.args.returnTokensAsTokenIds": (yes(None, True),),
    "engine.args.repeatSeconds": (yes(None, 5),),
    "engine.args.ui": (yes(None, True),),
    "engine.args.generationConfig": (yes(None, "none"),),
    "engine.args.toolParser": (yes(None, "hermes"),),
    "engine.args.reasoningParser": (yes(None, "none"),),
    "engine.args.rootPath": (yes(None, "/llm"),),
    "engine.args.metricsPrefix": (yes(None, "vllm"),),
    "engine.args.logLevel": (yes(None, "debug"),),
    "engine.env[].name": (yes("A", "B", CPU | {"engine": {"env": [{"value": "1"}]}}),),
    "engine.env[].value": (yes("1", "2", CPU | {"engine": {"env": [{"name": "A"}]}}),),
    "auth.apiKeySecretRef.name": (yes("a", "b", CPU | {"auth": {"apiKeySecretRef": {"key": "k"}}}),),
    "auth.apiKeySecretRef.key": (yes("a", "b", CPU | {"auth": {"apiKeySecretRef": {"name": "n"}}}),),
    "scheduling.nodeSelector": (yes({}, {"zone": "a"}),),
    "scheduling.priorityClassName": (yes(None, "high"),),
    "scheduling.tolerations[].key": (yes("k", "l", TAINTED),),
    "scheduling.tolerations[].operator": (yes("Equal", None, TAINTED),),
    "scheduling.tolerations[].value": (yes("v", "w", TAINTED),),
    "scheduling.tolerations[].effect": (
        yes(None, "NoSchedule", CPU | {"scheduling": {"tolerations": [{"key": "k"}]}}),
    ),
    "scheduling.tolerations[].tolerationSeconds": (yes(1, 2, TAINTED),),
}


# Lists of a pod template: an element with its required fields. OTHER has another value for each required field.
ELEMENTS: dict[str, dict[str, Any]] = {
    "topologySpreadConstraints": {"maxSkew": 1, "topologyKey": "k", "whenUnsatisfiable": "DoNotSchedule"},
    "imagePullSecrets": {"name": "a"},
    "hostAliases": {"ip": "192.0.2.1"},
    "resourceClaims": {"name": "a"},
    "volumes": {"name": "a", "emptyDir": {}},
    "initContainers": {"name": "a", "image": "i"},
    "containers": {"name": "a", "image": "i"},
    "env": {"name": "A"},
    "claims": {"name": "a"},
    "volumeMounts": {"name": "v", "mountPath": "/a"},
}
OTHER = {
    "maxSkew": 2,
    "topologyKey": "l",
    "whenUnsatisfiable": "ScheduleAnyway",
    "name": "w",
    "image": "j",
    "ip": "192.0.2.2",
    "mountPath": "/b",
}


def value_of(annotation):
    """A value that a field of this type may have."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)[-1]
    if annotation in (str, bool, int):
        return {str: "a", bool: True, int: 1}[annotation]
    inner = [each for each in get_args(annotation) if each not in (type(None), ...)]
    if get_origin(annotation) is tuple:
        return [value_of(inner[0])]
    if get_origin(annotation) is dict:
        return {"a": "1"}
    return value_of(inner[0])  # optional fields, or fields with bounds


def field_of(path):
    """The pydantic field at a path of the spec."""
    model, found = Spec, None
    for name in path.replace("[]", "").split("."):
        found = next(each for python, each in model.model_fields.items() if (each.alias or python) == name)
        model = models_in(found.annotation)[0]
    return found


def template_change(path):
    """The change of the field at `path` in a pod template. The template has only the parts that this field needs."""
    *names, last = path.split(".")
    pod = names[1]
    part = spec = {"model": CPU["model"], "podTemplate": {pod: {"spec": {}}}}
    if "volumeMounts[]" in names:
        spec["podTemplate"][pod]["spec"]["volumes"] = [{"name": name, "emptyDir": {}} for name in ("v", "w")]
    for name in names:
        key = name.removesuffix("[]")
        part = part.setdefault(key, [dict(ELEMENTS.get(key, {}))] if name.endswith("[]") else {})
        part = part[0] if name.endswith("[]") else part
    return yes(part.get(last), OTHER[last] if last in part else value_of(field_of(path).annotation), spec)


CHANGES["podTemplate.user"] = (yes("Operator", "Cluster"),)
for path in fields(PodTemplates, "podTemplate."):
    if path.startswith(("podTemplate.head.", "podTemplate.worker.")) and "tolerations" not in path:
        CHANGES[path] = (template_change(path),)
for pod in ("head", "worker"):
    for name in ("key", "operator", "value", "effect", "tolerationSeconds"):
        (change,) = CHANGES[f"scheduling.tolerations[].{name}"]
        template = {"podTemplate": {pod: {"spec": change.spec["scheduling"]}}}
        path = f"podTemplate.{pod}.spec.tolerations[].{name}"
        CHANGES[path] = (replace(change, spec=CPU | template),)


def with_value(spec, path, value):
    """The spec with this field set, or without it if `value` is None."""
    found = deepcopy(spec)
    *names, last = path.split(".")
    part = found
    for name in names:
        inside = part.setdefault(name.removesuffix("[]"), [{}] if name.endswith("[]") else {})
        part = inside[0] if name.endswith("[]") else inside
    part.pop(last, None)
    if value is not None:
        part[last] = value
    return found


def revision_of(spec):
    service = make_service(**spec)
    model = service.spec.model
    draft = model.draft
    facts = builtin_facts(model) or LLAMA31_8B.model_copy(update={"commit": COMMITS[model.revision]})
    if draft is not None:
        commit = COMMITS[draft.revision]
        facts = SMOLLM2.model_copy(update={"draft": SMOLLM2.as_draft().model_copy(update={"commit": commit})})
    return revision(resolve(service, service.spec.engine.image or IMAGE, facts))


def verdict(path):
    rolls = {change.rolls for change in CHANGES[path]}
    return "if" if len(rolls) == 2 else "yes" if rolls == {True} else "no"


def rows():
    """Yields the rows of the page's first table: pattern of a field's path, and the text of the second column."""
    for line in PAGE.split("| field of `spec` |")[1].split("\n\n")[0].splitlines():
        if line.startswith("| `"):
            names, says, _ = (cell.strip() for cell in line.strip("|").split("|"))
            for name in re.findall(r"`([^`]+)`", names):
                yield name, says


def covers(pattern, path):
    return path == pattern or (pattern.endswith(".*") and path.startswith(pattern.removesuffix("*")))


def test_every_field_of_the_spec_is_sorted_in():
    assert sorted(fields(Spec)) == sorted(CHANGES)


@pytest.mark.parametrize(
    ("path", "change"),
    [pytest.param(path, change, id=f"{path}-{change.after}") for path, each in CHANGES.items() for change in each],
)
def test_a_change_rolls_or_does_not(path, change):
    before, after = (with_value(change.spec, path, value) for value in (change.before, change.after))

    assert before != after
    assert (revision_of(before) != revision_of(after)) is change.rolls


def test_adding_or_removing_a_draft_model_rolls():
    assert revision_of(CPU) != revision_of(DRAFTED)


def test_adding_or_removing_the_gateway_rolls():
    assert revision_of(CPU) != revision_of(CPU | {"gateway": {}})
    assert revision_of(CPU | {"gateway": {}}) == revision_of(CPU | {"gateway": {"replicas": 0}})


def test_the_page_is_right_about_each_field():
    table = list(rows())
    said = {path: [says for pattern, says in table if covers(pattern, path)] for path in CHANGES}

    assert {path: [each.split()[0].rstrip(",") for each in found] for path, found in said.items()} == {
        path: [verdict(path)] for path in CHANGES
    }
    assert [name for name, _ in table if not any(covers(name, path) for path in CHANGES)] == []

"""The manifest's parser: accepted manifests, and the exact message for each mistake."""

import copy

import pytest

from rayloom_operator.api.spec import parse
from rayloom_operator.errors import SpecError


def manifest(**spec):
    return {
        "apiVersion": "rayloom.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": "chat"},
        "spec": {"model": {"source": "hf://Qwen/Qwen3-8B"}, **spec},
    }


def changed(path, value):
    """A manifest in which one field is set, or removed if `value` is the class `object`."""
    document = manifest()
    *parents, last = path.split(".")
    place = document
    for parent in parents:
        place = place.setdefault(parent, {})
    if value is object:
        del place[last]
    else:
        place[last] = value
    return document


def test_a_short_manifest_gets_the_defaults():
    service = parse(manifest())

    assert service.served_name == "chat"
    assert service.metadata.namespace == "default"
    assert service.spec.model.dtype == "auto"
    assert (service.spec.parallelism.tensor, service.spec.parallelism.pipeline) == (None, None)
    assert (service.spec.replicas, service.spec.drain_seconds) == (1, 30)
    assert service.spec.engine.env == ()


def test_a_full_manifest_is_read_field_by_field():
    service = parse(
        {
            "apiVersion": "rayloom.dev/v1alpha1",
            "kind": "LLMService",
            "metadata": {"name": "chat", "namespace": "team", "labels": {"a": "b"}, "annotations": {"c": "d"}},
            "spec": {
                "model": {
                    "source": "hf://Qwen/Qwen3-8B",
                    "revision": "main",
                    "servedName": "qwen3-8b",
                    "dtype": "bfloat16",
                    "maxModelLen": 32768,
                },
                "parallelism": {"tensor": 1, "pipeline": 2},
                "replicas": 1,
                "drainSeconds": 120,
                "engine": {
                    "image": "own/engine:1",
                    "imagePullPolicy": "Never",
                    "resources": {"requests": {"cpu": "250m"}, "limits": {"memory": "1.5Gi"}},
                    "args": {"maxNumSeqs": 8, "corsAllowedOrigins": ["*"]},
                    "env": [{"name": "A", "value": "1"}, {"name": "B", "value": ""}],
                },
            },
        }
    )

    assert service.served_name == "qwen3-8b"
    assert service.spec.model.max_model_len == 32768
    assert (service.spec.parallelism.tensor, service.spec.parallelism.pipeline) == (1, 2)
    assert service.spec.engine.image == "own/engine:1"
    assert service.spec.engine.image_pull_policy == "Never"
    assert service.spec.engine.resources.requests == {"cpu": "250m"}
    assert service.spec.engine.resources.limits == {"memory": "1.5Gi"}
    assert service.spec.drain_seconds == 120
    assert service.spec.engine.args.max_num_seqs == 8
    assert service.spec.engine.args.cors_allowed_origins == ("*",)
    assert [(variable.name, variable.value) for variable in service.spec.engine.env] == [("A", "1"), ("B", "")]


@pytest.mark.parametrize(
    "source",
    ["hf://Qwen/Qwen3-8B", "pvc://models/q-3/8b", "pvc://models", "file:///models/qwen", "builtin://smollm2-135m"],
)
def test_every_kind_of_source_is_accepted(source):
    service = parse(changed("spec.model.source", source))

    assert service.spec.model.source_kind == source.split(":")[0]


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("apiVersion", "v1", "apiVersion: 'v1' is not allowed; use rayloom.dev/v1alpha1"),
        ("apiVersion", object, "apiVersion: is missing; add it. Version of this document's schema."),
        ("kind", "Deployment", "kind: 'Deployment' is not allowed; use LLMService"),
        ("spec", object, "spec: is missing; add it. The model and how to serve it."),
        (
            "metadata.name",
            "My_Chat",
            "metadata.name: 'My_Chat' is not allowed. Name of the service: lower-case letters, digits and '-', "
            "at most 40 characters.",
        ),
        ("metadata.name", "a" * 41, f"metadata.name: '{'a' * 41}' has 41 characters; use at most 40"),
        ("metadata.labels", {"a": 1}, "metadata.labels.a: 1 is not allowed; this must be text; put it in quotes"),
        ("metadata.label", {}, "metadata.label: is not a field; did you mean labels?"),
        (
            "spec.model.source",
            "s3://bucket",
            "spec.model.source: 's3://bucket' is not a model source; use one of hf://ORG/NAME, "
            "pvc://CLAIM/PATH, file:///PATH, builtin://smollm2-135m",
        ),
        *(
            (
                "spec.model.source",
                given,
                f"spec.model.source: '{given}' is not a model source; use one of hf://ORG/NAME, pvc://CLAIM/PATH, "
                f"file:///PATH, builtin://smollm2-135m; did you mean {meant}?",
            )
            for given, meant in (
                ("meta-llama/Llama-3.1-8B", "hf://meta-llama/Llama-3.1-8B"),
                ("https://huggingface.co/Qwen/Qwen3-0.6B", "hf://Qwen/Qwen3-0.6B"),
                ("/models/llama", "file:///models/llama"),
                ("smollm2-135m", "builtin://smollm2-135m"),
            )
        ),
        (
            "spec.model.dtype",
            "int3",
            "spec.model.dtype: 'int3' is not allowed; use one of auto, bfloat16, float16, float32",
        ),
        ("spec.model.servedName", "", "spec.model.servedName: is empty; give it a value, or remove the field"),
        ("spec.model.served_name", "x", "spec.model.served_name: is not a field; did you mean servedName?"),
        ("spec.model.maxModelLen", "4k", "spec.model.maxModelLen: '4k' is not allowed; this must be a whole number"),
        ("spec.model.maxModelLen", 0, "spec.model.maxModelLen: 0 is too small; use 2 or more"),
        ("spec.model.maxModelLen", True, "spec.model.maxModelLen: True is not allowed; this must be a whole number"),
        ("spec.model", None, "spec.model: an empty value is not allowed; this must be a map"),
        (
            "spec.parallelism.tensor",
            0,
            "spec.parallelism.tensor: 0 is too small; use 1 or more",
        ),
        (
            "spec.replicas",
            -1,
            "spec.replicas: -1 is not possible: use 0 to 64 replicas; 0 suspends the service",
        ),
        (
            "spec.replicas",
            65,
            "spec.replicas: 65 is not possible: use 0 to 64 replicas; 0 suspends the service",
        ),
        (
            "spec.engine.resources",
            {"requests": {"cpu": 1}},
            "spec.engine.resources.requests.cpu: 1 is not allowed; this must be text; put it in quotes",
        ),
        (
            "spec.engine.resources",
            {"limits": {"memory": "much"}},
            "spec.engine.resources.limits.memory: 'much' is not allowed",
        ),
        ("spec.recovery.hangSeconds", 0, "spec.recovery.hangSeconds: 0 is too small; use 1 or more"),
        (
            "spec.recovery",
            {"backoffBaseSeconds": 400},
            "spec.recovery: backoffMaxSeconds is less than backoffBaseSeconds: raise it, or lower backoffBaseSeconds",
        ),
        (
            "spec.engine.args",
            {"ngramMin": 6},
            "spec.engine.args: ngramMin (default 2) is more than ngramMax (default 5): lower it, or raise the other",
        ),
        (
            "spec.engine.args.speculation",
            "draft",
            "spec: engine.args.speculation is draft, and no draft model is named: name it in model.draft.source, or "
            "use ngram",
        ),
        (
            "spec.engine.args",
            {"kvHostMemoryBytes": 4096, "enablePrefixCaching": False},
            "spec.engine.args: kvHostMemoryBytes is for copies of cached blocks, but enablePrefixCaching is false: "
            "remove one of the two",
        ),
        ("spec.drainSeconds", -1, "spec.drainSeconds: -1 is too small; use 0 or more"),
        (
            "spec.routers",
            {},
            "spec.routers: is not a field; remove it. Fields here: ",
        ),
        ("spec.gateways", {}, "spec.gateways: is not a field; did you mean gateway?"),
        (
            "spec.autoscaling",
            {},
            "spec.autoscaling.maxReplicas: is missing; add it. Greatest number of engines. A change restarts no "
            "engine.",
        ),
        (
            "spec.autoscaling",
            {"minReplicas": 3, "maxReplicas": 2},
            "spec.autoscaling: minReplicas is more than maxReplicas: lower it, or raise maxReplicas",
        ),
        (
            "spec.autoscaling",
            {"minReplicas": 0, "maxReplicas": 2},
            "spec: autoscaling.minReplicas 0 needs a gateway that holds requests while no engine runs: add "
            "gateway to the spec (with replicas 0 if an LLMGateway has the pods), or set minReplicas to 1 or more. To "
            "stop the service by hand, set replicas 0",
        ),
        ("spec.engine.args.maxNumSeqs", 5000, "spec.engine.args.maxNumSeqs: 5000 is too large; use 4096 or less"),
        ("spec.engine.args.port", 1, "spec.engine.args.port: is not a field; remove it. Fields here: device, "),
        (
            "spec.engine.args.corsAllowedOrigins",
            "*",
            "spec.engine.args.corsAllowedOrigins: '*' is not allowed; this must be a list",
        ),
        (
            "spec.engine.args.enablePrefixCaching",
            "yes",
            "spec.engine.args.enablePrefixCaching: 'yes' is not allowed; this must be true or false",
        ),
        (
            "spec.engine.env",
            [{"name": "A", "value": "1"}, {"name": "B", "value": 1}],
            "spec.engine.env[1].value: 1 is not allowed; this must be text; put it in quotes",
        ),
        (
            "spec.engine.env",
            [{"value": "1"}],
            "spec.engine.env[0].name: is missing; add it. Name of an environment variable.",
        ),
        (
            "spec.engine.env",
            [{"name": name, "value": "1"} for name in "ABA"],
            "spec.engine.env: A is given more than once; keep one value of each name",
        ),
    ],
)
def test_each_mistake_is_named_with_its_cure(path, value, sentence):
    with pytest.raises(SpecError) as caught:
        parse(changed(path, value))

    (problem,) = caught.value.problems
    # An expected sentence about an unknown field ends before the list of all fields. This list would only repeat the
    # fields of the class.
    assert problem == sentence or (sentence.endswith((", ", ": ")) and problem.startswith(sentence))


HUB_ONLY = "tokenSecretRef and cache have an effect for hf:// sources of the model, its draft model or an adapter only"
SECRET = {"name": "s", "key": "k"}
TOLERATION = (
    "a toleration needs a key, or operator Exists; Exists takes no value; tolerationSeconds needs effect NoExecute"
)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (
            "spec.model",
            {"source": "builtin://smollm2-135m", "revision": "main"},
            "spec.model: revision 'main' has no effect for 'builtin://smollm2-135m'; remove it, or use an hf:// source",
        ),
        ("spec.model", {"source": "pvc://claim", "tokenSecretRef": SECRET}, f"spec.model: {HUB_ONLY}"),
        ("spec.model", {"source": "file:///m", "cache": {"hostPath": "/c"}}, f"spec.model: {HUB_ONLY}"),
        (
            "spec.model",
            {"source": "hf://a/b", "cache": {}},
            "spec.model.cache: give either persistentVolumeClaim or hostPath",
        ),
        (
            "spec.model",
            {"source": "hf://a/b", "cache": {"persistentVolumeClaim": "c", "hostPath": "/c"}},
            "spec.model.cache: give either persistentVolumeClaim or hostPath",
        ),
        (
            "spec.auth",
            {"apiKeySecretRef": {"name": "s"}},
            "spec.auth.apiKeySecretRef.key: is missing; add it. Key in the",
        ),
        ("spec.scheduling", {"tolerations": [{"value": "x"}]}, f"spec.scheduling.tolerations[0]: {TOLERATION}"),
        (
            "spec.scheduling",
            {"tolerations": [{"key": "a", "tolerationSeconds": 3}]},
            f"spec.scheduling.tolerations[0]: {TOLERATION}",
        ),
        (
            "spec.scheduling",
            {"tolerations": [{"operator": "Exists", "value": "x"}]},
            f"spec.scheduling.tolerations[0]: {TOLERATION}",
        ),
        (
            "spec.scheduling",
            {"tolerations": [{"operator": "Exists", "value": ""}]},
            f"spec.scheduling.tolerations[0]: {TOLERATION}",
        ),
    ],
)
def test_fields_without_effect_are_refused(path, value, problem):
    with pytest.raises(SpecError) as caught:
        parse(changed(path, value))

    (found,) = caught.value.problems
    assert found.startswith(problem)


def test_all_mistakes_are_named_at_once():
    document = manifest(replicas="two", drainSeconds=None)

    with pytest.raises(SpecError) as caught:
        parse(document)

    assert caught.value.problems == (
        "spec.replicas: 'two' is not allowed; this must be a whole number",
        "spec.drainSeconds: an empty value is not allowed; this must be a whole number",
    )


@pytest.mark.parametrize("document", ["text", 3, ["a"]])
def test_a_document_that_is_not_a_map_is_refused(document):
    with pytest.raises(SpecError) as caught:
        parse(document)

    assert caught.value.problems == (f"(document): {document!r} is not allowed; this must be a map",)


def test_fields_that_the_api_server_adds_are_accepted():
    document = manifest()
    document["status"] = {"phase": "Ready"}
    document["metadata"] |= {"uid": "1", "resourceVersion": "2", "generation": 3, "managedFields": []}
    document["metadata"] |= {"generateName": "chat-", "aFieldOfALaterVersion": {}}
    before = copy.deepcopy(document)

    assert parse(document).metadata.name == "chat"
    assert document == before


@pytest.mark.parametrize("source", ["hf://acme/naïve", "pvc://claim/größe"])
def test_letters_of_other_alphabets_are_refused_as_by_the_api_server(source):
    """The regular expressions of the API server know only ASCII letters."""
    with pytest.raises(SpecError, match="is not a model source"):
        parse(changed("spec.model.source", source))

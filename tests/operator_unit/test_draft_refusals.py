"""Mistakes in the draft model of a manifest, and the sentences that name the cure."""

import pytest

from rayloom_operator.errors import SpecError
from rt_operator import make_service

SOURCE = "builtin://smollm2-135m"
OWN = {"source": SOURCE, "draft": {"source": SOURCE}}
TAKEN = ("/tmp", "/tmp/ray/", "/usr", "/usr/local/lib", "/opt", "/adapters/claim/d")
UP = ("file:///data/../etc", "file:///data//d", "file:////tmp", "pvc://claim/../../etc", "pvc://claim/./d", "hf://../d")
HIDDEN = (
    ({"source": "file:///draft-model"}, "file:///draft-model"),
    ({"source": "file:///draft-model/m"}, "file:///draft-model/m"),
    ({"adapters": [{"name": "a", "source": "file:///draft-model/a"}]}, "file:///draft-model/a"),
)


def template(volume):
    return {"worker": {"spec": {"volumes": [{"name": volume, "emptyDir": {}}]}}}


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"draft": {}}, "spec.model.draft.source: is missing; add it. Source of the draft model: hf://ORG/NAME, "),
        (
            {"draft": {"source": "acme/draft"}},
            "spec.model.draft.source: 'acme/draft' is not a model source; use one of hf://ORG/NAME, pvc://CLAIM/PATH, "
            "file:///PATH, builtin://smollm2-135m; did you mean hf://acme/draft?",
        ),
        (
            {"draft": {"source": SOURCE, "revision": "v2"}},
            f"spec.model.draft: revision 'v2' has no effect for '{SOURCE}'; remove it, or use an hf:// source",
        ),
        (
            {"draft": {"source": SOURCE, "quantization": "int4"}},
            "spec.model.draft.quantization: 'int4' is not allowed; use one of auto, none, int8",
        ),
        (
            {"draft": {"source": SOURCE, "tokens": 5}},
            "spec.model.draft.tokens: is not a field; remove it. Fields here: source, revision, quantization",
        ),
        ({"draftModel": {"source": SOURCE}}, "spec.model.draftModel: is not a field; did you mean draft?"),
        (
            {"source": "pvc://claim/m", "draft": {"source": "file:///models/d"}},
            "spec.model: draft: the claim of the model is mounted at /models, so the draft model cannot be in this",
        ),
        (
            {"draft": {"source": "file:///etc/rayloom-keys"}},
            "spec.model.draft.source: 'file:///etc/rayloom-keys' is not allowed: pods mount the draft model at its own "
            "path, where it must not hide a folder of their own or of the engine's image: the path must not be /cache, "
            "/opt, /tmp, /tmp/ray, /var, nor be or lie in /adapters, /bin,",
        ),
        *(({"draft": {"source": f"file://{path}"}}, f"'file://{path}' is not allowed: pods") for path in TAKEN),
        *(({"draft": {"source": source}}, f"'{source}' is not allowed: the path must not have an") for source in UP),
        *(
            (
                {"draft": {"source": "pvc://drafts"}, **given},
                f"spec.model: {hidden}: the claim of the draft model is mounted at /draft-model, so neither the model",
            )
            for given, hidden in HIDDEN
        ),
        (
            {"dtype": "float16", "draft": {"source": SOURCE, "quantization": "int8"}},
            "spec: model.draft.quantization int8 works with model.dtype auto, bfloat16 or float32, and model.dtype is",
        ),
        (
            {"draft": {"source": SOURCE}, "tokenSecretRef": {"name": "n", "key": "k"}},
            "tokenSecretRef and cache have an effect for hf:// sources of the model, its draft model or an adapter",
        ),
    ],
)
def test_a_mistake_in_the_draft_model_is_named_with_its_cure(spec, sentence):
    with pytest.raises(SpecError) as refused:
        make_service(model={"source": SOURCE, **spec})
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("model", "spec", "sentence"),
    [
        (
            OWN,
            {"engine": {"args": {"speculation": "ngram"}}},
            "spec: engine.args.speculation: ngram: model.draft names a draft model, and engine.args.speculation "
            "chooses another kind of drafts: remove one of the two",
        ),
        (OWN, {"engine": {"args": {"speculation": "off"}}}, "spec: engine.args.speculation: off: model.draft names"),
        (
            {"source": SOURCE},
            {"engine": {"args": {"speculation": "draft"}}},
            "spec: engine.args.speculation is draft, and no draft model is named: name it in model.draft.source",
        ),
        (
            {"source": SOURCE, "draft": {"source": SOURCE, "quantization": "int8"}},
            {"accelerator": {"memory": "80Gi"}},
            "spec: model.draft.quantization int8 works on CPU only: remove it, or remove accelerator",
        ),
        (
            {"source": SOURCE, "draft": {"source": SOURCE, "quantization": "int8"}},
            {"engine": {"args": {"device": "cuda"}}},
            "spec: model.draft.quantization int8 works on CPU only: remove it, or remove accelerator and engine",
        ),
        (OWN, {"podTemplate": template("draft-model")}, "spec: draft-model: beside model.draft no volume of"),
    ],
)
def test_a_contradiction_to_the_draft_model_is_refused(model, spec, sentence):
    with pytest.raises(SpecError) as refused:
        make_service(model=model, **spec)
    assert sentence in str(refused.value)


def test_a_template_may_have_the_draft_models_volume_and_its_folder_without_a_draft_model():
    make_service(model={"source": SOURCE}, podTemplate=template("draft-model"))
    mounts = [{"name": "v", "mountPath": "/draft-model"}]
    at = {"volumes": [{"name": "v", "emptyDir": {}}], "containers": [{"name": "engine", "volumeMounts": mounts}]}
    in_claim = {"source": SOURCE, "draft": {"source": "pvc://claim/d"}}
    make_service(model=OWN, podTemplate={"head": {"spec": at}})
    with pytest.raises(SpecError, match="/draft-model: this mountPath of container engine hides the model"):
        make_service(model=in_claim, podTemplate={"head": {"spec": at}})

"""The draft model of a service: the pods and documents that it changes, and its inspection.

Mistakes in a manifest are in test_draft_refusals.py, its memory is in test_draft_sizing.py, and its rollouts are in
test_what_rolls.py.
"""

import pytest

from rayloom_operator.api.status import Reason, Status, stored_model
from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.errors import NotAllowed, SpecError
from rayloom_operator.local.serve import _check
from rayloom_operator.objects.engine_config import engine_config, pod_engine_config
from rayloom_operator.objects.inspect_job import Commits, inspect_job
from rayloom_operator.objects.old_spec import old_spec, resolved_of
from rayloom_operator.objects.pod import model_mounts
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.resolve.resolved import Hub, resolve
from rayloom_operator.resolve.revision import revision
from rt_inspection import COMMIT, DRAFT, DRAFT_COMMIT, HUB_MODEL, ended, facts, failure, look
from rt_operator import SETTINGS, make_resolved, make_service
from rt_shapes import SMOLLM2

SOURCE = "builtin://smollm2-135m"
OWN = {"source": SOURCE, "draft": {"source": SOURCE}}
HUB_DRAFT = {"source": "hf://acme/draft"}
DRAFTED = {**HUB_MODEL, "draft": HUB_DRAFT}


def facts_with_draft(**changes):
    return facts(draft=DRAFT | changes)


def test_a_draft_model_implies_speculation_and_its_settings_reach_the_engine():
    draft = {"source": SOURCE, "quantization": "int8"}
    resolved = make_resolved(model={"source": SOURCE, "draft": draft}, engine={"args": {"numSpeculativeTokens": 3}})
    expected = {
        "speculation": "draft",
        "draft_model": SOURCE,
        "draft_quantization": "int8",
        "num_speculative_tokens": 3,
    }
    for document in (pod_engine_config(resolved), engine_config(resolved.service, host="h", port=1, admin_port=2)):
        assert {name: value for name, value in document.items() if "draft" in name or "specul" in name} == expected


def test_the_value_draft_beside_a_draft_model_changes_nothing():
    said = make_resolved(model=OWN, engine={"args": {"speculation": "draft"}})

    assert revision(said) == revision(make_resolved(model=OWN))
    assert pod_engine_config(said) == pod_engine_config(make_resolved(model=OWN))


def places(model, **spec):
    """(volumes, mounts) of the draft model in the pods of the engine and of the inspection, and its path."""
    resolved = resolve(make_service(model=model, **spec), "image")
    cluster = ray_cluster(resolved, "abcd")["spec"]
    templates = [cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]]
    templates.append(inspect_job(resolved.service, "image", Hub(), 0)["spec"]["template"])
    found = []
    for pod in (each["spec"] for each in templates):
        volumes = [{**each} for each in pod["volumes"] if each["name"] == "draft-model"]
        every = (mount for container in pod["containers"] for mount in container["volumeMounts"])
        mounts = [mount["mountPath"] for mount in every if mount["name"] == "draft-model" and mount["readOnly"]]
        found.append(([{name: each[name] for name in each if name != "name"} for each in volumes], mounts))
    return found, pod_engine_config(resolved)["draft_model"]


def test_a_draft_model_in_another_claim_has_a_volume_of_its_own():
    found, path = places({"source": "pvc://claim/m", "draft": {"source": "pvc://drafts/team/d/"}})

    claim = ([{"persistentVolumeClaim": {"claimName": "drafts"}}], ["/draft-model"])
    assert (found, path) == ([claim, claim, claim], "file:///draft-model/team/d")


def test_a_draft_model_in_the_claim_of_the_model_needs_no_further_volume():
    found, path = places({"source": "pvc://claim/m", "draft": {"source": "pvc://claim/d"}})

    assert (found, path) == ([([], [])] * 3, "file:///models/d")


@pytest.mark.parametrize(("name", "kind"), [("d", "Directory"), ("d.gguf", "File")])
def test_a_draft_model_on_the_nodes_is_mounted_at_its_own_path(name, kind):
    found, path = places({"source": SOURCE, "draft": {"source": f"file:///data/{name}"}})

    folder = ([{"hostPath": {"path": f"/data/{name}", "type": kind}}], [f"/data/{name}"])
    assert (found, path) == ([folder] * 3, f"file:///data/{name}")


@pytest.mark.parametrize("path", ["/tmp/d", "/opt/drafts", "/cache/d", "/models/d", "/draft-model", "/data/a.b/d..c"])
def test_a_draft_model_beside_the_folders_of_the_pods_is_allowed(path):
    assert places({"source": SOURCE, "draft": {"source": f"file://{path}"}})[1] == f"file://{path}"


def test_a_draft_model_in_a_folder_that_is_mounted_anyway_needs_no_further_volume():
    inside, _ = places({"source": "file:///data/m", "draft": {"source": "file:///data/m/d"}})
    same, _ = places({"source": "file:///data/m", "draft": {"source": "file:///data/m/"}})
    adapters = [{"name": "sql", "source": "file:///data/sql"}]
    beside, _ = places({"source": SOURCE, "adapters": adapters, "draft": {"source": "file:///data/d"}})

    assert inside == same == [([], [])] * 3
    own = ([{"hostPath": {"path": "/data/d", "type": "Directory"}}], ["/data/d"])
    assert beside == [([], []), ([], []), own], "the pod of the inspection mounts no adapters"


def test_a_mounted_claim_does_not_have_the_draft_model_of_the_nodes():
    adapters = [{"name": "sql", "source": "pvc://loras/sql"}]
    service = make_service(model={"source": SOURCE, "adapters": adapters, "draft": {"source": "file:///data/d"}})
    # The spec refuses this path; here it stands for a folder of the nodes inside any mounted claim.
    draft = service.spec.model.draft.model_copy(update={"source": "file:///adapters/loras/d"})
    model = service.spec.model.model_copy(update={"draft": draft})
    service = service.model_copy(update={"spec": service.spec.model_copy(update={"model": model})})

    mounts = {each["name"]: each["mountPath"] for each in model_mounts(service, Hub())}
    assert mounts == {"adapters-0": "/adapters/loras", "draft-model": "/adapters/loras/d"}


def test_pods_get_access_to_the_hub_for_a_draft_model_alone():
    secret = {"name": "hub", "key": "token"}
    model = {"source": SOURCE, "draft": HUB_DRAFT, "tokenSecretRef": secret, "cache": {"persistentVolumeClaim": "c"}}
    resolved = resolve(make_service(model=model), "image")
    (workers,) = ray_cluster(resolved, "abcd")["spec"]["workerGroupSpecs"]
    worker = workers["template"]["spec"]["containers"][0]
    job = inspect_job(resolved.service, "image", Hub(), 0)["spec"]["template"]["spec"]["containers"][0]

    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}} in worker["env"]
    assert {"name": "HF_HUB_CACHE", "value": "/cache/hub"} in worker["env"]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}} in job["env"]
    assert not any(each["name"] == "model-cache" for each in job["volumeMounts"])


def test_a_pod_converts_a_draft_model_in_a_gguf_file_in_a_folder_to_which_it_can_write():
    resolved = resolve(make_service(model={"source": SOURCE, "draft": {"source": "pvc://claim/d.gguf"}}), "image")
    (workers,) = ray_cluster(resolved, "abcd")["spec"]["workerGroupSpecs"]

    assert {"name": "RAYLOOM_CACHE", "value": "/tmp/rayloom"} in workers["template"]["spec"]["containers"][0]["env"]


def test_a_folder_of_nodes_with_the_draft_model_needs_a_permission():
    service = make_service(model={"source": SOURCE, "draft": {"source": "file:///data/d"}})

    Permissions(host_paths=("/data",)).check(service)
    with pytest.raises(NotAllowed, match=r"spec\.model\.draft\.source: '/data/d' is a path on nodes"):
        Permissions(host_paths=("/models",)).check(service)


def test_a_claim_with_the_draft_model_exists_only_in_a_cluster():
    _check(make_service(model=OWN), {})
    with pytest.raises(SpecError, match=r"spec\.model\.draft\.source: claims exist only in a cluster; use a file://"):
        _check(make_service(model={"source": SOURCE, "draft": {"source": "pvc://claim/d"}}), {})


def test_the_job_inspects_both_models_at_their_revisions_or_commits():
    model = {"source": "pvc://claim/m", "draft": {"source": "hf://acme/draft", "revision": "v2"}}
    service = make_service(model=model)

    def command(**given):
        job = inspect_job(service, "i", Hub(), 0, Commits(**given))
        return job["spec"]["template"]["spec"]["containers"][0]["command"]

    own = ["rayloom-engine", "inspect", "--model", "file:///models/m", "--draft-model", "hf://acme/draft"]
    assert command() == [*own, "--draft-revision", "v2"]
    assert command(draft=COMMIT) == [*own, "--draft-revision", COMMIT]


def test_the_job_requests_the_memory_for_a_comparison_of_tokenizers_beside_a_draft_model_only():
    def requested(model):
        (container,) = inspect_job(make_service(model=model), "i", Hub(), 0)["spec"]["template"]["spec"]["containers"]
        return container["resources"]

    assert requested(DRAFTED) == {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}
    assert requested(HUB_MODEL) == {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "2Gi"}}


def test_the_job_of_a_service_without_a_draft_model_is_unchanged():
    job = inspect_job(make_service(model=HUB_MODEL), SETTINGS.engine_image, Hub(), 0)

    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["rayloom-engine", "inspect", "--model", "hf://acme/tiny"]


def document_of(seen):
    return Status(model=seen.model).model_dump(mode="json", by_alias=True, exclude_none=True)


def test_a_built_in_model_that_drafts_for_a_built_in_model_needs_no_job():
    seen = look(model=OWN)

    assert (seen.facts.shape, seen.model, seen.wanted) == (SMOLLM2.shape, None, ())
    assert seen.facts.draft.num_parameters == SMOLLM2.num_parameters


def test_a_job_inspects_a_built_in_model_whose_draft_model_is_not_built_in():
    seen = look(model={"source": SOURCE, "draft": HUB_DRAFT})

    assert (seen.facts, [each["kind"] for each in seen.wanted]) == (None, ["ServiceAccount", "Job"])


def test_the_facts_of_the_draft_model_are_stored_and_read_again():
    seen = look(ended(facts_with_draft()), model=DRAFTED)
    document = document_of(seen)

    assert document["model"]["draft"]["source"] == "hf://acme/draft"
    assert (seen.facts.commit, seen.facts.draft.commit) == (COMMIT, DRAFT_COMMIT)
    assert stored_model(document) == seen.model
    again = look(stored=document, model=DRAFTED)
    assert (again.facts, again.wanted) == (seen.model, ())
    resolved = resolve(make_service(model=DRAFTED), "image", again.facts)
    config = pod_engine_config(resolved)
    assert (config["revision"], config["draft_revision"]) == (COMMIT, DRAFT_COMMIT)


def test_a_model_whose_stored_draft_model_cannot_be_read_keeps_its_commit():
    document = document_of(look(ended(facts_with_draft()), model=DRAFTED))
    for broken in ({**document["model"]["draft"], "checkpointDtype": "int3"}, "draft", 7):
        document["model"]["draft"] = broken
        assert (stored_model(document).commit, stored_model(document).draft) == (COMMIT, None)
    (command,) = commands(look(stored=document, model=DRAFTED))
    assert command[2:] == ["--model", "hf://acme/tiny", "--revision", COMMIT, "--draft-model", "hf://acme/draft"]
    assert stored_model({"model": {**document["model"], "commit": 7}}) is None
    assert stored_model({}) is None


def commands(seen):
    return [job["spec"]["template"]["spec"]["containers"][0]["command"] for job in seen.wanted if job["kind"] == "Job"]


def test_another_draft_model_is_inspected_and_the_model_keeps_its_commit():
    document = document_of(look(ended(facts_with_draft()), model=DRAFTED))
    inspected = ["rayloom-engine", "inspect", "--model", "hf://acme/tiny", "--revision", COMMIT, "--draft-model"]
    other = look(stored=document, model={**HUB_MODEL, "draft": {"source": "hf://acme/other"}})
    revised = look(stored=document, model={**HUB_MODEL, "draft": {**HUB_DRAFT, "revision": "v2"}})

    assert commands(other) == [[*inspected, "hf://acme/other"]]
    assert commands(revised) == [[*inspected, "hf://acme/draft", "--draft-revision", "v2"]]
    assert other.model == stored_model(document), "the facts of the earlier spec stay while the Job runs"


def test_another_model_is_inspected_and_the_draft_model_keeps_its_commit():
    document = document_of(look(ended(facts_with_draft()), model=DRAFTED))
    seen = look(stored=document, model={"source": "hf://acme/larger", "draft": HUB_DRAFT})

    (command,) = commands(seen)
    assert command[2:] == ["--model", "hf://acme/larger", "--draft-model", HUB_DRAFT["source"], *command[-2:]]
    assert command[-2:] == ["--draft-revision", DRAFT_COMMIT]


def test_a_draft_model_that_is_added_is_inspected_and_one_that_is_removed_needs_no_job():
    plain = document_of(look(ended(facts())))
    drafted = document_of(look(ended(facts_with_draft()), model=DRAFTED))

    assert len(commands(look(stored=plain, model=DRAFTED))) == 1
    seen = look(stored=drafted)
    assert (seen.facts.commit, seen.facts.draft, seen.wanted) == (COMMIT, None, ())
    assert document_of(seen) == plain


def test_a_draft_model_that_does_not_fit_is_refused_before_any_engine_starts():
    sentence = "draft_model: hf://acme/draft has another tokenizer than the model: 2 of the model's 256 tokens differ"
    seen = look(ended(failure("Unsupported", sentence), code=78), model=DRAFTED)

    assert (seen.facts, seen.verdict.reason) == (None, Reason.MODEL_UNSUPPORTED)
    assert seen.verdict.message.startswith(sentence)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_parameters": 1 << 51}, "draft.num_parameters"),
        ({"checkpoint_dtype": "int3"}, "draft.checkpoint_dtype"),
        ({"costs": {**DRAFT["costs"], "kv": {"elements": [8, 8]}}}, "one number, because one rank holds the whole"),
        ({"costs": {**DRAFT["costs"], "weights": {"elements": [1 << 51]}}}, "more than 1125899906842624 parameters"),
    ],
    ids=["parameters", "type", "lists", "weights"],
)
def test_facts_of_a_draft_model_that_no_engine_writes_are_refused(changes, message):
    seen = look(ended(facts_with_draft(**changes)), model=DRAFTED)

    assert (seen.facts, seen.verdict.reason) == (None, Reason.MODEL_UNSUPPORTED)
    assert message in seen.verdict.message


def test_facts_without_the_draft_model_are_refused():
    with pytest.raises(SpecError, match=r"spec\.model\.draft: the facts of the model do not have those of the draft"):
        resolve(make_service(model=DRAFTED), "image", look(ended(facts())).facts)


def test_an_earlier_spec_is_recreated_with_the_commit_of_its_draft_model():
    seen = look(ended(facts_with_draft()), model=DRAFTED)
    resolved = resolve(make_service(model=DRAFTED), "image", seen.model)
    document = {"metadata": {"name": "chat", "namespace": "team", "uid": "uid-1"}}
    read = resolved_of(old_spec(resolved, revision(resolved), seen.model), document, Hub())

    assert revision(read) == revision(resolved)
    assert pod_engine_config(read) == pod_engine_config(resolved)
    assert ray_cluster(read, "abcd") == ray_cluster(resolved, "abcd")

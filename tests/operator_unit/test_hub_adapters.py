"""LoRA adapters of the hub: the pods' access to the hub, one commit for all engines, and the states in the status.

Adapters in volumes are in test_adapters.py.
"""

from dataclasses import replace

import pytest

from rayloom_operator.api.adapters import Adapter
from rayloom_operator.decide.adapters import adapter_list_requests, adapter_statuses
from rayloom_operator.decide.conditions.accepted import VALID
from rayloom_operator.decide.conditions.evidence import gather_evidence
from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.engines.status import ReportedAdapter
from rayloom_operator.errors import NotAllowed, SpecError
from rayloom_operator.local.serve import _check
from rayloom_operator.objects.adapter_volumes import adapter_places
from rayloom_operator.objects.engine_config import engine_config, pod_engine_config
from rayloom_operator.objects.inspect_job import inspect_job
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.resolve.adapter_commits import stored_commits
from rayloom_operator.resolve.resolved import Hub, resolve
from rayloom_operator.resolve.revision import revision
from rt_operator import make_reading, make_resolved, make_said, make_service, make_serving, turn

FIRST, SECOND = "a" * 40, "b" * 40
BUILTIN = "builtin://smollm2-135m"
HUB_SQL = {"name": "sql", "source": "hf://acme/sql"}
POEMS = {"name": "poems", "source": "pvc://adapters/poems"}
TOKEN = {"name": "hub", "key": "token"}


def adapted(*adapters, source=BUILTIN, commits=(), replicas=1, **model):
    made = make_resolved(model={"source": source, "adapters": list(adapters), **model}, replicas=replicas)
    return replace(made, adapter_commits=tuple(commits))


def report(path, commit="", state="loaded", name="sql"):
    return ReportedAdapter(name=name, path=path, state=state, commit=commit)


def engine(resolved, number, *reports, adapters_from_hub=True):
    said = make_said().model_copy(update={"adapters": reports, "adapters_from_hub": adapters_from_hub})
    return make_serving(resolved, number, reading=make_reading(said))


def situation_of(resolved, *replicas, old=()):
    return turn(resolved, replicas, old=old).situation


def orders(resolved, *replicas, old=()):
    return [each.adapters for each in adapter_list_requests(situation_of(resolved, *replicas, old=old))]


def statuses(resolved, *replicas):
    found = adapter_statuses(gather_evidence(situation_of(resolved, *replicas), VALID))
    return [(each.state, each.loaded, each.source, each.commit) for each in found]


def containers(model, hub=None):
    """Returns name -> variables of each container that reads the model: in the head, the worker and the inspection."""
    service = make_service(model=model)
    given = hub or Hub(endpoint="https://mirror", ca_config_map="ca")
    spec = ray_cluster(resolve(service, "i", hub=given), "abcd", 0)["spec"]
    pods = {
        "engine": spec["headGroupSpec"]["template"]["spec"],
        "ray-worker": spec["workerGroupSpecs"][0]["template"]["spec"],
        "inspect": inspect_job(service, "i", given, 0)["spec"]["template"]["spec"],
    }
    return {
        name: {
            each["name"]: each
            for container in pod["containers"]
            if container["name"] == name
            for each in container["env"]
        }
        for name, pod in pods.items()
    }


def test_pods_fetch_an_adapter_of_the_hub_and_mount_no_volume_for_it():
    resolved = adapted(HUB_SQL, POEMS, commits=[("sql", FIRST)])
    config = pod_engine_config(resolved)
    assert config["adapters"] == [f"sql=hf://acme/sql@{FIRST}", "poems=/adapters/adapters/poems"]
    assert len(adapter_places(resolved.service.spec.model)) == 1
    assert pod_engine_config(adapted(HUB_SQL))["adapters"] == ["sql=hf://acme/sql"]


def test_pods_get_the_address_and_the_token_of_the_hub_for_an_adapter_and_the_inspection_does_not():
    found = containers({"source": BUILTIN, "adapters": [HUB_SQL], "tokenSecretRef": TOKEN})
    for name in ("engine", "ray-worker"):
        assert found[name]["HF_ENDPOINT"]["value"] == "https://mirror"
        assert found[name]["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": TOKEN}
        assert "SSL_CERT_FILE" in found[name]
    assert not {"HF_ENDPOINT", "HF_TOKEN", "SSL_CERT_FILE"} & set(found["inspect"])
    assert not {"HF_ENDPOINT", "HF_TOKEN"} & set(containers({"source": BUILTIN, "adapters": [POEMS]})["engine"])


def test_pods_keep_the_files_of_adapters_in_the_cache_of_the_service():
    cache = {"persistentVolumeClaim": "hub-cache"}
    found = containers({"source": "pvc://models/llama", "adapters": [HUB_SQL], "cache": cache})
    assert {found[name]["HF_HUB_CACHE"]["value"] for name in ("engine", "ray-worker")} == {"/cache/hub"}


@pytest.mark.parametrize("field", [{"tokenSecretRef": TOKEN}, {"cache": {"persistentVolumeClaim": "c"}}])
def test_a_token_or_a_cache_needs_a_model_or_an_adapter_of_the_hub(field):
    make_service(model={"source": BUILTIN, "adapters": [HUB_SQL], **field})
    with pytest.raises(SpecError, match="have an effect for hf:// sources of the model, its draft model or an adapter"):
        make_service(model={"source": BUILTIN, "adapters": [POEMS], **field})


def test_the_token_for_an_adapter_is_not_sent_to_a_hub_that_the_manifest_names():
    env = {"env": [{"name": "HF_ENDPOINT", "value": "https://hub.example"}]}
    model = {"source": BUILTIN, "adapters": [HUB_SQL]}
    Permissions().check(make_service(model=model, engine=env))
    with pytest.raises(NotAllowed, match="the token of tokenSecretRef would be sent to HF_ENDPOINT"):
        Permissions().check(make_service(model={**model, "tokenSecretRef": TOKEN}, engine=env))


def test_only_the_first_adapter_of_the_hub_starts_a_rollout_and_not_beside_a_model_of_the_hub():
    other = {"name": "b", "source": "hf://acme/b"}
    assert revision(adapted(HUB_SQL)) != revision(adapted()), "pods need the address of the hub"
    assert revision(adapted(HUB_SQL)) == revision(adapted(other, HUB_SQL))
    assert revision(adapted(HUB_SQL)) == revision(adapted(HUB_SQL, commits=[("sql", FIRST)]))
    of_hub = "hf://acme/tiny"
    assert revision(adapted(HUB_SQL, source=of_hub)) == revision(adapted(source=of_hub))


def test_without_a_cluster_the_engine_fetches_the_adapter_itself():
    service = make_service(model={"source": BUILTIN, "adapters": [{"name": "sql", "source": "hf://acme/sql@v1"}]})
    _check(service, {})
    assert engine_config(service, host="127.0.0.1", port=1, admin_port=2)["adapters"] == ["sql=hf://acme/sql@v1"]


@pytest.mark.parametrize("source", ["hf://acme/sql", "hf://acme/sql@main", "hf://acme/sql@refs/pr/1"])
def test_the_first_engine_with_the_adapter_decides_the_commit_of_all(source):
    resolved = adapted({"name": "sql", "source": source}, replicas=3)
    replicas = (
        engine(resolved, 0, report(source, state="loading")),
        engine(resolved, 1, report(source, FIRST)),
        engine(resolved, 2, report(source, SECOND)),
    )
    pinned = (("sql", f"hf://acme/sql@{FIRST}"),)
    # The second engine has the files of this commit already.
    assert orders(resolved, *replicas) == [pinned, pinned]
    assert statuses(resolved, *replicas) == [("Loading", "1/3", source, FIRST)]


def test_a_commit_in_the_status_stays_when_the_branch_moves():
    resolved = adapted(HUB_SQL, replicas=2, commits=[("sql", FIRST)])
    moved = engine(resolved, 0, report("hf://acme/sql", SECOND))
    same = engine(resolved, 1, report(f"hf://acme/sql@{FIRST}", FIRST))
    assert orders(resolved, moved, same) == [(("sql", f"hf://acme/sql@{FIRST}"),)]
    assert statuses(resolved, moved, same) == [("Loading", "1/2", "hf://acme/sql", FIRST)]
    done = engine(resolved, 0, report(f"hf://acme/sql@{FIRST}", FIRST))
    assert orders(resolved, done, same) == []
    assert statuses(resolved, done, same) == [("Loaded", "2/2", "hf://acme/sql", FIRST)]


def test_before_any_engine_has_the_adapter_all_engines_get_its_source():
    resolved = adapted(HUB_SQL, replicas=2)
    failed = engine(resolved, 0, report("hf://acme/sql", state="failed"))
    assert orders(resolved, failed, engine(resolved, 1)) == [(("sql", "hf://acme/sql"),)]
    assert statuses(resolved, failed, engine(resolved, 1)) == [("Failed", "0/2", "hf://acme/sql", None)]


@pytest.mark.parametrize("commit", ["main", "A" * 40, "a" * 39, "../../etc"])
def test_a_commit_that_is_none_is_not_used(commit):
    resolved = adapted(HUB_SQL)
    liar = engine(resolved, 0, report("hf://acme/sql", commit))
    assert orders(resolved, liar) == []
    assert statuses(resolved, liar) == [("Loaded", "1/1", "hf://acme/sql", None)]


def test_an_engine_without_access_to_the_hub_gets_the_adapter_once_it_is_replaced():
    old, new = adapted(POEMS), adapted(HUB_SQL, POEMS)
    poems = report("/adapters/adapters/poems", name="poems")
    assert revision(old) != revision(new)
    assert orders(new, engine(old, 0, poems), old=[old]) == []
    assert orders(new, engine(new, 0, poems)) == [
        (("sql", "hf://acme/sql"), ("poems", "/adapters/adapters/poems")),
    ]


def test_an_engine_of_an_older_version_keeps_its_other_adapters_and_the_status_names_the_cause():
    resolved = adapted(HUB_SQL, POEMS, {"name": "new", "source": "pvc://adapters/new"})
    poems = report("/adapters/adapters/poems", name="poems")
    old = engine(resolved, 0, poems, adapters_from_hub=False)
    others = (("poems", "/adapters/adapters/poems"), ("new", "/adapters/adapters/new"))
    assert orders(resolved, old) == [others]
    found = adapter_statuses(gather_evidence(situation_of(resolved, old), VALID))
    assert [(each.name, each.state) for each in found] == [("sql", "Failed"), ("poems", "Loaded"), ("new", "Loading")]
    assert "its version cannot load adapters of the hub; set spec.engine.image to a newer image" in found[0].message
    new = report("/adapters/adapters/new", name="new")
    assert orders(resolved, engine(resolved, 0, poems, new, adapters_from_hub=False)) == []


def test_the_commit_is_read_from_the_source_or_from_a_status_of_the_same_source():
    model = make_service(
        model={
            "source": BUILTIN,
            "adapters": [
                HUB_SQL,
                POEMS,
                {"name": "fixed", "source": f"hf://acme/fixed@{SECOND}"},
                {"name": "moved", "source": "hf://acme/moved@v2"},
                {"name": "new", "source": "hf://acme/new"},
            ],
        }
    ).spec.model
    previous = {
        "adapters": [
            {"name": "sql", "source": "hf://acme/sql", "commit": FIRST},
            {"name": "moved", "source": "hf://acme/moved@v1", "commit": FIRST},
            {"name": "poems", "commit": FIRST},
            {"name": "new", "source": "hf://acme/new", "commit": 5},
            "broken",
        ]
    }
    assert stored_commits(model, previous) == {"sql": FIRST, "fixed": SECOND}
    assert stored_commits(model, {}) == {"fixed": SECOND}


def test_a_path_at_a_commit_replaces_the_revision():
    adapter = Adapter(name="a", source="hf://acme/sql@refs/pr/1")
    assert (adapter.at(FIRST), adapter.own_commit) == (f"hf://acme/sql@{FIRST}", None)
    assert Adapter(name="a", source=adapter.at(FIRST)).own_commit == FIRST
    assert (adapter.claim, adapter.host_folder, adapter.path) == (None, None, adapter.source)

"""LoRA adapters of a service: the manifest's mistakes, volumes and paths, the engines' lists, and the states."""

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayloom_operator.api.adapters import Adapter, host_folders
from rayloom_operator.decide.adapters import AdapterListRequest, adapter_fault, adapter_list_requests, adapter_statuses
from rayloom_operator.decide.changes.plan import Plan
from rayloom_operator.decide.conditions.accepted import VALID
from rayloom_operator.decide.conditions.evidence import gather_evidence
from rayloom_operator.decide.decision import decide
from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.engines import request as status_request
from rayloom_operator.engines.status import ReportedAdapter
from rayloom_operator.errors import EngineUnavailable, NotAllowed, SpecError
from rayloom_operator.local.serve import _check
from rayloom_operator.objects.adapter_volumes import adapter_places
from rayloom_operator.objects.engine_config import engine_config, pod_engine_config
from rayloom_operator.objects.inspect_job import inspect_job
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.observe.drift import Drift
from rayloom_operator.observe.observed import Observed
from rayloom_operator.observe.verdict import STALE_S
from rayloom_operator.reconcile.apply.applier import Applier
from rayloom_operator.resolve.resolved import Hub
from rayloom_operator.resolve.revision import revision
from rt_fake_kube import FakeKube
from rt_operator import make_reading, make_resolved, make_said, make_service, make_serving, make_situation, turn

MODEL = {"source": "builtin://smollm2-135m"}
SQL = {"name": "sql", "source": "pvc://adapters/team/sql"}
POEMS = {"name": "poems", "source": "file:///data/adapters/poems"}


def adapted(*adapters, source=MODEL["source"], **spec):
    return make_resolved(model={"source": source, "adapters": list(adapters)}, **spec)


@pytest.mark.parametrize(
    ("adapters", "sentence"),
    [
        ([{"name": "-a", "source": SQL["source"]}], "spec.model.adapters[0].name: '-a' is not allowed. Name that"),
        ([{"name": "a=b", "source": SQL["source"]}], "spec.model.adapters[0].name: 'a=b' is not allowed"),
        ([{"name": "a" * 64, "source": SQL["source"]}], "has 64 characters; use at most 63"),
        ([{"name": "a"}], "spec.model.adapters[0].source: is missing; add it"),
        (
            [{"name": "a", "source": "hf://org"}],
            "spec.model.adapters[0].source: 'hf://org' is not the source of an adapter; use hf://ORG/NAME, "
            "hf://ORG/NAME@REVISION, pvc://CLAIM/PATH or file:///FOLDER/NAME",
        ),
        ([{"name": "a", "source": "hf://org/a@"}], "'hf://org/a@' is not the source of an adapter; use hf://ORG/NAME"),
        ([{"name": "a", "source": "hf://org/a@b/../c"}], "'hf://org/a@b/../c' is not allowed: the path must not have"),
        ([{"name": "a", "source": "/data/a"}], "'/data/a' is not the source of an adapter; use hf://"),
        ([{"name": "a", "source": "file:///a"}], "'file:///a' is not the source of an adapter; use hf://"),
        (
            [{"name": "a", "source": "pvc://c/../x"}],
            "'pvc://c/../x' is not allowed: the path must not have a part '.' or '..'; write it without them",
        ),
        (
            [{"name": "a", "source": "file:///tmp/sql"}],
            "'file:///tmp/sql' is not allowed: pods mount FOLDER at its own path",
        ),
        ([{"name": "a", "source": "file:///etc/sql/"}], "is not allowed: pods mount FOLDER at its own path"),
        ([{"name": "a", "source": "file:///etc/rayloom/x/y"}], "is not allowed: pods mount FOLDER at its own path"),
        ([{"name": "a", "source": "file:///opt/sql"}], "FOLDER must not be /cache, /opt, /tmp, /tmp/ray, /var, nor"),
        ([{"name": "a", "source": "file:///opt/rayloom/venv/sql"}], "Move the adapter, for example to /data/adapters"),
        ([{"name": "a", "source": "file:///usr/local/share/adapters/sql/"}], "pods mount FOLDER at its own path"),
        (
            [{"name": "a", "source": "file:///etc/ssl/certs/sql"}],
            "it must not hide a folder of their own or of the engine",
        ),
        (
            [{"name": "a", "source": "file:///var/run/adapters/sql"}],
            "is not allowed: pods mount FOLDER at its own path",
        ),
        ([{"name": "a", "source": "file:///adapters/x/y"}], "is not allowed: pods mount FOLDER at its own path"),
        ([SQL, {**POEMS, "name": "sql"}], "spec.model.adapters: sql is given more than once; give each adapter a name"),
        ([{**SQL, "name": "chat"}], "spec.model.adapters: chat: an adapter has the name of the model; give it another"),
        (
            [{"name": f"a{n}", "source": f"pvc://claim-{n}/a"} for n in range(9)],
            "the adapters are in more than 8 claims and folders: put them into fewer",
        ),
        ([{**SQL, "rank": 8}], "spec.model.adapters[0].rank: is not a field; remove it. Fields here: name, source"),
    ],
)
def test_a_mistake_is_named_with_its_cure(adapters, sentence):
    with pytest.raises(SpecError) as refused:
        make_service(model={**MODEL, "adapters": adapters})
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    "folder",
    ["/data", "/mnt/adapters", "/opt/adapters", "/opt/rayloom-adapters", "/usrdata", "/var/lib/adapters", "/srv"],
)
def test_an_adapter_may_be_in_a_folder_that_no_image_has(folder):
    make_service(model={**MODEL, "adapters": [{"name": "a", "source": f"file://{folder}/sql"}]})


def template_at(path, volume="data"):
    mounts = [{"name": volume, "mountPath": path}]
    containers = [{"name": "engine", "volumeMounts": mounts}]
    return {"head": {"spec": {"volumes": [{"name": volume, "emptyDir": {}}], "containers": containers}}}


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (template_at("/adapters"), "/adapters: this mountPath of container engine hides the model, its draft"),
        (template_at("/adapters/adapters/"), "this mountPath of container engine hides the model, its draft"),
        (template_at("/adapters/adapters/team"), "this mountPath of container engine hides the model, its draft"),
        (template_at("/adapters/adapters/team/sql"), "this mountPath of container engine hides the model, its draft"),
        (template_at("/x", "adapters-0"), "adapters-0: beside model.adapters the volumes of podTemplate cannot have"),
    ],
)
def test_a_template_may_have_the_volumes_and_folders_of_adapters_only_without_adapters(template, sentence):
    make_service(model=MODEL, podTemplate=template)
    with pytest.raises(SpecError) as refused:
        make_service(model={**MODEL, "adapters": [SQL]}, podTemplate=template)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("adapters", [[SQL], []])
@pytest.mark.parametrize("fields", [{"accelerator": {"memory": "80Gi"}}, {"engine": {"args": {"device": "cuda"}}}])
def test_adapters_beside_an_accelerator_are_refused(adapters, fields):
    with pytest.raises(SpecError, match="LoRA adapters work on CPU only"):
        make_service(model={**MODEL, "adapters": adapters}, **fields)


def test_a_served_name_frees_the_services_name():
    make_service(model={**MODEL, "servedName": "base", "adapters": [{**SQL, "name": "chat"}]})


def test_an_engine_in_a_pod_starts_with_the_adapters_at_their_mounts():
    resolved = adapted(SQL, POEMS)
    config = pod_engine_config(resolved)
    assert config["managed_adapters"] is True
    assert config["adapters"] == ["sql=/adapters/adapters/team/sql", "poems=/data/adapters/poems"]
    pods = ray_cluster(resolved, "abcd", 0)["spec"]
    for part, own in (("headGroupSpec", "engine"), ("workerGroupSpecs", "ray-worker")):
        template = pods[part] if part == "headGroupSpec" else pods[part][0]
        spec = template["template"]["spec"]
        volumes = [each for each in spec["volumes"] if each["name"].startswith("adapters-")]
        assert volumes == [
            {"name": "adapters-0", "persistentVolumeClaim": {"claimName": "adapters"}},
            {"name": "adapters-1", "hostPath": {"path": "/data/adapters", "type": "Directory"}},
        ]
        container = next(each for each in spec["containers"] if each["name"] == own)
        mounts = [each for each in container["volumeMounts"] if each["name"].startswith("adapters-")]
        assert mounts == [
            {"name": "adapters-0", "mountPath": "/adapters/adapters", "readOnly": True},
            {"name": "adapters-1", "mountPath": "/data/adapters", "readOnly": True},
        ]


def test_only_the_whole_field_and_volumes_are_part_of_the_revision():
    empty = revision(adapted())
    assert empty != revision(make_resolved()), "memory is kept for adapters"
    assert revision(adapted(SQL)) != empty, "a claim"
    assert revision(adapted(SQL)) == revision(adapted(SQL, {"name": "b", "source": "pvc://adapters/b"}))


def test_adapters_in_the_claim_of_the_model_need_no_further_volume():
    service = make_service(
        model={"source": "pvc://models/llama", "adapters": [{"name": "sql", "source": "pvc://models/sql/"}]},
    )
    assert adapter_places(service.spec.model) == []


def test_adapters_in_the_folder_of_the_model_need_no_further_volume():
    def service(*adapters):
        return {"source": "file:///data/models/llama/", "adapters": list(adapters)}

    inside = {"name": "sql", "source": "file:///data/models/llama/sql"}
    beside = {"name": "poems", "source": "file:///data/models/poems"}
    assert adapter_places(make_service(model=service(inside)).spec.model) == []
    assert revision(make_resolved(model=service(inside))) == revision(make_resolved(model=service()))
    old = make_resolved(model=service())
    new = make_resolved(model=service(inside))
    situation = situation_of(new, engine(old, 0), old=[old])
    assert [each.adapters for each in adapter_list_requests(situation)] == [(("sql", "/data/models/llama/sql"),)]
    [(_, mount)] = adapter_places(make_service(model=service(inside, beside)).spec.model)
    assert mount["mountPath"] == "/data/models", "the folder of the model lies in it"


def test_a_folder_of_nodes_cannot_be_where_the_claim_of_the_model_is_mounted():
    inside = {"name": "sql", "source": "file:///models/sql"}
    make_service(model={**MODEL, "adapters": [inside, {"name": "a", "source": "file:///tmp/a/b"}]})
    with pytest.raises(SpecError, match=r"spec\.model: adapters: sql: the claim of the model is mounted at /models"):
        make_service(model={"source": "pvc://models/llama", "adapters": [inside]})


def test_the_inspection_mounts_no_adapters():
    job = inspect_job(make_service(model={**MODEL, "adapters": [SQL]}), "i", Hub(), 0)
    volumes = job["spec"]["template"]["spec"]["volumes"]
    assert not any(each["name"].startswith("adapters-") for each in volumes)


def test_without_a_cluster_the_engine_gets_the_same_adapters():
    service = make_service(model={**MODEL, "adapters": [POEMS]})
    config = engine_config(service, host="127.0.0.1", port=1, admin_port=2)
    assert config["adapters"] == ["poems=/data/adapters/poems"]
    assert "managed_adapters" not in config, "a wrong adapter ends the start, with its reason"
    _check(service, {})
    with pytest.raises(SpecError, match=r"adapters\[0\].source: claims exist only in a cluster; use a file:// path"):
        _check(make_service(model={**MODEL, "adapters": [SQL]}), {})


def test_folders_of_nodes_need_a_permission():
    service = make_service(model={**MODEL, "adapters": [SQL, POEMS]})
    Permissions(host_paths=("/data",)).check(service)
    with pytest.raises(NotAllowed, match=r"spec.model.adapters\[1\].source: '/data/adapters' is a path on nodes"):
        Permissions(host_paths=("/data/adapters/poems",)).check(service)


folders = st.lists(st.sampled_from(("/a", "/a/b", "/a/b/c", "/ab", "/b")), max_size=6)


@given(folders)
def test_each_folder_lies_in_one_mounted_folder(given_folders):
    adapters = [Adapter(name=f"a{n}", source=f"file://{folder}/x") for n, folder in enumerate(given_folders)]
    mounted = host_folders(adapters)
    for folder in given_folders:
        assert sum(folder == each or folder.startswith(f"{each}/") for each in mounted) == 1


def report(name, path, state="loaded", message=""):
    return ReportedAdapter(name=name, path=path, state=state, message=message)


SQL_REPORT = report("sql", "/adapters/adapters/team/sql")
POEMS_REPORT = report("poems", "/data/adapters/poems")


def engine(resolved, number, *reports, is_old=False):
    said = make_said().model_copy(update={"adapters": None if is_old else reports})
    return make_serving(resolved, number, reading=make_reading(said))


def situation_of(resolved, *replicas, old=()):
    return turn(resolved, replicas, old=old).situation


def test_an_engine_whose_list_differs_is_told_the_present_one():
    resolved = adapted(SQL, POEMS, replicas=4)
    situation = situation_of(
        resolved,
        engine(resolved, 0, SQL_REPORT, POEMS_REPORT),
        engine(resolved, 1, report("sql", "/elsewhere")),
        engine(resolved, 2, is_old=True),
        engine(resolved, 3, report("sql", SQL_REPORT.path, "failed", "gone"), report("poems", POEMS_REPORT.path, "x")),
    )
    orders = list(adapter_list_requests(situation))
    assert [each.replica for each in orders] == [situation.observed.replicas[1].name]
    assert orders[0].adapters == (("sql", SQL_REPORT.path), ("poems", POEMS_REPORT.path))
    assert orders[0].token == situation.settings.admin_tokens("team", "uid-1", orders[0].replica)[0]


def test_an_empty_list_unloads_all_and_no_list_leaves_engines_alone():
    empty = adapted()
    assert [each.adapters for each in adapter_list_requests(situation_of(empty, engine(empty, 0, SQL_REPORT)))] == [()]
    without = make_resolved()
    assert list(adapter_list_requests(situation_of(without, engine(without, 0, SQL_REPORT)))) == []
    assert list(adapter_list_requests(make_situation(None, Observed(replicas=(engine(empty, 0),))))) == []


def test_an_engine_of_an_earlier_spec_gets_only_adapters_that_its_pods_mount():
    old = adapted(SQL)
    new = adapted({"name": "sql", "source": "pvc://adapters/v2"}, POEMS)
    assert revision(old) != revision(new)
    situation = situation_of(new, engine(old, 0, SQL_REPORT), old=[old])
    assert [each.adapters for each in adapter_list_requests(situation)] == [(("sql", "/adapters/adapters/v2"),)]


def test_an_adapter_that_moves_to_another_claim_stays_on_old_engines_until_they_are_replaced():
    old = adapted(SQL)
    new = adapted({"name": "sql", "source": "pvc://new/sql"}, {"name": "late", "source": "pvc://new/late"})
    late = report("late", "/adapters/adapters/late")  # the adapter was added after the engine's start
    situation = situation_of(new, engine(old, 0, SQL_REPORT, late), engine(old, 1, late), engine(new, 2), old=[old])
    # The first engine has loaded all adapters from the claims that its pods mount, so it gets no request. The second
    # engine lost its list in a restart. The pods of the third engine mount the new claim. Each of these two engines
    # gets a request.
    assert [each.adapters for each in adapter_list_requests(situation)] == [
        (("sql", SQL_REPORT.path), ("late", late.path)),
        (("sql", "/adapters/new/sql"), ("late", "/adapters/new/late")),
    ]


def statuses(resolved, *replicas):
    evidence = gather_evidence(situation_of(resolved, *replicas), VALID)
    return [(each.name, each.state, each.loaded) for each in adapter_statuses(evidence)], evidence


def test_an_engine_that_did_not_take_its_list_is_asked_again_soon():
    resolved = adapted(SQL)
    assert decide(situation_of(resolved, engine(resolved, 0))).requeue_after_s <= STALE_S
    assert decide(situation_of(resolved, engine(resolved, 0, SQL_REPORT))).requeue_after_s > STALE_S


def test_a_silent_engine_gets_no_request_until_it_answers():
    resolved = adapted(SQL)
    silent = make_reading(make_said().model_copy(update={"adapters": ()}), failing_since=100.0, error="x")
    assert list(adapter_list_requests(situation_of(resolved, make_serving(resolved, reading=silent)))) == []


def test_the_status_counts_the_engines_that_have_an_adapter():
    resolved = adapted(SQL, POEMS, replicas=2)
    found, evidence = statuses(resolved, engine(resolved, 0, SQL_REPORT, POEMS_REPORT), engine(resolved, 1, SQL_REPORT))
    assert found == [("sql", "Loaded", "2/2"), ("poems", "Loading", "1/2")]
    assert statuses(adapted(SQL, replicas=0))[0] == [("sql", "Loading", "0/0")]
    assert adapter_fault(evidence) is None
    assert statuses(resolved)[0] == [("sql", "Loading", "0/2"), ("poems", "Loading", "0/2")]


def test_an_engine_that_has_the_earlier_source_of_an_adapter_is_not_counted():
    resolved = adapted(SQL, replicas=2)
    earlier = report("sql", "/adapters/adapters/team/v1")
    assert statuses(resolved, engine(resolved, 0, earlier), engine(resolved, 1, SQL_REPORT))[0] == [
        ("sql", "Loading", "1/2")
    ]
    failed = report("sql", earlier.path, "failed", "gone")
    assert statuses(resolved, engine(resolved, 0, failed), engine(resolved, 1))[0] == [("sql", "Loading", "0/2")]


def test_an_adapter_that_an_engine_cannot_load_is_a_fault_with_its_cause():
    resolved = adapted(SQL, POEMS, replicas=2)
    bad = report("sql", SQL_REPORT.path, "failed", "adapter_config.json does not exist")
    bad_poems = report("poems", POEMS_REPORT.path, "failed", "gone")
    found, evidence = statuses(resolved, engine(resolved, 0, SQL_REPORT), engine(resolved, 1, bad, bad_poems))
    assert found == [("sql", "Failed", "1/2"), ("poems", "Failed", "0/2")]
    name = evidence.staying[1].place.name
    fault = adapter_fault(evidence)
    assert fault.reason == "AdapterFailed"
    assert fault.message == (
        f"Adapter sql is loaded on 1/2 engines. {name}: adapter_config.json does not exist. Put the adapter's files "
        "where spec.model.adapters says, or change its source; engines try again every 30 s. 1 more adapter fails; "
        "status.adapters has the causes."
    )


def test_while_the_spec_cannot_be_used_the_last_states_stay():
    written = {"name": "sql", "state": "Loaded", "message": "", "loaded": "1/1", "source": None, "commit": None}
    situation = make_situation(None, previous={"adapters": [written]})
    evidence = gather_evidence(situation, VALID)
    assert [each.model_dump() for each in adapter_statuses(evidence)] == [written]
    broken = replace(situation, previous={"adapters": [{"name": 1}]})
    assert adapter_statuses(gather_evidence(broken, VALID)) == ()


def nobody(*_):
    pass


def test_engines_are_told_their_adapters_and_a_failure_holds_up_nothing(monkeypatch, caplog):
    asked = {}

    async def ask(ip, port, token, method, path, body):
        asked[ip] = (port, token, method, path, json.loads(body))
        if ip == "10.0.0.2":
            raise EngineUnavailable("no answer within 3 s")
        return (401, b"") if token == "t3" else (403, b"fixed") if ip == "10.0.0.1" else (202, b"")

    monkeypatch.setattr(status_request, "ask", ask)

    async def story():
        told = []
        kube = FakeKube()
        applier = Applier(kube, Drift(kube, nobody), nobody, nobody, told.append)
        orders = [
            AdapterListRequest(
                replica=f"g{n}", ip=f"10.0.0.{n}", token=f"t{n}", old_token="old", adapters=(("sql", "/a/sql"),)
            )
            for n in (1, 2, 3)
        ]
        await applier.carry_out(("team", "chat"), Plan(adapters=tuple(orders)), 300)
        assert told == [("team", "chat")]
        await applier.carry_out(("team", "chat"), Plan(), 300)
        assert told == [("team", "chat")]

    asyncio.run(story())
    sent = {"adapters": {"sql": "/a/sql"}}
    assert asked == {
        "10.0.0.1": (8001, "t1", "PUT", "/adapters", sent),
        "10.0.0.2": (8001, "t2", "PUT", "/adapters", sent),
        "10.0.0.3": (8001, "old", "PUT", "/adapters", sent),
    }
    assert "the engine of g1 refuses: 403 fixed" in caplog.text
    assert "no answer of the engine of g2 to /adapters: no answer within 3 s" in caplog.text

"""The applier: changes that are applied although an object was refused, and changes that are repeated later."""

import asyncio
import contextlib

import pytest

from rayloom_operator.decide.changes.deletion import Deletion
from rayloom_operator.decide.changes.plan import Drain, Plan
from rayloom_operator.engines import request as status_request
from rayloom_operator.errors import EngineUnavailable, OperatorError, Refused
from rayloom_operator.kube.client import KubeError, KubeUnreachable
from rayloom_operator.names import path_of
from rayloom_operator.objects.companions import admin_secret, client_service, config_map, service_account
from rayloom_operator.objects.guards import disruption_budget, network_policy
from rayloom_operator.objects.old_spec import old_spec
from rayloom_operator.objects.ray_cluster import ray_cluster
from rayloom_operator.observe.drift import Drift
from rayloom_operator.reconcile.apply import objects, writer
from rayloom_operator.reconcile.apply.applier import Applier
from rt_fake_kube import FakeKube
from rt_operator import make_resolved, make_service

KEY = ("team", "chat")
ACCOUNT, SERVICE = service_account(make_service()), client_service(make_service())
NETWORK_POLICY = network_policy(make_service())
SECRET = admin_secret(make_service(), "abcd", b"key")
CONFIG_MAP = config_map(make_resolved(), "abcd")
GROUP = "chat-abcd-0"
CLUSTER = ray_cluster(make_resolved(), "abcd", 0)


def of_pod(name, **options):
    return Deletion(f"/api/v1/namespaces/team/pods/{name}", **options)


def nobody(*_):
    pass


def with_applier(story, on_change=lambda _: None):
    async def run():
        kube = FakeKube()
        drift = Drift(kube, on_change)
        await story(kube, drift, Applier(kube, drift, nobody, nobody))

    asyncio.run(run())


@pytest.mark.parametrize("refused", [("apply", "serviceaccounts/chat-rayloom"), ("delete", "pods/first")])
def test_a_refusal_holds_up_nothing_else(refused):
    async def story(kube, _, applier):
        kube.refusals[refused] = KubeError(403, "exceeded quota")
        deletions = (of_pod("first"), of_pod("lost", grace_s=0))
        with pytest.raises(Refused, match="the API server refused: exceeded quota"):
            await applier.carry_out(KEY, Plan(wanted=(ACCOUNT,), deletions=deletions), 300)
        deleted = [path.rpartition("/")[2] for verb, path in kube.calls if verb == "delete"]
        assert deleted == ["first", "lost"]

    with_applier(story)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            '.spec.workerGroupSpecs[0].template.spec.containers[name="a"].x',
            'spec.podTemplate.worker.spec.containers[name="a"].x',
        ),
        (".spec.headGroupSpec.template.spec.affinity", "spec.podTemplate.head.spec.affinity"),
    ],
)
def test_a_pod_template_that_does_not_fit_kuberays_definition_is_refused_in_the_manifests_words(said, told):
    async def story(kube, _, applier):
        words = (
            f"failed to create typed patch object (team/chat; ray.io/v1, Kind=RayCluster): {said}: field not declared"
        )
        kube.refusals[("apply", f"rayclusters/{GROUP}")] = KubeError(500, words)
        with pytest.raises(Refused) as refused:
            await applier.carry_out(KEY, Plan(wanted=(CLUSTER,)), 300)
        assert f": {told}: field not declared" in str(refused.value)

    with_applier(story)


def test_another_answer_of_code_500_is_no_refusal():
    async def story(kube, _, applier):
        kube.refusals[("apply", f"rayclusters/{GROUP}")] = KubeError(500, "etcdserver: request timed out")
        with pytest.raises(KubeError):
            await applier.carry_out(KEY, Plan(wanted=(CLUSTER,)), 300)

    with_applier(story)


def test_after_an_error_everything_is_applied_again():
    async def story(kube, _, applier):
        planned = Plan(wanted=(ACCOUNT, SERVICE))
        await applier.carry_out(KEY, planned, 300)
        kube.calls.clear()
        await applier.carry_out(KEY, planned, 300)
        assert kube.calls == []
        for _ in range(2):
            kube.refusals["delete", "pods/x"] = KubeError(500, "later")
            with pytest.raises(KubeError):
                await applier.carry_out(KEY, Plan(wanted=(ACCOUNT, SERVICE), deletions=(of_pod("x"),)), 300)
        assert [verb for verb, _ in kube.calls] == ["delete", "delete"]
        kube.refusals["apply", "/chat"] = KubeError(403, "no")
        for _ in range(2):
            kube.calls.clear()
            with pytest.raises(Refused):
                await applier.carry_out(KEY, Plan(wanted=(ACCOUNT, SERVICE | {"spec": {}})), 300)
        assert [path.rpartition("/")[2] for _, path in kube.calls] == ["chat-rayloom", "chat"]

    with_applier(story)


@pytest.mark.parametrize(("share", "first_s"), [(0.5, 150), (0.9, 270), (0.0, 10)])
def test_an_applied_object_is_applied_again_first_at_any_time_and_then_each_interval(monkeypatch, share, first_s):
    async def story(kube, _, applier):
        monkeypatch.setattr(objects.random, "random", lambda: share)
        loop, planned = asyncio.get_running_loop(), Plan(wanted=(ACCOUNT, SERVICE))

        async def is_applied_at(seconds):
            kube.calls.clear()
            monkeypatch.setattr(loop, "time", lambda: 1000.0 + seconds)
            await applier.carry_out(KEY, planned, 300)
            return kube.calls != []

        times = (0, first_s - 1, first_s, first_s + 299, first_s + 300, first_s + 599, first_s + 600)
        assert [await is_applied_at(each) for each in times] == [True, False, True, False, True, False, True]

    with_applier(story)


def test_another_service_in_the_place_of_ours_stays_refused():
    async def story(kube, drift, applier):
        planned = Plan(wanted=(ACCOUNT, SERVICE))
        await applier.carry_out(KEY, planned, 300)
        theirs = SERVICE | {"metadata": SERVICE["metadata"] | {"ownerReferences": [], "uid": "theirs"}}
        ours = kube.objects["/api/v1/namespaces/team/services/chat"]
        drift.reflectors[0].take("DELETED", ours)
        kube.put(theirs)
        # The spec becomes unusable, and then usable again.
        await applier.carry_out(KEY, Plan(), 300)
        for _ in range(3):
            with pytest.raises(Refused, match="is not ours"):
                await applier.carry_out(KEY, planned, 300)

    with_applier(story)


WANTED = (ACCOUNT, SERVICE, disruption_budget(make_service()), NETWORK_POLICY)


@pytest.mark.parametrize(
    ("change", "applied"),
    [
        (lambda kube: None, []),
        # The API server adds defaults, and other controllers add their own fields.
        (lambda kube: kube.put(SERVICE | {"spec": SERVICE["spec"] | {"type": "ClusterIP"}, "status": {"a": 1}}), []),
        (lambda kube: kube.put(SERVICE | {"spec": SERVICE["spec"] | {"selector": {}}}), ["chat"]),
        (lambda kube: kube.remove(path_of(ACCOUNT)), ["chat-rayloom"]),
        (lambda kube: kube.put(SERVICE | {"spec": SERVICE["spec"] | {"ports": []}}), ["chat"]),
    ],
    ids=["nothing", "what is theirs", "a field", "all of it", "an item"],
)
def test_a_new_operator_applies_objects_that_were_changed_while_there_was_none(change, applied):
    async def story(kube, drift, applier):
        for each in WANTED:
            kube.put(each)
        change(kube)
        following = [asyncio.create_task(each.run()) for each in drift.reflectors]
        await drift.listed()
        planned = Plan(wanted=(*WANTED, SECRET))
        await applier.carry_out(KEY, planned, 300)
        assert [path.rpartition("/")[2] for _, path in kube.calls] == applied
        kube.calls.clear()
        # From now on the applier learns of every change by events.
        await applier.carry_out(KEY, planned, 300)
        told.clear()
        kube.put(NETWORK_POLICY | {"spec": {}})
        await asyncio.wait_for(told.wait(), 10)
        await applier.carry_out(KEY, planned, 300)
        assert len(kube.calls) == len(planned.wanted)
        for each in following:
            each.cancel()

    told = asyncio.Event()
    with_applier(story, lambda _: told.set())


def test_a_leftover_object_is_replaced_once_its_name_is_found_taken():
    async def story(kube, _, applier):
        planned = Plan(wanted=(CONFIG_MAP, SECRET), new=frozenset({GROUP}))
        await applier.carry_out(KEY, planned, 300)
        made = [(verb, path.split("/")[-2]) for verb, path in kube.calls]
        assert made == [("create", "configmaps"), ("create", "secrets")]
        kube.calls.clear()
        applier.forget(KEY)
        await applier.carry_out(KEY, planned, 300)
        verbs = ["create", "delete", "create"]
        assert [verb for verb, path in kube.calls if "secrets" in path] == verbs
        assert [verb for verb, path in kube.calls if "configmaps" in path] == verbs

    with_applier(story)


def test_created_clusters_are_reported_and_those_that_may_have_been_created():
    async def story(kube, drift, _):
        told = []
        applier = Applier(kube, drift, lambda key, name: told.append(name), nobody)
        clusters = [CLUSTER | {"metadata": CLUSTER["metadata"] | {"name": name}} for name in ("a", "b", "c")]
        kube.refusals["apply", "rayclusters/b"] = KubeError(403, "exceeded quota")
        kube.refusals["apply", "rayclusters/c"] = KubeUnreachable("no answer")
        for cluster in clusters:
            with contextlib.suppress(Refused, KubeUnreachable):
                await applier.carry_out(KEY, Plan(wanted=(cluster,)), 300)
        assert told == ["a", "c"]

    with_applier(story)


def test_drain_requests_are_reported_and_those_that_may_have_arrived(monkeypatch):
    answers = {"10.0.0.1": (200, b"{}"), "10.0.0.2": (409, b"no"), "10.0.0.4": (200, b"{}")}

    async def ask(ip, port, token, method, path, body):
        if ip not in answers:
            raise EngineUnavailable("no answer within 3 s")
        return answers[ip]

    monkeypatch.setattr(status_request, "ask", ask)

    async def story(kube, drift, _):
        told = []
        applier = Applier(kube, drift, nobody, lambda *each: told.append(each))
        drains = [Drain(replica=f"g{n}", ip=f"10.0.0.{n}", token="t", wanted=n < 4) for n in (1, 2, 3, 4)]
        await applier.carry_out(KEY, Plan(drains=tuple(drains)), 300)
        assert sorted(told) == [(KEY, "g1", True), (KEY, "g3", True), (KEY, "g4", False)]

    with_applier(story)


def test_an_old_spec_of_a_deleted_service_is_recreated():
    async def story(kube, _, applier):
        made = old_spec(make_resolved(), "0a0a0a0a", None)
        (owner,) = made["metadata"]["ownerReferences"]
        kube.put(made | {"metadata": made["metadata"] | {"ownerReferences": [owner | {"uid": "uid-0"}]}})
        name = made["metadata"]["name"]
        await applier.carry_out(KEY, Plan(wanted=(made,), new=frozenset({name})), 300)
        (kept,) = [each for each in kube.objects.values() if each["kind"] == "ControllerRevision"]
        assert kept["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
        kube.calls.clear()
        await applier.carry_out(KEY, Plan(wanted=(made,)), 300)
        assert kube.calls == []

    with_applier(story)


@pytest.mark.parametrize("manifest", [SECRET, old_spec(make_resolved(), "abcd", None)], ids=["Secret", "old spec"])
def test_a_foreign_object_in_the_place_of_a_leftover_is_not_taken_for_ours(manifest):
    async def story(kube, _, applier):
        theirs = manifest | {"metadata": manifest["metadata"] | {"uid": "theirs"}}
        kube.put(theirs)
        kube.put(CONFIG_MAP)
        remove = kube.remove

        def remove_in_vain(path):
            remove(path)
            kube.put(theirs)

        kube.remove = remove_in_vain
        planned = Plan(wanted=(manifest,), new=frozenset({GROUP, manifest["metadata"]["name"]}))
        with pytest.raises(OperatorError, match="another client has created it again"):
            await applier.carry_out(KEY, planned, 300)
        kube.remove = remove
        await applier.carry_out(KEY, planned, 300)
        assert kube.objects[path_of(manifest)]["metadata"]["uid"] != "theirs"

    with_applier(story)


def stranger(manifest, **meta):
    """An object with the name of `manifest` that belongs to no LLMService."""
    kept = {"name": manifest["metadata"]["name"], "namespace": "team"} | meta
    return {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"], "metadata": kept, "data": {"their": "own"}}


@pytest.mark.parametrize(
    "manifest",
    [ACCOUNT, NETWORK_POLICY, disruption_budget(make_service()), CONFIG_MAP, old_spec(make_resolved(), "abcd", None)],
    ids=lambda manifest: manifest["kind"],
)
@pytest.mark.parametrize("owners", [[], [{"kind": "Deployment", "name": "chat", "uid": "u"}]])
def test_a_strangers_object_is_neither_changed_nor_deleted(manifest, owners):
    async def story(kube, _, applier):
        theirs = kube.put(stranger(manifest, ownerReferences=owners))
        new = frozenset({GROUP, manifest["metadata"]["name"]})
        name = manifest["metadata"]["name"]
        words = f"the {manifest['kind']} {name} exists and is not ours; delete it, or give this LLMService another name"
        with pytest.raises(Refused, match=words):
            await applier.carry_out(KEY, Plan(wanted=(manifest,), new=new), 300)
        assert kube.objects[path_of(manifest)] == theirs

    with_applier(story)


def test_a_foreign_secret_is_never_deleted_and_soon_reported(monkeypatch):
    async def story(kube, _, applier):
        theirs = kube.put(stranger(SECRET))
        planned = Plan(wanted=(CONFIG_MAP, SECRET), new=frozenset({GROUP}))
        # At first the Secret may belong to a deleted service, and Kubernetes may still remove the Secret.
        for _ in range(3):
            with pytest.raises(OperatorError, match="exists already, perhaps from a deleted"):
                await applier.carry_out(KEY, planned, 300)
        monkeypatch.setattr(writer, "_COLLECTION_S", -1.0)
        with pytest.raises(Refused, match=f"the Secret {GROUP}-admin exists and is not ours"):
            await applier.carry_out(KEY, planned, 300)
        assert kube.objects[path_of(SECRET)] == theirs
        # The applier has created no ConfigMap, because a ConfigMap would mean that the Secret is ours.
        assert kube.named("ConfigMap") == []
        kube.remove(path_of(SECRET))
        await applier.carry_out(KEY, planned, 300)
        assert kube.named("Secret") == [f"{GROUP}-admin"]

    with_applier(story)


@pytest.mark.parametrize("made", [(CONFIG_MAP,), (CONFIG_MAP, SECRET)], ids=["ConfigMap", "and Secret"])
def test_an_interrupted_reconcile_is_finished_by_the_next_operator(made):
    async def story(kube, _, applier):
        for each in made:
            kube.put(each | {"data": {"of": "an operator that was killed"}})
        await applier.carry_out(KEY, Plan(wanted=(CONFIG_MAP, SECRET), new=frozenset({GROUP})), 300)
        for each in (CONFIG_MAP, SECRET):
            assert kube.objects[path_of(each)]["data"] == each["data"]

    with_applier(story)


def test_a_strangers_secret_stays_where_the_configmap_beside_it_could_not_be_taken_back():
    async def story(kube, _, applier):
        theirs = kube.put(stranger(SECRET))
        planned = Plan(wanted=(CONFIG_MAP, SECRET), new=frozenset({GROUP}))
        kube.refusals["delete", f"configmaps/{GROUP}"] = KubeUnreachable("no answer")
        with pytest.raises(KubeUnreachable):
            await applier.carry_out(KEY, planned, 300)
        assert kube.named("ConfigMap") == [GROUP]
        kube.refusals.clear()
        with pytest.raises(OperatorError, match="exists already, perhaps from a deleted"):
            await applier.carry_out(KEY, planned, 300)
        assert kube.objects[path_of(SECRET)] == theirs
        assert kube.named("ConfigMap") == []

    with_applier(story)


def test_a_secret_beside_a_strangers_configmap_is_a_strangers_as_well():
    async def story(kube, _, applier):
        kube.put(stranger(CONFIG_MAP))
        theirs = kube.put(stranger(SECRET))
        with pytest.raises(OperatorError):
            await applier.carry_out(KEY, Plan(wanted=(CONFIG_MAP, SECRET), new=frozenset({GROUP})), 300)
        assert kube.objects[path_of(SECRET)] == theirs

    with_applier(story)


@pytest.mark.parametrize("owners", [[], [{"kind": "LLMService", "name": "chat", "uid": "uid-0"}]])
def test_leftovers_of_a_backup_or_a_deleted_service_are_adopted(owners):
    async def story(kube, _, applier):
        kube.put(NETWORK_POLICY | {"metadata": NETWORK_POLICY["metadata"] | {"ownerReferences": owners}, "spec": {}})
        await applier.carry_out(KEY, Plan(wanted=(NETWORK_POLICY,)), 300)
        assert kube.objects[path_of(NETWORK_POLICY)]["spec"] == NETWORK_POLICY["spec"]

    with_applier(story)

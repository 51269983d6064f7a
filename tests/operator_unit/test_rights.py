"""The chart grants exactly the rights that the operator uses: recorded requests are compared with the rules.

The test must cause every request that the operator can send. The requests of kopf are listed by hand.
"""

import asyncio
import copy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rayloom_operator.decide.changes.plan import Plan
from rayloom_operator.kube.lease import Lease
from rayloom_operator.names import path_of
from rayloom_operator.objects.companions import admin_secret, config_map
from rayloom_operator.observe.drift import Drift
from rayloom_operator.reconcile.apply.applier import Applier
from rt_fake_kube import FakeKube
from rt_llmgateway import make_gateway_document, with_gateways
from rt_operator import make_resolved, make_service
from rt_world import SERVICE, head, known, service, with_world

CHART = Path(__file__).resolve().parents[2] / "charts" / "rayloom-operator"
HELM = Path(sys.executable).parent / "helm"
# kopf lists and watches LLMServices.
KOPF = {("rayloom.dev", "llmservices", "list"), ("rayloom.dev", "llmservices", "watch")}
LEASES = {("coordination.k8s.io", "leases", verb) for verb in ("get", "create", "patch")}
NODES = {("", "nodes", verb) for verb in ("list", "watch")}
DEFINITIONS = {("apiextensions.k8s.io", "customresourcedefinitions", verb) for verb in ("list", "watch")}


def right(verb, path):
    """(API group, resource, verb) of a request to the path of an object or a collection."""
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
    rest = rest[2:] if rest[0] == "namespaces" else rest
    return group, "/".join([rest[0], *rest[2:]]), verb


def gateway_of(kube):
    return kube.objects[SERVICE]["spec"]["gateway"]


class RecordingKube(FakeKube):
    """A cluster that records the rights that requests need."""

    def __init__(self):
        self.used = set()
        super().__init__()

    def _note(self, verb, path):
        # Server-side apply creates a missing object.
        self.used |= {right(each, path) for each in (("patch", "create") if verb == "apply" else (verb,))}
        super()._note(verb, path)

    async def get(self, path):
        self.used.add(right("get", path))
        return await super().get(path)

    async def list(self, path, params):
        self.used.add(right("list", path))
        return await super().list(path, params)

    async def watch(self, path, params, version, shape=dict):
        self.used.add(right("watch", path))
        async for each in super().watch(path, params, version, shape):
            yield each


def used():
    kube = RecordingKube()

    async def story(world):
        world.ask_for(service(model={"source": "file:///models/x"}))
        await world.until(lambda: kube.named("Job"))
        world.ask_for(service(model={"source": "file:///models/x"}) | known("file:///models/x"))
        await world.until(lambda: kube.named("RayCluster"))
        await world.rest()
        # This pod waits for a volume that does not come, so the operator must remove the pod's route label.
        event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e", "namespace": "team"}}
        kube.put(event | {"involvedObject": {"uid": "uid-head"}, "message": 'no "model"', "lastTimestamp": "then"})
        waiting = head(kube)
        waiting["spec"]["volumes"] = [{"name": "model"}]
        waiting["metadata"]["labels"]["rayloom.dev/route"] = "true"
        kube.put(waiting)
        await world.until(lambda: ("", "pods", "patch") in kube.used)
        await world.until(lambda: ("events.k8s.io", "events", "create") in kube.used)
        # Adds a worker on a lost node.
        worker = copy.deepcopy(head(kube))
        worker["metadata"] |= {"name": "worker", "uid": "uid-worker"}
        worker["metadata"]["labels"]["ray.io/node-type"] = "worker"
        worker["spec"]["nodeName"] = "n2"
        kube.put(worker)
        ready = {"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        lost = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n2", "namespace": ""}}
        other = {"metadata": {"name": "n3", "namespace": ""}, "status": {"conditions": [ready | {"status": "True"}]}}
        kube.put(lost | other)
        kube.put(lost | {"status": {"conditions": [ready]}})
        await world.until(lambda: ("", "pods", "delete") in kube.used)
        # Another engine replica replaces this one, once no EndpointSlice lists it.
        del waiting["metadata"]["labels"]["rayloom.dev/route"]
        kube.put(waiting)
        changed = service(engine={"args": {"threads": 2}})
        changed["metadata"]["generation"] = 2
        world.ask_for(changed)
        await world.until(lambda: ("ray.io", "rayclusters", "delete") in kube.used)
        await world.until(lambda: ("ray.io", "rayclusters", "get") in kube.used)
        await world.rest()  # A running reconcile would overwrite the status that follows.
        # At the beginning of this rollout, engine replicas of the old revision may have to be recreated. In the end the
        # operator forgets the old revision.
        rollout = {"currentRevision": "00000000", "updateRevision": "00000000", "currentRevisionServed": True}
        memory = {"status": {"rollout": rollout | {"enginesPerRevision": {"00000000": 1}}}}
        rolling = service(engine={"args": {"threads": 3}}) | memory
        rolling["metadata"]["generation"] = 3
        world.ask_for(rolling)
        await world.until(lambda: ("apps", "controllerrevisions", "get") in kube.used)
        back = service(replicas=0) | {"status": {"rollout": rollout | {"currentRevisionServed": False}}}
        back["metadata"]["generation"] = 4
        world.ask_for(back)
        await world.until(lambda: ("apps", "controllerrevisions", "delete") in kube.used)
        await world.rest()
        # The scaler sets a number within its bounds.
        scaled = service(replicas=3, autoscaling={"maxReplicas": 2})
        scaled["metadata"]["generation"] = 5
        world.ask_for(scaled)
        await world.until(lambda: ("rayloom.dev", "llmservices/scale", "patch") in kube.used)
        await world.rest()
        # Gateways and their routes are created, and deleted again.
        http = {"httpRoute": {"parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]}}
        ingress = {"ingress": {"host": "llm.example.com"}}
        for number, route in ((6, http), (7, ingress)):
            changed = service(replicas=0, gateway={"route": route}) | {"status": kube.statuses[-1]}
            changed["metadata"]["generation"] = number
            world.ask_for(changed)
            await world.until(lambda: kube.named("Ingress" if "ingress" in gateway_of(kube)["route"] else "HTTPRoute"))
            await world.rest()
        # The HTTPRoute is deleted once a controller has written an address into the Ingress.
        entry = kube.objects[kube.path("Ingress")]
        kube.put(entry | {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}})
        await world.until(lambda: not kube.named("HTTPRoute"))
        for number, gateway in ((8, {"gateway": {}}), (9, {})):
            found = {"status": kube.statuses[-1]} if kube.statuses else {}
            changed = service(replicas=0, **gateway) | found
            changed["metadata"]["generation"] = number
            world.ask_for(changed)
            await world.until(lambda: bool(kube.named("Deployment")) is ("gateway" in kube.objects[SERVICE]["spec"]))
            await world.rest()
        # The service is recreated. The controller writes a status before an event reports the new service.
        edited = service(replicas=2)
        edited["metadata"]["generation"] = 10
        edited = kube.put(edited)
        kube.objects[path_of(edited)] = edited | {"metadata": edited["metadata"] | {"uid": "uid-2"}}
        world.controller.set_service(edited, False)
        await world.until(lambda: ("rayloom.dev", "llmservices", "get") in kube.used)

    leads = asyncio.Event()
    leads.set()
    with_world(story, leads=leads, kube=kube)

    async def lead():
        lease = Lease(namespace="system", name="operator", identity="a", seconds=1, connect=lambda: kube)
        renewed = asyncio.create_task(lease.run(lambda: None))
        async with asyncio.timeout(60):
            while not kube.used >= LEASES:
                await asyncio.sleep(0.01)
        lease.stop()
        await renewed

    async def replace():
        """Replaces the objects that an earlier engine replica of the same name has left."""
        left = (admin_secret(make_service(), "abcd", b"key"), config_map(make_resolved(), "abcd"))
        for _ in range(2):
            applier = Applier(kube, Drift(kube, lambda _: None), lambda *_: None, lambda *_: None)
            await applier.carry_out(("team", "chat"), Plan(wanted=left, new=frozenset({"chat-abcd-0"})), 300)

    def serve_several(world):
        kube.put(make_gateway_document())

    async def recreate_a_gateway(world):
        await world.until(lambda: ("rayloom.dev", "llmgateways/status", "patch") in kube.used)
        path = kube.path("LLMGateway")
        known = kube.objects[path]
        kube.objects[path] = known | {"metadata": known["metadata"] | {"uid": "uid-2"}}
        world.show_pods(2)
        await world.until(lambda: ("rayloom.dev", "llmgateways", "get") in kube.used)

    asyncio.run(lead())
    asyncio.run(replace())
    with_gateways(recreate_a_gateway, prepare=serve_several, kube=kube)
    return kube.used | KOPF


@pytest.fixture(scope="module")
def rights():
    return used()


def granted(documents, kind, namespace=None):
    roles = [each for each in documents if (each["kind"], each["metadata"].get("namespace")) == (kind, namespace)]
    assert roles, f"no {kind} in {namespace}"
    rules = [rule for each in roles for rule in each["rules"]]
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def documents(*flags):
    command = [HELM, "template", "rayloom", CHART, "--namespace", "system", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]


def test_it_is_granted_the_rights_that_it_uses_and_no_other(rights):
    found = documents()

    assert granted(found, "Role", "system") == LEASES
    assert granted(found, "ClusterRole") == rights - LEASES


def test_with_namespaces_it_has_rights_in_these_alone(rights):
    found = documents("--set", "watchNamespaces={a,b}")

    assert granted(found, "ClusterRole") == DEFINITIONS | NODES
    assert granted(found, "Role", "a") == granted(found, "Role", "b") == rights - LEASES - DEFINITIONS - NODES


def test_every_role_is_bound_to_the_operator_where_it_is():
    found = documents("--set", "watchNamespaces={a,b}")
    subject = {"kind": "ServiceAccount", "name": "rayloom-rayloom-operator", "namespace": "system"}
    roles = {
        (each["metadata"].get("namespace"), each["kind"], each["metadata"]["name"])
        for each in found
        if each["kind"] in ("Role", "ClusterRole")
    }
    bound = {
        (each["metadata"].get("namespace"), each["roleRef"]["kind"], each["roleRef"]["name"])
        for each in found
        if each["kind"] in ("RoleBinding", "ClusterRoleBinding") and each["subjects"] == [subject]
    }

    assert len(roles) == 4
    assert bound == roles


def test_it_can_read_no_secret_and_there_is_no_wildcard():
    found = documents()
    rules = [rule for each in found if each["kind"] in ("Role", "ClusterRole") for rule in each["rules"]]

    assert all("*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"] for rule in rules)
    # The operator must not have the right to patch Secrets, because the response to a patch has the whole object. The
    # response to an update has only the object that was sent.
    assert {verb for _, resource, verb in granted(found, "ClusterRole") if resource == "secrets"} == {
        "create",
        "update",
        "delete",
    }


def test_leases_and_definitions_are_held_to_one_name():
    named = {
        (rule["resources"][0], *rule["verbs"]): rule.get("resourceNames")
        for each in documents()
        if each["kind"] in ("Role", "ClusterRole")
        for rule in each["rules"]
        if rule["resources"][0] in ("leases", "customresourcedefinitions")
    }

    assert named == {
        ("leases", "create"): None,  # RBAC cannot limit creation to a name
        ("leases", "get", "patch"): ["rayloom-rayloom-operator"],
        ("customresourcedefinitions", "list", "watch"): ["rayclusters.ray.io"],
    }

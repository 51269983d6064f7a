"""LLMGateways and the services that they select, as the API server stores them, and a controller for them."""

import asyncio
import base64
import contextlib
import json

from queue_steps import is_at_rest
from rayloom_operator.api.llmgateway.spec import parse_gateway
from rayloom_operator.decide.conditions.accepted import VALID
from rayloom_operator.decide.llmgateway.plan import wanted_objects
from rayloom_operator.decide.llmgateway.situation import GatewaySituation, names_of
from rayloom_operator.reconcile.llmgateway.controller import GatewayController
from rayloom_operator.times import Now
from rt_fake_kube import FakeKube
from rt_operator import CLOCK, SETTINGS, make_pod_document


def make_gateway_document(name="public", **spec):
    return {
        "apiVersion": "rayloom.dev/v1alpha1",
        "kind": "LLMGateway",
        "metadata": {"name": name, "namespace": "team", "uid": "uid-public", "generation": 1},
        "spec": {"services": {"matchLabels": {"public": "yes"}}, **spec},
    }


def make_service_document(name="chat", *, labels=None, created="2026-01-01T00:00:00Z", available="Serving", **spec):
    """A selected service with a port for gateways.

    `available`: the reason of the condition Available. The service serves only if this reason is Serving.
    """
    labels = {"public": "yes"} if labels is None else labels
    condition = {
        "type": "Available",
        "status": "True" if available == "Serving" else "False",
        "reason": available,
        "message": f"The reason is {available}.",
    }
    return {
        "apiVersion": "rayloom.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"uid-{name}",
            "generation": 1,
            "labels": labels,
            "creationTimestamp": created,
        },
        "spec": {"model": {"source": "builtin://smollm2-135m"}, "gateway": {"replicas": 0}, **spec},
        "status": {"conditions": [condition], "gateway": {"replicas": 0, "ready": 0}},
    }


def objects_of_gateway(*services, settings=SETTINGS, wall=CLOCK, **spec):
    """The objects of a new LLMGateway that selects these services. `wall`: the present time."""
    gateway = parse_gateway(make_gateway_document(**spec))
    members, aliases = names_of(gateway, services)
    situation = GatewaySituation(
        now=Now(wall, 0.0),
        settings=settings,
        generation=1,
        previous={},
        gateway=gateway,
        accepted=VALID,
        members=members,
        aliases=aliases,
    )
    return list(wanted_objects(situation))


class GatewayWorld:
    """A running controller of LLMGateways, and its cluster. `services`: the LLMServices that the operator knows."""

    def __init__(self, kube, services):
        self.kube, self.services = kube, services
        self.are_known = True
        self.controller = GatewayController(kube, SETTINGS, self._services_of)

    def _services_of(self, namespace):
        found = (each for each in self.services.values() if each["metadata"]["namespace"] == namespace)
        return tuple(found) if self.are_known else None

    def set_service(self, document):
        meta = document["metadata"]
        self.services[meta["name"]] = document
        self.controller.note_service((meta["namespace"], meta["name"]))

    def remove_service(self, name):
        meta = self.services.pop(name)["metadata"]
        self.controller.note_service((meta["namespace"], name))

    @property
    def status(self):
        return self.kube.objects[self.kube.path("LLMGateway")].get("status", {})

    def condition(self, kind):
        return next((each for each in self.status.get("conditions", ()) if each["type"] == kind), {})

    @property
    def models_file(self):
        secrets = [each for each in self.kube.objects.values() if each["kind"] == "Secret"]
        found = next((each for each in secrets if "models.json" in each["data"]), None)
        return {} if found is None else json.loads(base64.b64decode(found["data"]["models.json"]))

    def show_pods(self, number, ready=True, **facts):
        """Creates `number` pods of the only LLMGateway's Deployment, with the Deployment's present settings."""
        for each in range(number):
            document = make_pod_document(f"gateway-{each}", is_head=False, ready=ready, **facts)
            document["metadata"]["labels"] = {"rayloom.dev/llmgateway": "public"}
            self.kube.put({"apiVersion": "v1", "kind": "Pod", **document})
        found = self.kube.objects[self.kube.path("Deployment")]
        generation = found["metadata"]["generation"]
        status = {"observedGeneration": generation, "replicas": number, "updatedReplicas": number}
        self.kube.put(found | {"status": status})

    def labels(self, name):
        """The values of this label in all pods."""
        pods = [each for each in self.kube.objects.values() if each["kind"] == "Pod"]
        return [each["metadata"]["labels"].get(name) for each in pods]

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.005)

    async def rest(self):
        """Returns when no work is left, except for work that a timer or an event will start."""
        for _ in range(5):
            await self.until(lambda: is_at_rest(self.controller._queue))
            await asyncio.sleep(0.002)


def with_gateways(story, *, prepare=lambda world: None, kube=None, services=()):
    """Runs `story` with a cluster that `prepare` has changed."""

    async def run():
        known = {each["metadata"]["name"]: each for each in services}
        world = GatewayWorld(kube or FakeKube(), known)
        prepare(world)
        work = asyncio.create_task(world.controller.run())
        try:
            await story(world)
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    asyncio.run(run())

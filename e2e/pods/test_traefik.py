"""Routes with a real controller: Traefik in front of real gateway pods, by an HTTPRoute and by an Ingress.

All tests share Traefik, an LLMGateway with an HTTPRoute, and its three services. The first service has gateway pods of
its own, with an Ingress. The third service has no engine, so a request for its model waits for HOLD_SECONDS. Traefik
runs beside the nodes of a local cluster, with its default time-outs; on other clusters the tests are skipped.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from clients.client_pod import Client
from clients.gateways import GatewayedService, ModelsGateway
from clients.namespaces import new_namespace
from clients.service import CHAT, READY_SECONDS, STATUS_SECONDS, Service, tokens_of, wait
from clients.traefik import ADDRESS, CLASS, CLASSES, CONTROLLER, Outsider, Traefik, crds
from disruptions.rollout_under_load import rollable
from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.clusters.local import LocalCluster
from local_kubernetes.machine.kubectl import Kubectl
from rt_ports import free_ports
from rt_tls import Authority

pytestmark = pytest.mark.slow
FIRST, SECOND, ASLEEP = "one", "two", "asleep"
HOST, HOST_OF_FIRST, HOST_ELSEWHERE = "llm.example.com", "one.example.com", "llm.example.org"
EDGE = "edge"  # name of the Gateway, whose listeners take the hosts below example.com
LABEL = "public"
# Traefik's default readTimeout is 60 s.
HOLD_SECONDS, STREAM_SECONDS = 75, 75.0
# The longest silence of a stream: an engine writes a comment every 10 s if it has no token.
_SILENCE_S = 10.0
# Two events at least this far apart arrived separately: the engine needs several milliseconds for a token. Lines that
# arrive together are read within microseconds.
_APART_S = 0.001
# The longest pause of the prober's answers. Traefik reports a route as accepted about 0.1 s before it uses the route.
# Within these 0.1 s, the operator deletes the route of the other kind.
_MOMENT_S = 2.0
# The prober needs more than three seconds for this number of answers, and so separates two changes of routes. Traefik
# applies changes at most every two seconds (providersThrottleDuration), so changes in quick succession would interrupt
# the URL for longer.
_NUM_PROBES = 150
_PROBE_PAUSE_S = 0.02


@dataclass(frozen=True)
class Place:
    traefik: Traefik
    outsider: Outsider
    gateway: ModelsGateway
    first: GatewayedService
    second: GatewayedService

    @property
    def urls(self) -> tuple[str, str]:
        """The base URLs of the LLMGateway for clients outside of the cluster, with and without TLS."""
        return f"https://{HOST}:{self.traefik.https_port}/v1", f"http://{HOST}:{self.traefik.http_port}/v1"

    @property
    def http_route(self) -> dict[str, Any]:
        # The API server refuses several references to one Gateway that differ only in their ports.
        listeners = {"https": self.traefik.https_port, "http": self.traefik.http_port}
        parents = [{"name": EDGE, "sectionName": name, "port": port} for name, port in listeners.items()]
        return {"parentRefs": parents, "hostnames": [HOST]}

    def lead(self, **route: Any) -> None:
        """Gives the LLMGateway this route."""
        self.gateway.kubectl.apply(_gateway(self.gateway, route))

    def route(self) -> dict[str, Any]:
        """`status.route` of the LLMGateway."""
        found: dict[str, Any] = self.gateway.get().get("status", {}).get("route", {})
        return found

    def wait_route(self, reason: str) -> dict[str, Any]:
        """`status.route` of the LLMGateway with this reason."""
        wait(lambda: self.route().get("reason") == reason, STATUS_SECONDS, self.story)
        return self.route()

    def wait_serving(self, url: str) -> None:
        """Returns once Traefik serves this base URL. Traefik writes the status of a route before it uses the route."""

        def is_served() -> bool:
            # Until Traefik has the Secret's certificate, it uses its own default certificate, which the client refuses.
            with contextlib.suppress(OSError):
                return self.outsider.request(f"{url}/models")[0] == 200
            return False

        wait(is_served, STATUS_SECONDS, self.story)

    def has(self, kind: str, name: str) -> bool:
        return self.gateway.kubectl.succeeds("get", kind, name, "--namespace", self.gateway.namespace)

    def story(self) -> str:
        return f"{self.gateway.story()}\n{self.first.story()}\n{self.traefik.log()}"


@pytest.fixture(scope="module")
def traefik(cluster: Cluster, operator: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traefik]:
    if not isinstance(cluster, LocalCluster):
        pytest.skip("Traefik runs on this machine, which reaches only the pods of a local cluster")
    files = [word for path in crds() for word in ("--filename", path)]
    operator("apply", "--server-side", *files)
    operator("wait", "--for=condition=Established", *files, "--timeout=60s", timeout_s=70)
    operator.apply(*CLASSES)
    http_port, https_port = free_ports(2)
    folder = tmp_path_factory.mktemp("traefik")
    running = Traefik(cluster.kubeconfig, folder, http_port=http_port, https_port=https_port)
    yield running
    running.close()
    operator("delete", "ingressclass", CLASS)
    # The deletion of the CRDs also deletes all objects of their kinds.
    operator("delete", *files, "--timeout=120s", timeout_s=130)


@pytest.fixture(scope="module")
def place(operator: Kubectl, traefik: Traefik) -> Iterator[Place]:
    authority = Authority()
    with new_namespace(operator, "traefik") as namespace:
        client = Client.start(operator, namespace)
        gateway = ModelsGateway(operator, client, namespace, "public")
        first, second, asleep = (
            GatewayedService(operator, client, namespace, f"public-{each}") for each in (FIRST, SECOND, ASLEEP)
        )
        found = Place(traefik, Outsider(authority.cert), gateway, first, second)
        own_route = {"ingress": {"className": CLASS, "host": HOST_OF_FIRST, "tlsSecretName": f"{FIRST}-tls"}}
        operator.apply(
            _certificate(authority, namespace, "edge-tls", HOST),
            _certificate(authority, namespace, f"{FIRST}-tls", HOST_OF_FIRST),
            _edge(namespace, traefik),
            # Each data type gives other answers, so an answer of the wrong model is noticed.
            _service(first, FIRST, "float32", gateway={"replicas": 1, "route": own_route}),
            _service(second, SECOND, "bfloat16"),
            _service(asleep, ASLEEP, "bfloat16", replicas=0),
            _gateway(gateway, {"httpRoute": found.http_route}),
        )
        engines = (first, second)
        gateways = (first, gateway)
        wait(lambda: all(each.has(1) for each in engines), READY_SECONDS, found.story)
        wait(lambda: all(each.has_gateways(1) for each in gateways), READY_SECONDS, found.story)
        gateway.wait_available()
        yield found


def test_an_http_route_leads_to_the_model_of_each_request_whole_and_streamed(place: Place) -> None:
    assert place.wait_route("Accepted") == {
        "kind": "HTTPRoute",
        "url": place.urls[0],
        "accepted": True,
        "reason": "Accepted",
        "message": "Every Gateway has accepted the HTTPRoute.",
    }
    name = f"{place.gateway.name}-llmgateway"
    made = place.gateway.kubectl.json("get", "httproute", name, "--namespace", place.gateway.namespace)
    assert {each["controllerName"] for each in made["status"]["parents"]} == {CONTROLLER}
    expected = {each: _direct_tokens(service, each) for each, service in ((FIRST, place.first), (SECOND, place.second))}
    assert expected[FIRST] != expected[SECOND]
    for url in place.urls:
        place.wait_serving(url)
        for model, tokens in expected.items():
            assert _whole_tokens(place.outsider, url, model) == tokens
            _expect_one_by_one(place.outsider, url, model, tokens)
        # A path beside the API, and a host of no route: Traefik's own answers.
        outside = url.removesuffix("/v1")
        assert place.outsider.request(f"{outside}/metrics") == (404, "404 page not found\n")
    nowhere = f"http://{HOST_ELSEWHERE}:{place.traefik.http_port}/v1/models"
    assert place.outsider.request(nowhere) == (404, "404 page not found\n")


def test_an_ingress_has_the_certificate_of_its_secret_whole_and_streamed(place: Place) -> None:
    def route() -> dict[str, Any]:
        found: dict[str, Any] = place.first.get()["status"]["gateway"]["route"]
        return found

    wait(lambda: bool(route()["accepted"]), STATUS_SECONDS, place.story)
    assert (route()["url"], route()["reason"]) == (f"https://{HOST_OF_FIRST}/v1", "Accepted")
    assert ADDRESS in route()["message"]
    url = f"https://{HOST_OF_FIRST}:{place.traefik.https_port}/v1"
    place.wait_serving(url)
    tokens = _direct_tokens(place.first, FIRST)
    assert _whole_tokens(place.outsider, url, FIRST) == tokens
    _expect_one_by_one(place.outsider, url, FIRST, tokens)
    # An Ingress names no port, so Traefik also serves it at `http_port`, without TLS.
    in_clear = f"http://{HOST_OF_FIRST}:{place.traefik.http_port}/v1/models"
    assert place.outsider.request(in_clear)[0] == 200


def test_answers_that_take_longer_than_a_minute_are_not_cut_and_a_client_that_leaves_is_noticed(place: Place) -> None:
    secure, _ = place.urls
    place.wait_serving(secure)
    with ThreadPoolExecutor(2) as threads:
        began = time.monotonic()
        held = threads.submit(_whole, place.outsider, secure, ASLEEP, timeout_s=2.0 * HOLD_SECONDS)
        times = _times_of_long_stream(place.outsider, secure)
        status, body = held.result()
        held_s = time.monotonic() - began
    # The gateway pod's own answer, and not a time-out of Traefik.
    assert (status, json.loads(body)["error"]["code"]) == (503, "engine_starting")
    assert held_s >= HOLD_SECONDS
    assert times[-1] - times[0] >= STREAM_SECONDS - _SILENCE_S
    assert max(later - earlier for earlier, later in pairwise(times)) < _SILENCE_S
    # Traefik closes its connection to the gateway pod, and the engine has no sequence any more.
    wait(lambda: place.first.engine_status()["requests"]["running"] == 0, STATUS_SECONDS, place.story)


def test_the_status_names_why_traefik_refuses_a_route(place: Place) -> None:
    place.lead(httpRoute=place.http_route | {"hostnames": [HOST_ELSEWHERE]})
    edge = f"Gateway {EDGE} in namespace {place.gateway.namespace}"
    refused = place.wait_route("RouteNotAccepted")
    first = f"{edge} (listener https, port {place.traefik.https_port})"
    assert refused["message"] == f"{first} does not accept the HTTPRoute: NoMatchingListenerHostname"
    place.lead(httpRoute=place.http_route | {"parentRefs": [{"name": EDGE, "sectionName": "absent"}]})
    no_listener = f"{edge} (listener absent) does not accept the HTTPRoute: NoMatchingParent"
    wait(lambda: place.route().get("message") == no_listener, STATUS_SECONDS, place.story)
    place.lead(httpRoute=place.http_route)
    place.wait_route("Accepted")


def test_a_change_of_the_kind_of_a_route_interrupts_the_url_for_a_moment_at_most(place: Place) -> None:
    name, (_, url) = f"{place.gateway.name}-llmgateway", place.urls
    place.wait_serving(url)
    with _Prober(place.outsider, f"{url}/models") as prober:
        place.lead(ingress={"className": CLASS, "host": HOST})
        wait(lambda: place.route().get("kind") == "Ingress" and place.route()["accepted"], STATUS_SECONDS, place.story)
        wait(lambda: not place.has("httproute", name), STATUS_SECONDS, place.story)
        prober.wait_more(_NUM_PROBES)
        place.lead(httpRoute=place.http_route)
        wait(lambda: not place.has("ingress", name), STATUS_SECONDS, place.story)
        prober.wait_more(_NUM_PROBES)
    longest_s = max(later - earlier for earlier, later in pairwise(prober.good_times))
    assert longest_s < _MOMENT_S
    assert place.wait_route("Accepted")["kind"] == "HTTPRoute"


class _Prober(threading.Thread):
    """Sends one GET after the other in the block. `good_times`: when answers with status 200 came."""

    def __init__(self, outsider: Outsider, url: str) -> None:
        super().__init__(daemon=True)
        self.good_times: list[float] = []
        self._outsider, self._url = outsider, url
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(_PROBE_PAUSE_S):
            with contextlib.suppress(OSError):
                if self._outsider.request(self._url)[0] == 200:
                    self.good_times.append(time.monotonic())

    def wait_more(self, number: int) -> None:
        """Returns after this number of further answers with status 200."""
        most = len(self.good_times) + number
        wait(lambda: len(self.good_times) >= most, STATUS_SECONDS, lambda: f"{len(self.good_times)} answers")

    def __enter__(self) -> _Prober:
        self.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._is_over.set()
        self.join()


def _direct_tokens(service: GatewayedService, model: str) -> list[str]:
    """The tokens of an answer of the engine itself, through the Service in the cluster."""
    direct = Service(service.kubectl, service.client, service.namespace, service.name)
    status, body = direct.chat(model=model)
    assert status == 200, body
    return tokens_of(json.loads(body))


def _whole(outsider: Outsider, url: str, model: str, timeout_s: float = 60.0) -> tuple[int, str]:
    return outsider.request(f"{url}/chat/completions", {"model": model, **CHAT}, timeout_s)


def _whole_tokens(outsider: Outsider, url: str, model: str) -> list[str]:
    status, body = _whole(outsider, url, model)
    assert status == 200, body
    answer = json.loads(body)
    assert answer["model"] == model
    return tokens_of(answer)


def _expect_one_by_one(outsider: Outsider, url: str, model: str, tokens: list[str]) -> None:
    """Expects a stream of these tokens whose events have arrived one by one. A proxy that buffers sends many at once.

    At least half of the events must arrive _APART_S or more after the previous event. A busy machine may let this
    process read late, so the share is not higher.
    """
    body = {"model": model, **CHAT, "stream": True}
    events = [each for each in outsider.events(f"{url}/chat/completions", body) if each[1]["choices"]]
    found = [event["choices"][0] for _, event in events]
    contents = [(each.get("logprobs") or {}).get("content") or [] for each in found]
    assert [entry["token"] for content in contents for entry in content] == tokens
    times = [at for at, _ in events]
    num_apart = sum(later - earlier >= _APART_S for earlier, later in pairwise(times))
    assert num_apart >= len(times) // 2, f"{num_apart} of {len(times)} events arrived apart from the one before"


def _times_of_long_stream(outsider: Outsider, url: str) -> list[float]:
    """The times of a stream's events. The client disconnects from the stream after STREAM_SECONDS."""
    body = {"model": FIRST, **CHAT, "stream": True, "ignore_eos": True, "max_tokens": 8000}
    times: list[float] = []
    with contextlib.closing(outsider.events(f"{url}/chat/completions", body)) as events:
        for at, event in events:
            assert "error" not in event, event
            times.append(at)
            if at - times[0] >= STREAM_SECONDS:
                return times
    raise AssertionError(f"8000 tokens took less than {STREAM_SECONDS} s")


def _service(service: GatewayedService, served_name: str, dtype: str, **spec: Any) -> dict[str, Any]:
    document = rollable(service.namespace, 5, 5, **({"replicas": 1, "gateway": {"replicas": 0}} | spec))
    document["metadata"] |= {"name": service.name, "labels": {LABEL: "yes"}}
    document["spec"]["model"] |= {"servedName": served_name, "dtype": dtype}
    return document


def _gateway(gateway: ModelsGateway, route: dict[str, Any]) -> dict[str, Any]:
    spec = {"services": {"matchLabels": {LABEL: "yes"}}, "replicas": 1, "holdSeconds": HOLD_SECONDS, "route": route}
    return {
        "apiVersion": "rayloom.dev/v1alpha1",
        "kind": "LLMGateway",
        "metadata": {"name": gateway.name, "namespace": gateway.namespace},
        "spec": spec,
    }


def _edge(namespace: str, traefik: Traefik) -> dict[str, Any]:
    """A Gateway with a listener for each of Traefik's ports. Traefik finds its entry point by the port."""
    tls = {"mode": "Terminate", "certificateRefs": [{"name": "edge-tls"}]}
    listeners = [
        {"name": "http", "protocol": "HTTP", "port": traefik.http_port},
        {"name": "https", "protocol": "HTTPS", "port": traefik.https_port, "tls": tls},
    ]
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "Gateway",
        "metadata": {"name": EDGE, "namespace": namespace},
        "spec": {"gatewayClassName": CLASS, "listeners": [each | {"hostname": "*.example.com"} for each in listeners]},
    }


def _certificate(authority: Authority, namespace: str, name: str, host: str) -> dict[str, Any]:
    issued = authority.issue(host, is_engine=True)
    files = {"tls.crt": issued.cert, "tls.key": issued.key}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": name, "namespace": namespace},
        "data": {file: base64.b64encode(content).decode() for file, content in files.items()},
    }

"""`make bench-operator`: measures the operator, as a real process on a real API server, with many LLMServices.

A first run has some hundreds or thousands of services and the real KubeRay. A second run has more services and a
simulated KubeRay. Kubelets and engines are simulated, because only the operator is measured. The operator polls engines
at its default interval. All processes share this machine's cores, so the measured seconds are upper bounds. Traffic
stays on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from local_kubernetes.clusters.local import LocalCluster
from local_kubernetes.machine.place import Place
from local_kubernetes.machine.processes import Processes
from local_kubernetes.machine.shell import say
from operator_processes.chart import credentials, install_chart
from operator_processes.process import OPERATOR, OperatorProcess
from operator_processes.scrape import Scrape
from real_api_server.world import ENGINE_IMAGE, LEASE, LLM, World
from simulated_deployments import Deployments
from simulated_endpoint_slices import EndpointSlices
from simulated_nodes.api_client import cluster_of
from simulated_ray_clusters import RayClusters

# Index of the local cluster. Tests use other indices.
_INDEX = 5
# The most services that are created at the same time. More creations would only wait longer for the API server.
_NUM_AT_ONCE = 24
_PROGRESS_S = 15.0
_PER_NAMESPACE = 100
_IDLE_S = 30.0
# `_arrive` creates _NUM_ARRIVALS services, one every _ARRIVAL_S seconds. At this rate the cores are partly idle, so no
# reconcile waits for a core.
_NUM_ARRIVALS = 60
_ARRIVAL_S = 1.0
_NEVER = 1_000_000_000
_MODEL = {"source": "builtin://smollm2-135m"}
# (metric, label) of the waits in the work queue: for services with an event, and for new services. Services with an
# event have priority.
_NEWS, _NEW = ("queue", 'priority="news"'), ("queue", 'priority="new"')
# goals of the design: resync after a restart, resident memory, 99th percentile of a reconcile
_GOALS = {"resync s": 60.0, "RSS MiB": 400.0, "p99 ms": 250.0}


class Bench:
    def __init__(self, world: World, folder: Path, num_gateways: int) -> None:
        """`num_gateways`: gateway pods of each service."""
        self._world = world
        self._spec: dict[str, object] = {"model": _MODEL}
        if num_gateways:
            self._spec["gateway"] = {"replicas": num_gateways}
        self._folder = folder
        self._numbers = itertools.count()
        self._credentials = credentials(world.request)
        self._num_services = 0
        self.rows: list[dict[str, float | str]] = []
        self.operator = self._start()

    def _start(self) -> OperatorProcess:
        arguments = ("run", f"--engine-image={ENGINE_IMAGE}", "--log-level=warning", *LEASE)
        where, folder = cluster_of(self._world.kubeconfig), self._folder / str(next(self._numbers))
        return OperatorProcess(where, self._credentials, folder, *arguments, command=OPERATOR)

    def grow(self, size: int, what: str, timeout_s: float) -> None:
        """Creates services until there are `size`, and adds a row with the measurements."""
        self._wait("the operator", lambda: bool(self.operator.scrape()), 180)
        before, began = Scrape.of(self.operator), time.monotonic()
        number = size - self._num_services
        self._fill(range(self._num_services, size), timeout_s)
        self._num_services = size
        seconds, after = time.monotonic() - began, Scrape.of(self.operator)
        polls, asked_at = self._world.engines.num_answers, time.monotonic()
        idle_from = Scrape.of(self.operator)
        time.sleep(_IDLE_S)  # the time over which the idle operator is measured, not a wait for an event
        idle = Scrape.of(self.operator)
        elapsed = time.monotonic() - asked_at
        rss_mib = self.operator.rss_mib()
        self.rows.append(
            {
                "services": size,
                "with": what,
                "converge s": seconds,
                "per s": number / seconds,
                "API calls each": (after.total("api_requests_total") - before.total("api_requests_total")) / number,
                "CPU ms each": (after.cpu_s - before.cpu_s) * 1000 / number,
                "filling p50 ms": after.quantile(0.5, before),
                "filling p99 ms": after.quantile(0.99, before),
                "filling news wait p50 ms": after.quantile(0.5, before, *_NEWS),
                "filling news wait p99 ms": after.quantile(0.99, before, *_NEWS),
                "filling new wait p99 ms": after.quantile(0.99, before, *_NEW),
                "questions without an answer": after.total("engine_poll_failures_total")
                - before.total("engine_poll_failures_total"),
                "RSS MiB": rss_mib,
                "polls/s": (self._world.engines.num_answers - polls) / elapsed,
                "idle calls/s": (idle.total("api_requests_total") - idle_from.total("api_requests_total")) / elapsed,
                "idle CPU %": (idle.cpu_s - idle_from.cpu_s) * 100 / elapsed,
                **self._arrive(),
                **self._resync(),
            }
        )
        say(_table(self.rows[-1:]))

    def _arrive(self) -> dict[str, float | str]:
        """Creates services one by one. The figures cover the reconciles of new and of existing services."""
        before, began, first = Scrape.of(self.operator), time.monotonic(), self._num_services
        self._num_services += _NUM_ARRIVALS
        new = range(first, self._num_services)
        for number in new:
            self._world.do(self._make([number]))
            time.sleep(max(0.0, began + (number - first + 1) * _ARRIVAL_S - time.monotonic()))
        self._wait("those that came to be available", lambda: all(map(self._is_available, new)), 120)
        after = Scrape.of(self.operator)
        return {
            "one a second p50 ms": after.quantile(0.5, before),
            "one a second p99 ms": after.quantile(0.99, before),
            "one a second news wait p99 ms": after.quantile(0.99, before, *_NEWS),
        }

    def _resync(self) -> dict[str, float | str]:
        """Kills the operator and measures how long a new one takes to reconcile every service and poll every engine."""
        self.operator.kill()
        self._world.take_lease()
        engines = list(self._world.engines.by_ip.values())
        before = {id(engine): engine.num_asked for engine in engines}
        began = time.monotonic()
        self.operator = self._start()

        def is_done() -> bool:
            if any(engine.num_asked == before[id(engine)] for engine in engines):
                return False
            said = Scrape.of(self.operator)  # empty while the operator is too busy to answer
            return said.total("reconcile_total") >= len(engines) and said.total("queue_depth") == 0

        self._wait("every engine to be asked", is_done, 600)
        found = Scrape.of(self.operator)
        seconds = time.monotonic() - began
        nothing = Scrape("", 0.0)
        return {
            "resync s": seconds,
            "resync writes": found.num_writes(),
            "resync p50 ms": found.quantile(0.5, nothing),
            "resync p99 ms": found.quantile(0.99, nothing),
            "resync RSS MiB": self.operator.rss_mib(),
        }

    def _fill(self, numbers: range, timeout_s: float) -> None:
        """Creates services, at most _NUM_AT_ONCE at the same time, and returns when all are Available."""
        began, told_at = time.monotonic(), time.monotonic()
        left, on_their_way = iter(numbers), dict[int, None]()
        num_done = 0

        def is_done() -> bool:
            nonlocal num_done, told_at
            done = [number for number in on_their_way if self._is_available(number)]
            for number in done:
                del on_their_way[number]
            num_done += len(done)
            new = list(itertools.islice(left, _NUM_AT_ONCE - len(on_their_way)))
            on_their_way.update(dict.fromkeys(new))
            if new:
                self._world.do(self._make(new))
            if time.monotonic() - told_at > _PROGRESS_S and num_done:
                told_at = time.monotonic()
                rate = num_done / (told_at - began)
                say(f"{num_done} of {len(numbers)}: {rate:.1f}/s, {(len(numbers) - num_done) / rate:.0f} s left")
            return num_done == len(numbers)

        self._wait("all services to be available", is_done, timeout_s, pause_s=0.05)

    def _is_available(self, number: int) -> bool:
        status = self._world.services.get(_key(number), {}).get("status") or {}
        return any(each["type"] == "Available" and each["status"] == "True" for each in status.get("conditions", ()))

    async def _make(self, numbers: Sequence[int]) -> None:
        api = self._world.api
        for number in numbers:
            if number % _PER_NAMESPACE == 0:
                await api.request("POST", "/api/v1/namespaces", {"metadata": {"name": _key(number)[0]}})

        async def make(number: int) -> None:
            namespace, name = _key(number)
            manifest = {
                "apiVersion": "rayloom.dev/v1alpha1",
                "kind": "LLMService",
                "metadata": {"name": name},
                "spec": self._spec,
            }
            await api.request("POST", f"{LLM}/namespaces/{namespace}/llmservices", manifest)

        await asyncio.gather(*(make(number) for number in numbers))

    def _wait(self, what: str, is_so: Callable[[], bool], timeout_s: float, pause_s: float = 0.5) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert self.operator.is_alive, self.operator.story()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
            time.sleep(pause_s)


def _key(number: int) -> tuple[str, str]:
    return f"bench-{number // _PER_NAMESPACE}", f"chat-{number}"


def _table(rows: list[dict[str, float | str]]) -> str:
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in rows:
        cells = (
            each if isinstance(each, str) else f"{each:.0f}" if each >= 10 else f"{each:.1f}" for each in row.values()
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kuberay", type=int, default=1000, help="services with real KubeRay; 0 for none")
    parser.add_argument("--sizes", default="100,1000,10000", help="services with a simulated KubeRay, growing")
    parser.add_argument("--gateways", type=int, default=0, help="gateway pods of each service")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that one size may take")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",") if size]
    rows: list[dict[str, float | str]] = []
    with tempfile.TemporaryDirectory() as folder:
        runs = [([arguments.kuberay], "KubeRay")] if arguments.kuberay else []
        runs += [(sizes, "simulated KubeRay")] if sizes else []
        for index, (wanted, what) in enumerate(runs):
            rows += _measure(wanted, what, arguments, Path(folder) / str(index))
    say("\n" + _table(rows))
    for name, goal in _GOALS.items():
        say(f"goal: {name} < {goal:.0f} at 10,000 services")


def _measure(sizes: list[int], what: str, arguments: argparse.Namespace, folder: Path) -> list[dict[str, float | str]]:
    """The rows of all sizes, measured on a new cluster that is removed afterwards."""
    # The API server shares the cores with the operator. A larger heap saves the API server garbage collections.
    os.environ |= {"GOGC": "300", "GOMEMLIMIT": "12GiB"}
    # A full garbage collection over the documents of 10,000 services would stop the simulated engines for 5 s.
    youngest, middle, _ = gc.get_threshold()
    gc.set_threshold(youngest, middle, _NEVER)
    cluster = LocalCluster(Place.of(_INDEX))
    cluster.down()
    try:
        cluster.up("api")
        install_chart(cluster.kubeconfig)
        world = World(cluster.kubeconfig, folder)
        if what != "KubeRay":
            Processes(Place.of(_INDEX).state).stop("kuberay")
            world.kubelets.skips_unready_pods = True
            controllers = RayClusters(world.api), EndpointSlices(world.api), Deployments(world.api)
            for controller in controllers:
                world.do(_call(controller.start))
            # The simulated controllers do the work of these two processes, so the processes are stopped.
            for name in ("kube-scheduler", "kube-controller-manager"):
                Processes(Place.of(_INDEX).state).stop(name)
        bench = Bench(world, folder, arguments.gateways)
        try:
            for size in sizes:
                bench.grow(size, what, arguments.timeout)
            return bench.rows
        finally:
            bench.operator.kill()
    finally:
        cluster.down()


async def _call(function: Callable[[], None]) -> None:
    function()


if __name__ == "__main__":
    main()

"""`make soak`: two engines and two gateways on real pods under the load of a production trace, with faults at random.

If a connection breaks because a gateway or its node is lost, the client repeats the request with its Idempotency-Key.
Clients repeat no other requests. The exit code is 1 if a request failed, an answer changed, memory grows, or an engine
or gateway is not ready at the end. The exit code is also 1 if something was not tested: the client sent no records, no
fault happened, or the memory of a role was never measured. A run of 10 minutes or more also needs enough samples for a
trend.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from typing import Any

from clients.client_pod import Client
from clients.gateways import GatewayedService
from clients.load import LoadAgent
from clients.mixed_load import run_mix
from clients.namespaces import new_namespace
from clients.service import wait
from disruptions.nodes import move_operator_off
from disruptions.rollout_under_load import rollable
from local_kubernetes.clusters.choice import chosen_cluster
from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.machine.kubectl import Kubectl
from local_kubernetes.machine.shell import ClusterError
from soak.fault_plan import FaultPlan
from soak.memory import Size, last_line, memory
from soak.requests import arrival_times, soak_requests
from soak.strikes import Strikes
from soak.verdict import LONG_S, ROLES, SAMPLE_S, shortcomings, trends

_REPORT_S, _LOOK_S = 60.0, 2.0
_START_S, _WHOLE_S = 300.0, 300.0
_LEAST_MINUTES = 1.0  # the first fault happens after half a minute


class Soak:
    """One run on a service whose engines and gateways are all ready."""

    def __init__(self, service: GatewayedService, strikes: Strikes, seed: int) -> None:
        self.faults: dict[str, int] = {}
        self.samples: dict[str, list[tuple[float, float]]] = {role: [] for role in ROLES}
        self.gaps: dict[str, list[str]] = {role: [] for role in ROLES}  # why a sample is missing
        self.progress: dict[str, Any] = {"sent": 0, "ended": 0, "failed": 0, "repeated": 0, "last_failure": ""}
        self.records: dict[str, Any] = {}
        self._service = service
        self._strikes = strikes
        self._plan = FaultPlan(seed)
        self._began = 0.0

    def run(self, requests: list[dict[str, Any]], arrivals: list[list[float]], seconds: float) -> None:
        """Keeps the load for `seconds`. Returns once all engines and gateways are ready and all requests have ended."""
        service = self._service
        first = {"requests": requests[:1], "urls": [service.url], "strike_at": 1}
        later = {"late_requests": requests, "arrivals": arrivals, "report_every_s": 10.0}
        agent = LoadAgent(service, **first, **later, repeat_url=service.url)
        try:
            agent.receive()
            agent.send("start_arrivals")
            listener = threading.Thread(target=self._listen, args=(agent,), daemon=True)
            listener.start()
            self._began = time.monotonic()
            self._disturb(seconds)
            self._strikes.end()
            wait(self._is_whole, _WHOLE_S, service.story)
            agent.send("stop")
            listener.join(_WHOLE_S)
        finally:
            self._strikes.end()
            agent.process.kill()

    def _disturb(self, seconds: float) -> None:
        sampled = reported = 0.0
        while (now_s := time.monotonic() - self._began) < seconds:
            is_whole = self._is_whole()
            fault = self._plan.due(now_s, is_whole=is_whole)
            if fault is not None:
                what = self._strikes.strike(fault)
                self.faults[what] = self.faults.get(what, 0) + 1
                print(f"{now_s:7.0f} s  {what}", flush=True)
            if now_s - sampled >= SAMPLE_S:
                sampled = now_s
                self._sample(now_s)
            if now_s - reported >= _REPORT_S:
                reported = now_s
                print(f"{now_s:7.0f} s  {self._line(is_whole)}", flush=True)
            time.sleep(_LOOK_S)

    def _is_whole(self) -> bool:
        try:
            is_so = self._service.has(2) and self._service.has_gateways(2)
        except ClusterError:
            return False
        return is_so and not self._strikes.is_node_lost.is_set()

    def _sample(self, now_s: float) -> None:
        found: dict[str, Size]
        try:
            found = memory(self._service)
        except ClusterError as error:
            found = dict.fromkeys(ROLES, last_line(error))
        for role, size in found.items():
            if isinstance(size, str):
                self.gaps[role].append(size)
            else:
                self.samples[role].append((now_s, size))

    def _line(self, is_whole: bool) -> str:
        sizes = ", ".join(f"{role} {samples[-1][1]:.0f} MiB" for role, samples in self.samples.items() if samples)
        counts = ", ".join(f"{self.progress[name]} {name}" for name in ("sent", "ended", "failed", "repeated"))
        last = f"; last failure: {self.progress['last_failure']}" if self.progress["failed"] else ""
        return f"{counts}; {'whole' if is_whole else 'recovering'}; {sizes}{last}"

    def _listen(self, agent: LoadAgent) -> None:
        while "streams" not in self.records:
            message = agent.receive()
            self.progress = message.get("progress", self.progress)
            if "streams" in message:
                self.records = message


def report(soak: Soak, expected: list[list[str]], seconds: float) -> bool:
    """Prints the tables of a run that took `seconds`. Returns True if the run passed."""
    streams = soak.records.get("streams", [])
    failures = [each["failure"] for each in streams if each["failure"]]
    changed = [each for each in streams if not each["failure"] and each["tokens"] != expected[each["index"]]]
    repeated = sum(bool(each["broken"]) for each in streams)
    print("\n| fault | number |\n|---|---|")
    for what, number in sorted(soak.faults.items()):
        print(f"| {what} | {number} |")
    print("\n| requests | failed | answers changed | repeated after a gateway ended |\n|---|---|---|---|")
    print(f"| {len(streams)} | {len(failures)} | {len(changed)} | {repeated} |")
    print("\n| memory (PSS) | mean, MiB | slope, MiB/h | error | samples | missing | verdict |")
    print("|---|---|---|---|---|---|---|")
    for role, line in trends(soak.samples).items():
        slopes = f"{line.mib_per_hour:+.1f} | {line.error_mib_per_hour:.1f}"
        numbers = f"{line.num_samples} | {len(soak.gaps[role])}"
        print(f"| {role} | {line.mean_mib:.0f} | {slopes} | {numbers} | {line.verdict} |")
    for role, reasons in soak.gaps.items():
        if reasons:
            print(f"no sample of the {role}, most recently: {reasons[-1]}")
    wrong = shortcomings(seconds, soak.faults, soak.samples)
    if not streams:
        print("WRONG: the client's pod sent no records")
    for each in wrong:
        print(f"WRONG: {each}")
    if seconds < LONG_S:
        print(f"a run of less than {LONG_S / 60:.0f} minutes may have too few samples for a verdict on memory")
    for failure in failures[:20]:
        print(f"FAILED: {failure[:500]}")
    for each in changed[:5]:
        print(f"CHANGED: request {each['index']}: {each['tokens']} instead of {expected[each['index']]}")
    return bool(streams) and not failures and not changed and not wrong


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help=f"at least {_LEAST_MINUTES:g} (default 60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second (default 0.5)")
    asked = parser.parse_args(arguments)
    if not asked.minutes >= _LEAST_MINUTES:
        parser.error(f"--minutes is {asked.minutes:g}, and must be at least {_LEAST_MINUTES:g}: faults take time")
    cluster = chosen_cluster(os.environ)
    kubectl = Kubectl(cluster.kubeconfig)
    with new_namespace(kubectl, "soak") as namespace:
        service = _whole_service(kubectl, namespace)
        lost_node = _prepare_nodes(service, cluster)
        requests = soak_requests(service.name, asked.seed)
        expected = [stream["tokens"] for stream in run_mix(service, requests)]
        soak = Soak(service, Strikes(service, cluster, lost_node, asked.seed), asked.seed)
        seconds = 60 * asked.minutes
        # Requests arrive until all engines and gateways are ready again after the last fault.
        soak.run(requests, arrival_times(asked.seed, asked.rate, seconds + _WHOLE_S), seconds)
    return 0 if report(soak, expected, seconds) else 1


def _whole_service(kubectl: Kubectl, namespace: str) -> GatewayedService:
    service = GatewayedService(kubectl, Client.start(kubectl, namespace), namespace, "smollm2")
    spec = {"replicas": 2, "gateway": {"replicas": 2}, "recovery": {"restartBudget": 1000}}
    kubectl.apply(rollable(namespace, 5, 5, **spec))
    wait(lambda: service.has(2) and service.has_gateways(2), _START_S, service.story)
    service.wait_available()
    return service


def _prepare_nodes(service: GatewayedService, cluster: Cluster) -> str:
    """Moves client and operator off the node that faults may stop, and returns its name."""
    client = service.kubectl.json("get", "pod", service.client.name, "--namespace", service.namespace)
    (lost_node,) = set(cluster.node_names()) - {client["spec"]["nodeName"]}
    move_operator_off(service.kubectl, lost_node)
    return lost_node


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

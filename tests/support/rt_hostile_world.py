"""`python rt_hostile_world.py SECONDS`: measures the delays that hostile tenants cause in the operator's controller.

One service has an engine of each of `rt_hostile_engine.KINDS`. Some services have models whose costs would block an
operator that had no limits. 20 services are healthy. Prints figures as JSON. The program is a process of its own, so
that the measured memory is only that of the operator.
"""

import asyncio
import contextlib
import copy
import gc
import json
import random
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import uvloop

from rayloom_operator.observe import poller as engine_poller
from rayloom_operator.reconcile.controller import Controller
from rt_fake_kube import FakeKube
from rt_hostile_engine import KINDS, NUM_WELL
from rt_inspection import COSTS, SHAPE, ended, facts, make_job_pod
from rt_operator import SETTINGS, make_pod_document
from rt_ports import free_port

SERVICES = "/apis/rayloom.dev/v1alpha1/namespaces/team/llmservices"
HUGE = 10**12
LOOPING = SHAPE | dict.fromkeys(("num_heads", "num_kv_heads", "intermediate_size", "vocab_size"), HUGE)
# Costs with the largest allowed numbers of tensor sizes and layers. The kinds of layers alternate, and the weights fit
# nowhere.
MANY = list(range(1, 65))
LARGE = {"elements": [1 << 38] * len(MANY)}
LARGEST = COSTS | {
    "tensor": MANY,
    "embedding": LARGE,
    "head": LARGE,
    "both": LARGE,
    "kinds": [{"weights": {"elements": [each] * len(MANY)}, "kv": LARGE} for each in (1 << 34, 1 << 35)],
    "layers": "ab" * 500,
    "step": {"token": LARGE, "sequence_bytes": 1 << 40},
}
ACCELERATOR = {"perNode": 64, "memory": "1Gi"}
# Termination messages of the models' Jobs.
MODELS = {
    "looping": facts(shape=LOOPING),
    "layers": facts(costs=COSTS | {"layers": "9999a" * 200}),
    "largest": facts(costs=LARGEST),
    "zero": facts(costs=COSTS | {"tensor": [0, 1]}),
    "nested": "[" * 4000,
    "list": json.dumps({"version": "v1", "error": {"reason": [], "message": "m"}}),
}
TICK_S = 0.005
ROUNDS = 3
LEAST_PASSES = 20  # per round; on a busy machine a round lasts longer


class Cluster(FakeKube):
    """A fake cluster that keeps patched labels."""

    async def patch(self, path, body):
        self._note("patch", path)
        known = self.objects.get(path)
        if known is None:
            return {}
        labels = known["metadata"]["labels"] | body["metadata"].get("labels", {})
        kept = {name: text for name, text in labels.items() if text is not None}
        return self.put(known | {"metadata": known["metadata"] | {"labels": kept}})


class Clock:
    """A clock that does not count the seconds in which threads of this process waited for a processor."""

    def __init__(self):
        self._waited_ns = {}  # thread id -> nanoseconds, also for threads that have ended

    def __call__(self):
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has just ended
                self._waited_ns[thread.name] = int((thread / "schedstat").read_text().split()[1])
        return time.monotonic() - sum(self._waited_ns.values()) / 1e9


class Watchdog:
    """The longest stalls of the event loop: in seconds by the clock, and in CPU time of the loop's thread.

    CPU time does not include the time in which another thread of this process holds the GIL, such as the thread of
    sizing.
    """

    def __init__(self):
        self.wall_s = self.cpu_s = 0.0

    def next_round(self):
        """Begins a round. Returns the longest stalls of the last round in seconds: (by the clock, in CPU time)."""
        stalls_s = self.wall_s, self.cpu_s
        self.wall_s = self.cpu_s = 0.0
        return stalls_s

    async def run(self):
        clock = Clock()
        at, cpu_at = clock(), time.thread_time()
        while True:
            await asyncio.sleep(TICK_S)
            now, cpu_now = clock(), time.thread_time()
            self.wall_s = max(self.wall_s, now - at - TICK_S)
            self.cpu_s = max(self.cpu_s, cpu_now - cpu_at)
            at, cpu_at = now, cpu_now


def service(name, model=None, **spec):
    return {
        "apiVersion": "rayloom.dev/v1alpha1",
        "kind": "LLMService",
        "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}", "generation": 1},
        "spec": {"model": model or {"source": "builtin://smollm2-135m"}, **spec},
    }


def hostile_services(number):
    """Yields the services of a round that have hostile models."""
    for name in MODELS:
        spec = {"accelerator": ACCELERATOR} if name == "largest" else {}
        yield service(f"{name}-{number}", {"source": f"hf://acme/{name}-{number}"}, **spec)
    source = f"hf://acme/looping-{number}"
    camel = {_camel(name): size for name, size in LOOPING.items()}
    stored = service(f"stored-{number}", {"source": source}, accelerator=ACCELERATOR)
    yield stored | {"status": {"model": {"source": source, "numParameters": 1, "shape": camel}}}


class World:
    def __init__(self):
        self.kube = Cluster()
        self.controller = Controller(self.kube, SETTINGS)
        self.passes = []  # seconds from the event of a healthy service to the end of its reconcile
        self._began = {}
        self._clock = Clock()
        self._addresses = {"bad": iter(range(1, 255)), "well": iter(range(1, 255))}
        reconcile = self.controller._reconcile

        async def measured(key):
            try:
                return await reconcile(key)
            finally:
                if key in self._began:
                    self.passes.append(self._clock() - self._began.pop(key))

        self.controller._reconcile = measured

    def ask_for(self, document):
        self.controller.set_service(self.kube.put(document), False)

    def ask_for_requests(self, name, number):
        """Changes the number of requests in a service's spec, so that its sizing is computed again."""
        document = copy.deepcopy(self.kube.objects[f"{SERVICES}/{name}"])
        document["spec"]["sizing"] = {"minConcurrentRequests": number}
        self.ask_for(document)

    def touch(self, number):
        """Queues a healthy service, as an event of this service would."""
        key = ("team", f"well-{number}")
        if key not in self._began:
            self._began[key] = self._clock()
            self.controller._queue.add(key)

    async def play(self):
        """Simulates KubeRay and the kubelets: creates the pods of engines, and ends Jobs at once."""
        while True:
            for each in list(self.kube.objects.values()):
                if each["kind"] == "RayCluster":
                    self._run_engine(each)
                elif each["kind"] == "Job":
                    self._end_job(each)
            await asyncio.sleep(0.05)

    def _run_engine(self, cluster):
        meta = cluster["metadata"]
        owner = meta["labels"]["rayloom.dev/service"]
        if _model(owner) in MODELS or f"/api/v1/namespaces/team/pods/{meta['name']}-head" in self.kube.objects:
            return
        is_bad = owner == "bad"
        address = f"127.0.{1 if is_bad else 2}.{next(self._addresses['bad' if is_bad else 'well'])}"
        for kind in ("head", "worker"):
            pod = make_pod_document(f"{meta['name']}-{kind}", is_head=kind == "head", owner=meta["uid"], node="n2")
            pod["metadata"]["labels"] |= {"rayloom.dev/service": owner, "rayloom.dev/group": meta["name"]}
            pod["status"]["podIP"] = address if kind == "head" else ""
            self.kube.put({"apiVersion": "v1", "kind": "Pod", **pod})

    def _end_job(self, job):
        owner = job["metadata"]["labels"]["rayloom.dev/service"]
        state = ended(MODELS.get(_model(owner), MODELS["looping"]))
        state["terminated"]["finishedAt"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        pod = make_job_pod(job, state)
        pod["metadata"]["labels"] = copy.copy(job["metadata"]["labels"])
        if f"/api/v1/namespaces/team/pods/{pod['metadata']['name']}" not in self.kube.objects:
            self.kube.put(pod)

    def reason(self, name, kind="ModelReady"):
        status = self.kube.objects[f"{SERVICES}/{name}"].get("status", {})
        return next((each["reason"] for each in status.get("conditions", ()) if each["type"] == kind), "")

    def reasons(self, number):
        """Returns the reason for which each hostile model of a round is refused."""
        return {
            name: self.reason(f"{name}-{number}", "Accepted" if name == "largest" else "ModelReady")
            for name in (*MODELS, "stored")
        }

    def num_writes(self, name):
        return self.kube.calls.count(("patch", f"{SERVICES}/{name}/status"))


async def until(condition, timeout_s=60):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


async def scenario(seconds, world):
    await world.controller.is_ready.wait()
    for number in range(NUM_WELL):
        world.ask_for(service(f"well-{number}"))
    await until(lambda: all(world.reason(f"well-{n}", "Available") == "Serving" for n in range(NUM_WELL)))
    before_kib = _rss_kib()
    # A full garbage collection would be the longest stall of most rounds. Its time would depend on the objects of this
    # program.
    gc.collect()
    gc.freeze()
    watchdog = Watchdog()
    watching = asyncio.create_task(watchdog.run())
    began = time.monotonic()
    world.ask_for(service("bad", replicas=len(KINDS)))
    choice = random.Random(1)
    stalls_s = []
    for number in range(ROUNDS):
        # Every round has new models, and models whose sizing is computed again. This is all work that the tenants can
        # cause.
        if number:
            for name in (*MODELS, "stored"):
                world.ask_for_requests(f"{name}-{number - 1}", number + 1)
        for each in hostile_services(number):
            world.ask_for(each)
        ends = time.monotonic() + seconds / ROUNDS
        while time.monotonic() < ends or len(world.passes) < LEAST_PASSES * (number + 1):
            world.touch(choice.randrange(NUM_WELL))
            await asyncio.sleep(0.02)
        stalls_s.append(watchdog.next_round())
    watching.cancel()
    passes = sorted(world.passes)
    status = world.kube.objects[f"{SERVICES}/bad"]["status"]
    walls_ms, cpus_ms = ([round(each * 1000, 1) for each in column] for column in zip(*stalls_s, strict=True))
    return {
        "seconds": time.monotonic() - began,
        # Tenants stall the loop in all rounds. Other programs, and a host that pauses this machine, stall it only in
        # some rounds. So each result is the longest stall of the best round.
        "loop_cpu_ms": min(cpus_ms),
        "loop_cpu_ms_of_rounds": cpus_ms,
        "loop_wall_ms": min(walls_ms),
        "loop_wall_ms_of_rounds": walls_ms,
        "rss_mib": _rss_kib() // 1024,
        "rss_growth_mib": (_rss_kib() - before_kib) // 1024,
        "passes": len(passes),
        "pass_p50_ms": round(passes[len(passes) // 2] * 1000, 1),
        "pass_p99_ms": round(passes[int(len(passes) * 0.99)] * 1000, 1),
        "bad_writes": world.num_writes("bad"),
        "bad_status_bytes": len(json.dumps(status)),
        "bad_engines_asked": world.controller._poller.num_engines - NUM_WELL,
        "reasons": [world.reasons(number) for number in range(ROUNDS)],
        "well": sum(world.reason(f"well-{number}", "Available") == "Serving" for number in range(NUM_WELL)),
    }


def _model(owner):
    """Returns the name of a hostile service without the number of its round."""
    return owner.rpartition("-")[0]


def _camel(name):
    first, *rest = name.split("_")
    return first + "".join(map(str.title, rest))


def _rss_kib():
    """Returns the peak memory of this process in KiB. getrusage would include the peak of the parent process."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


async def run(seconds):
    port = free_port()
    program = [sys.executable, str(Path(__file__).with_name("rt_hostile_engine.py")), str(port)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engines:
        assert engines.stdin is not None and engines.stdout is not None
        assert engines.stdout.readline() == b"ready\n"
        engine_poller.ADMIN_PORT = port
        world = World()
        work = [asyncio.create_task(world.controller.run()), asyncio.create_task(world.play())]
        try:
            return await scenario(seconds, world)
        finally:
            for task in work:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            engines.stdin.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(runner.run(run(float(sys.argv[1])))))

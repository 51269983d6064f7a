"""A cluster in a few lines: RayClusters whose pods KubeRay makes, engines that start, nodes that are lost.

The operator's pure parts act on it turn by turn; nothing of it runs. `run_turn` asserts what must hold in every turn.
"""

from dataclasses import dataclass, field
from datetime import timedelta

from rayloom_operator.judgement import is_well
from rayloom_operator.names import group_name
from rayloom_operator.observed import Observed, is_headless, pod
from rayloom_operator.revision import revision
from rt_operator import (
    CLOCK,
    crashed,
    make_group,
    make_pod_document,
    make_reading,
    make_resolved,
    make_said,
    restarted,
    turn,
)

START_S = 20.0
DRAIN_S = 45.0
NODES = ("n0", "n1", "n2")
UNREADY = restarted(0) | {"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}


@dataclass
class Place:
    """A pod."""

    name: str
    node: str
    ends_at: float | None = None  # when its kubelet is done with it, once it was deleted


@dataclass
class Cluster:
    name: str
    uid: str
    line: str  # of engines of which each was made for the one before, which failed: uid of the first
    pods: dict = field(default_factory=dict)  # head and worker -> Place
    serves_at: float = 0.0
    fault: str = ""  # hung or spent
    was_whole: bool = False
    is_leaving: bool = False
    silent_since: float | None = None
    has_answered: bool = False  # to the operator that runs now
    num_pods: int = 0  # that the operator which runs now has seen made


class Simulation:
    def __init__(self):
        self.t = 1000.0
        self.lost = {}  # node -> since when
        self.clusters = {}
        self.gone_at = {}  # name -> when
        self.known_gone_at = None  # as the operator that runs now knows it, of those there None; None before it looked
        self.line_of = {}  # uid -> line
        self.document = {}
        self.made_at = {}  # line -> times, since the spec was changed
        self.cursed = set()  # lines of engines that give up as soon as they start
        self.serial = 0
        self.ask()

    def ask(self, replicas=1, threads=1):
        engine = {"args": {"threads": threads}}  # another number makes another revision
        self.spec = {"replicas": replicas, "engine": engine, "recovery": {"rebuildSeconds": 60}}
        self.resolved = make_resolved(**self.spec)
        self.made_at = {}

    @property
    def clock(self):
        return CLOCK + timedelta(seconds=self.t)

    def number(self):
        self.serial += 1
        return self.serial

    def pass_time(self, seconds):
        for _ in range(int(seconds)):
            self.t += 1.0
            for cluster in list(self.clusters.values()):
                self._live(cluster)

    def _live(self, cluster):
        for kind, place in list(cluster.pods.items()):
            is_cut_off = place.node in self.lost
            if is_cut_off and self.t - self.lost[place.node] >= 15 and place.ends_at is None:
                place.ends_at = self.t  # evicted, as its toleration says
            if place.ends_at is not None and self.t >= place.ends_at and not is_cut_off:
                del cluster.pods[kind]
        if cluster.is_leaving:
            if not cluster.pods:
                del self.clusters[cluster.name]
                self.gone_at[cluster.name] = self.t
            return
        for kind in ("head", "worker"):
            free = [node for node in NODES if node not in self.lost]
            if kind not in cluster.pods and free and not (cluster.was_whole and "head" not in cluster.pods):
                number = self.number()
                cluster.pods[kind] = Place(f"{kind}-{number}", free[number % len(free)])
                cluster.num_pods += 1
                cluster.serves_at = self.t + START_S
        if not self.is_connected(cluster):
            cluster.serves_at = self.t + START_S
        elif cluster.line in self.cursed:
            cluster.fault = "spent"
        elif self.t >= cluster.serves_at and not cluster.fault:
            cluster.was_whole = True

    def is_connected(self, cluster):
        places = cluster.pods.values()
        return len(places) == 2 and all(place.node not in self.lost and place.ends_at is None for place in places)

    def serves(self, cluster):
        is_up = self.is_connected(cluster) and not cluster.fault and not cluster.is_leaving
        return is_up and self.t >= cluster.serves_at

    def pod(self, cluster, kind):
        place = cluster.pods[kind]
        state = {"": None, "hung": UNREADY, "spent": crashed(70, "ranks died")}[cluster.fault if kind == "head" else ""]
        grace = None if place.ends_at is None else max(place.ends_at - self.t, 0.0)
        return pod(
            make_pod_document(
                place.name,
                is_head=kind == "head",
                node=place.node,
                engine=state,
                route=True,
                ready=place.node not in self.lost,
                deletion_grace=grace,
                owner=cluster.uid,
            )
        )

    def reading(self, cluster):
        head = cluster.pods.get("head")
        if head is None or head.ends_at is not None:
            return None
        if cluster.fault or head.node in self.lost:
            cluster.silent_since = cluster.silent_since or self.t
            said = make_said() if cluster.has_answered else None
            since = cluster.silent_since
            return make_reading(said, at=since, failing_since=since, error="no answer", advanced_at=since)
        cluster.silent_since, cluster.has_answered = None, True
        if self.serves(cluster):
            return make_reading(make_said(), at=self.t, advanced_at=self.t)
        said = make_said("recovering" if cluster.was_whole else "starting", None)
        return make_reading(said, at=self.t, advanced_at=cluster.serves_at - START_S)

    def seen(self):
        if self.known_gone_at is None:
            self.known_gone_at = dict.fromkeys(each["name"] for each in self.document.get("groups", ()))
            # What went while nobody looked, and is not in the status, nobody can know.
            self.gone_at = {name: at for name, at in self.gone_at.items() if name in self.known_gone_at}
        known = self.known_gone_at
        known |= {name: self.t for name, at in known.items() if at is None and name not in self.clusters}
        known |= dict.fromkeys(self.clusters)
        groups, leaving, taken = [], [], {name for name, at in known.items() if at is not None and self.t - at <= 60}
        for cluster in self.clusters.values():
            pods = [self.pod(cluster, kind) for kind in cluster.pods]
            leaving += [each for each in pods if each.grace_s is not None]
            if cluster.is_leaving:
                taken.add(cluster.name)
                continue
            conditions = [{"type": "RayClusterProvisioned", "status": str(cluster.was_whole)}]
            if "head" not in cluster.pods:
                conditions.append({"type": "HeadPodReady", "status": "False", "reason": "HeadPodNotFound"})
            group = make_group(
                *(each for each in pods if each.grace_s is None),
                name=cluster.name,
                uid=cluster.uid,
                reading=self.reading(cluster),
                is_headless=is_headless({"status": {"conditions": conditions}}),
                num_new_pods=cluster.num_pods,
            )
            groups.append(group)
        lost = frozenset(node for node, since in self.lost.items() if self.t - since >= 15)
        return Observed(groups=tuple(groups), taken=frozenset(taken), leaving=tuple(leaving), lost_nodes=lost)

    def run_turn(self, num_actions=None):
        """One pass; with `num_actions` the operator dies after so many changes, before its status is written."""
        seen = self.seen()
        facts = {"taken": seen.taken, "leaving": seen.leaving, "lost_nodes": seen.lost_nodes}
        found = turn(self.resolved, seen.groups, previous=self.document, now=self.t, clock=self.clock, **facts)
        failed = {slot.name: slot.failure.uid for slot in found.slots if slot.failure is not None}
        changes = [
            lambda each=each: self._make(each["metadata"]["name"], failed)
            for each in found.plan.wanted
            if each["kind"] == "RayCluster"
        ]
        changes += [lambda each=each: self._delete(each, seen) for each in found.plan.deletions]
        for change in changes[:num_actions]:
            change()
        if num_actions is None:
            self.document = found.document
        current = [each for each in self.clusters.values() if not each.is_leaving and self.is_current(each)]
        assert len(current) <= self.spec["replicas"] or num_actions is not None
        return found

    def is_current(self, cluster):
        return cluster.name.split("-")[1] == revision(self.resolved)

    def _make(self, name, failed):
        assert name not in self.clusters, f"{name} is made while it is there"
        assert self.t - self.gone_at.get(name, -100.0) > 60, f"{name} was there a moment ago"
        uid = f"uid-{self.number()}"
        self.line_of[uid] = line = self.line_of.get(failed.get(name), uid)
        self.clusters[name] = Cluster(name=name, uid=uid, line=line)
        self.made_at.setdefault(line, []).append(self.t)

    def _delete(self, deletion, seen):
        name = deletion.path.split("/")[-1]
        if "/pods/" in deletion.path:
            for cluster in self.clusters.values():
                for kind, place in list(cluster.pods.items()):
                    if place.name == name:
                        assert deletion.grace_s or place.node in self.lost, "force is for lost nodes"
                        place.ends_at = min(place.ends_at or self.t + DRAIN_S, self.t + deletion.grace_s)
                        if deletion.grace_s == 0:
                            del cluster.pods[kind]
            return
        cluster = self.clusters.get(name)
        if "/rayclusters/" not in deletion.path or cluster is None or cluster.uid != deletion.uid:
            return
        group = next(each for each in seen.groups if each.uid == cluster.uid)
        names = {group_name("chat", revision(self.resolved), number) for number in range(self.spec["replicas"])}
        is_spare = len([each for each in self.clusters.values() if self.is_current(each)]) > len(names)
        assert not is_well(group, self.t) or is_spare or not self.is_current(cluster), f"{name} served"
        cluster.is_leaving = True
        for place in cluster.pods.values():
            drain_s = DRAIN_S if cluster.fault == "hung" else 2.0
            place.ends_at = min(place.ends_at or self.t + drain_s, self.t + drain_s)

    def restart_operator(self):
        for cluster in self.clusters.values():
            cluster.has_answered, cluster.silent_since, cluster.num_pods = False, None, len(cluster.pods)
        self.known_gone_at = None

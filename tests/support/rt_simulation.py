"""A simulated cluster: RayClusters whose pods KubeRay creates, engines that start, nodes that are lost.

The operator's pure functions decide. `run_turn` makes their changes in the simulated cluster, and asserts the
invariants of every reconcile. No process runs.
"""

from datetime import timedelta

from rayloom_operator.names import revision_of
from rayloom_operator.observe.observed import Observed
from rayloom_operator.observe.verdict import is_well
from rayloom_operator.resolve.revision import revision
from rt_operator import CLOCK, make_resolved, rollout_step, turn
from rt_simulated_engine import START_S, Cluster, Place

DRAIN_S = 45.0  # seconds until a deleted pod ends if its engine was not asked to drain
DRAIN_SECONDS = 20  # spec.drainSeconds
NODES = ("n0", "n1", "n2")
FAILS_REQUESTS = 3  # value of `threads` that makes all requests of an engine fail


class Simulation:
    def __init__(self):
        self.t = 1000.0
        self.lost = {}  # node -> time since which it is lost
        self.clusters = {}
        self.endpoints = frozenset()  # addresses that clients find
        self.gone_at = {}  # name of a RayCluster -> time at which it was gone
        # `gone_at` as the present operator knows it. The map has the value None for existing RayClusters. Before the
        # first observation there is no map (None).
        self.known_gone_at = None
        self.line_of = {}  # uid of an engine -> its line
        self.document = {}
        self.made_at = {}  # line -> times of creations since the last change of the spec
        self.cursed = set()  # lines whose engines give up as soon as they start
        self.has_stuck_streams = False  # running requests never end
        self.asked = {}  # revision -> Resolved, for all specs so far
        self.old_specs = {}  # the same, for revisions with a ControllerRevision
        self.proven = set()  # revisions of which an engine has served since the operator recorded the spec's revision
        self.bounds = {}  # additional fields of spec.rollout
        self.serial = 0
        self.ask()

    def ask(self, replicas=1, threads=1):
        """Changes the spec. Another number of threads gives another revision."""
        self.spec = {
            "replicas": replicas,
            "drainSeconds": DRAIN_SECONDS,
            "engine": {"args": {"threads": threads}},
            "recovery": {"rebuildSeconds": 60},
            "rollout": {"analysis": {"holdSeconds": 5, "minRequests": 1}, **self.bounds},
        }
        self.resolved = make_resolved(**self.spec)
        self.revision = revision(self.resolved)
        self.asked[self.revision] = self.resolved
        self.made_at = {}

    @property
    def clock(self):
        return CLOCK + timedelta(seconds=self.t)

    @property
    def there(self):
        return [each for each in self.clusters.values() if not each.is_leaving]

    @property
    def order(self):
        return self.resolved.service.spec

    @property
    def rollout(self):
        """The rollout state as it was last written."""
        return self.document.get("rollout", {})

    @property
    def terminating(self):
        """Names of terminating engines in the last written state."""
        return self.rollout.get("terminatingEngines", {})

    def number(self):
        self.serial += 1
        return self.serial

    def pass_time(self, seconds):
        for _ in range(int(seconds)):
            self.t += 1.0
            for cluster in list(self.clusters.values()):
                self._live(cluster)
                cluster.take_requests(self.t, self.lost, self.is_found(cluster), self.has_stuck_streams)
                if self.is_available(cluster):
                    self.proven.add(cluster.revision)
            routed = (each for each in self.clusters.values() if each.is_routed and each.is_ready(self.lost))
            self.endpoints = frozenset(each.head.ip for each in routed)
            for cluster in self.clusters.values():
                cluster.be_found(self.t, self.is_found(cluster))

    def _live(self, cluster):
        for kind, place in list(cluster.pods.items()):
            is_cut_off = place.node in self.lost
            if is_cut_off and self.t - self.lost[place.node] >= 15 and place.ends_at is None:
                place.ends_at = self.t  # evicted, because its toleration has ended
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
                cluster.pods[kind] = Place(f"{kind}-{number}", free[number % len(free)], f"10.{number}")
                cluster.num_pods += 1
                cluster.serves_at = self.t + START_S
        if not cluster.is_connected(self.lost):
            cluster.serves_at = self.t + START_S
        elif cluster.line in self.cursed:
            cluster.fault = "spent"
        elif self.t >= cluster.serves_at and not cluster.fault:
            cluster.was_whole = True

    def serves(self, cluster):
        return cluster.serves(self.t, self.lost)

    def is_found(self, cluster):
        return cluster.head is not None and cluster.head.ip in self.endpoints

    def is_available(self, cluster):
        is_reached = cluster.is_routed and self.is_found(cluster)
        return is_reached and self.serves(cluster) and not cluster.is_drained

    def seen(self):
        if self.known_gone_at is None:
            self.known_gone_at = dict.fromkeys(each["name"] for each in self.document.get("groups", ()))
            # If a RayCluster was deleted while no operator ran, the operator knows it only from the status.
            self.gone_at = {name: at for name, at in self.gone_at.items() if name in self.known_gone_at}
        known = self.known_gone_at
        known |= {name: self.t for name, at in known.items() if at is None and name not in self.clusters}
        known |= dict.fromkeys(self.clusters)
        taken = {name for name, at in known.items() if at is not None and self.t - at <= 60}
        pods = [each for cluster in self.clusters.values() for each in cluster.seen_pods(self.t, self.lost)]
        return Observed(
            replicas=tuple(cluster.group(self.t, self.lost) for cluster in self.there),
            taken=frozenset(taken | {each.name for each in self.clusters.values() if each.is_leaving}),
            num_ending=len(self.clusters) - len(self.there),
            terminating_pods=tuple(each for each in pods if each.grace_s is not None),
            lost_nodes=frozenset(node for node, since in self.lost.items() if self.t - since >= 15),
        )

    def run(self, seconds, each_s):
        """Advances the time by `seconds`. Reconciles every `each_s` seconds, and after each immediate requeue."""
        for _ in range(0, seconds, each_s):
            self.pass_time(each_s)
            self.run_turns()

    def run_turns(self):
        for _ in range(9):
            if self.run_turn().step.requeue_after_s != 0.0:
                return
        raise AssertionError(f"decides without end: {self.rollout}")

    def run_turn(self, num_actions=None):
        """Runs a reconcile.

        `num_actions`: number of changes after which the operator dies, before it writes the status.
        """
        seen = self.seen()
        facts = {
            "previous": self.document,
            "own": self.revision,
            "now": self.t,
            "clock": self.clock,
            "taken": seen.taken,
            "num_ending": seen.num_ending,
            "terminating_pods": seen.terminating_pods,
            "lost_nodes": seen.lost_nodes,
        }
        step = rollout_step(self.resolved, seen.replicas, **facts)
        is_rolling = step.state.update_revision != step.state.current_revision
        # The endpoints are observed only if the decision depends on them.
        depends = is_rolling or self.terminating or step.state.terminating or step.route_off
        endpoints = self.endpoints if depends else None
        found = turn(self.resolved, seen.replicas, old=self.old_specs, endpoints=endpoints, **facts)
        failed = {slot.name: slot.failure.uid for slot in found.slots if slot.failure is not None}
        condemned = {slot.name for slot in found.slots if slot.has_failed}
        planned = found.plan
        changes = [lambda each=each: self._drain(each) for each in planned.drains if not each.wanted]
        changes += [lambda each=each: self._route(each) for each in planned.routes]
        changes += [
            lambda each=each: self._make(each, failed)
            for each in planned.wanted
            if each["kind"] in ("ControllerRevision", "RayCluster")
        ]
        changes += [lambda each=each: self._drain(each) for each in planned.drains if each.wanted]
        changes += [lambda each=each: self._delete(each, seen, condemned) for each in planned.deletions]
        for change in changes[:num_actions]:
            change()
        if num_actions is None:
            noted, self.document = self.rollout.get("updateRevision"), found.document
            if noted != self.rollout.get("updateRevision"):
                self.proven = {each.revision for each in self.there if self.is_available(each)}
        return found

    def _make(self, manifest, failed):
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "ControllerRevision":
            number = name.rpartition("-")[2]
            self.old_specs.setdefault(number, self.asked[number])
            return
        made = revision_of(name)
        assert name not in self.clusters, f"{name} is made while it is there"
        assert self.t - self.gone_at.get(name, -100.0) > 60, f"{name} was there a moment ago"
        assert len(self.clusters) < self.order.replicas + self.order.rollout.max_surge, "more than maxSurge allows"
        assert made in self.old_specs, f"{name} could not be made again"
        failure = self.rollout.get("failure", {})
        assert made != self.revision or failure.get("revision") != made, f"{made} failed, and is tried again"
        if self.known_gone_at is not None:
            self.known_gone_at[name] = None  # the RayCluster may be deleted before the next observation
        uid = f"uid-{self.number()}"
        self.line_of[uid] = line = self.line_of.get(failed.get(name), uid)
        is_bad = self.asked[made].service.spec.engine.args.threads == FAILS_REQUESTS
        self.clusters[name] = Cluster(name=name, uid=uid, line=line, fails_requests=is_bad)
        self.made_at.setdefault(line, []).append(self.t)

    def _route(self, route):
        cluster = next(each for each in self.there if each.head is not None and each.head.name == route.pod.name)
        if not route.wanted and self.is_available(cluster):
            self._may_go(cluster)
        assert not route.wanted or cluster.name not in self.terminating, f"{cluster.name} is to go"
        cluster.head.is_routed = route.wanted
        cluster.be_found(self.t, self.is_found(cluster))

    def _may_go(self, cluster):
        """Asserts that the route of a serving engine may be removed."""
        name, made, spec = cluster.name, cluster.revision, self.order
        assert name in self.terminating, f"that {name} goes is not written"
        num_available = sum(self.is_available(each) for each in self.there)
        least = spec.replicas - spec.rollout.max_unavailable
        assert num_available > least, f"{name} goes, and no more than {num_available} serve"
        num_like_it = sum(each.revision == made for each in self.there)
        is_one_too_many = num_like_it > spec.replicas
        if made == self.rollout["currentRevision"] and spec.rollout.max_surge and not is_one_too_many:
            assert made != self.revision, f"{name} goes, and is none too many"
            assert self.revision in self.proven, f"{name} goes before one of {self.revision} served"

    def _drain(self, drain):
        cluster = self.clusters[drain.replica]
        assert cluster.head.ip == drain.ip
        is_clear = not cluster.is_routed and not self.is_found(cluster)
        assert not drain.wanted or is_clear, f"{cluster.name} drains while clients find it"
        if cluster.answers(self.lost):
            cluster.is_drained = drain.wanted

    def _delete(self, deletion, seen, condemned):
        name = deletion.path.split("/")[-1]
        if "/pods/" in deletion.path:
            self._delete_pod(name, deletion.grace_s)
        elif "/controllerrevisions/" in deletion.path:
            self.old_specs.pop(name.rpartition("-")[2], None)
        elif "/rayclusters/" in deletion.path:
            cluster = self.clusters.get(name)
            assert cluster is not None and cluster.uid == deletion.uid
            if name in condemned:
                group = next(each for each in seen.replicas if each.uid == cluster.uid)
                assert not is_well(group, self.t), f"{name} served"
            else:
                self._is_drained(cluster)
            cluster.is_leaving = True
            for place in cluster.pods.values():
                drain_s = DRAIN_S if cluster.fault == "hung" else 2.0
                place.ends_at = min(place.ends_at or self.t + drain_s, self.t + drain_s)

    def _is_drained(self, cluster):
        name, since = cluster.name, cluster.unfound_since
        assert name in self.terminating, f"that {name} goes is not written"
        assert not cluster.is_routed and not self.is_found(cluster), f"{name} is deleted while clients find it"
        if cluster.was_found and cluster.answers(self.lost):
            is_empty = cluster.is_drained and cluster.num_in_flight == 0
            is_over = since is not None and self.t - since >= DRAIN_SECONDS
            assert is_empty or is_over, f"{name} has requests"

    def _delete_pod(self, name, grace_s):
        for cluster in self.clusters.values():
            for kind, place in list(cluster.pods.items()):
                if place.name == name:
                    assert grace_s or place.node in self.lost, "force is for lost nodes"
                    place.ends_at = min(place.ends_at or self.t + DRAIN_S, self.t + grace_s)
                    if grace_s == 0:
                        del cluster.pods[kind]

    def restart_operator(self):
        for cluster in self.clusters.values():
            cluster.has_answered, cluster.silent_since, cluster.num_pods = False, None, len(cluster.pods)
        self.known_gone_at = None

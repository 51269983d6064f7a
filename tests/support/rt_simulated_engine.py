"""A simulated RayCluster with its pods and its engine. The engine starts, serves requests, drains, fails and ends."""

from dataclasses import dataclass, field

from rayloom_operator.names import revision_of
from rayloom_operator.observe.pods import pod
from rayloom_operator.observe.replicas import is_headless
from rt_operator import crashed, make_group, make_pod_document, make_reading, make_said, restarted

START_S = 20.0
NUM_REQUESTS = 3  # simultaneous requests of an engine that clients find
UNREADY = restarted(0) | {"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}


@dataclass
class Place:
    """A pod."""

    name: str
    node: str
    ip: str
    ends_at: float | None = None  # time at which a deleted pod is gone; None: it is not deleted
    is_routed: bool = False


@dataclass
class Cluster:
    name: str
    uid: str
    line: str  # uid of the first engine in a chain of failed engines and their replacements
    fails_requests: bool = False
    pods: dict = field(default_factory=dict)  # head and worker -> Place
    serves_at: float = 0.0
    fault: str = ""  # "hung" or "spent"; empty without a fault
    was_whole: bool = False
    is_leaving: bool = False
    silent_since: float | None = None
    has_answered: bool = False  # the engine has answered the present operator process
    num_pods: int = 0  # pods whose creation the present operator has seen
    is_drained: bool = False  # the engine was asked to drain
    was_found: bool = False  # clients have reached the engine
    unfound_since: float | None = None
    num_in_flight: int = 0  # requests
    num_finished: int = 0

    @property
    def revision(self):
        return revision_of(self.name)

    @property
    def head(self):
        """The head pod; None if it is missing or being deleted."""
        head = self.pods.get("head")
        return None if head is None or head.ends_at is not None else head

    @property
    def is_routed(self):
        return self.head is not None and self.head.is_routed

    def is_connected(self, lost):
        places = self.pods.values()
        return len(places) == 2 and all(place.node not in lost and place.ends_at is None for place in places)

    def serves(self, t, lost):
        return self.is_connected(lost) and not self.fault and not self.is_leaving and t >= self.serves_at

    def answers(self, lost):
        """True if the engine answers on its admin port."""
        return self.head is not None and self.head.node not in lost and not self.fault

    def is_ready(self, lost):
        """True if the Service may send requests to the engine. During a recovery, requests wait in the engine."""
        return self.answers(lost) and self.was_whole and not self.is_drained

    def be_found(self, t, is_found):
        """Records whether clients find the engine from now on."""
        self.was_found |= is_found
        self.unfound_since = None if is_found or self.is_routed else self.unfound_since or t

    def take_requests(self, t, lost, is_found, are_stuck):
        """Simulates the requests of one second. Connected clients send more requests until the engine drains."""
        if not self.serves(t, lost):
            return
        if is_found and not self.is_drained:
            self.num_in_flight = NUM_REQUESTS
        if self.num_in_flight and not are_stuck:
            self.num_finished += 1
            self.num_in_flight -= self.is_drained

    def group(self, t, lost):
        """The engine replica as the operator observes it, without pods that are being deleted."""
        conditions = [{"type": "RayClusterProvisioned", "status": str(self.was_whole)}]
        if "head" not in self.pods:
            conditions.append({"type": "HeadPodReady", "status": "False", "reason": "HeadPodNotFound"})
        return make_group(
            *(each for each in self.seen_pods(t, lost) if each.grace_s is None),
            name=self.name,
            uid=self.uid,
            reading=self._reading(t, lost),
            is_headless=is_headless({"status": {"conditions": conditions}}),
            num_new_pods=self.num_pods,
        )

    def seen_pods(self, t, lost):
        return [self._pod(kind, t, lost) for kind in self.pods]

    def _pod(self, kind, t, lost):
        place, is_head = self.pods[kind], kind == "head"
        # A pod on a lost node keeps the last state that its kubelet reported.
        is_unready = is_head and (self.fault == "hung" or self.is_drained or not self.was_whole)
        state = crashed(70, "ranks died") if is_head and self.fault == "spent" else UNREADY if is_unready else None
        return pod(
            make_pod_document(
                place.name,
                is_head=is_head,
                node=place.node,
                engine=state,
                route=place.is_routed,
                ready=place.node not in lost and state is None,
                deletion_grace=None if place.ends_at is None else max(place.ends_at - t, 0.0),
                owner=self.uid,
                ip=place.ip,
            )
        )

    def _reading(self, t, lost):
        if self.head is None:
            return None
        if not self.answers(lost):
            self.silent_since = self.silent_since or t
            said = make_said(**self._requests()) if self.has_answered else None
            since = self.silent_since
            return make_reading(said, at=since, failing_since=since, error="no answer", advanced_at=since)
        self.silent_since, self.has_answered = None, True
        serves = self.serves(t, lost)
        state = "serving" if serves else "recovering" if self.was_whole else "starting"
        said = make_said(
            "draining" if self.is_drained else state, token_age=1.0 if serves else None, **self._requests()
        )
        return make_reading(said, at=t, advanced_at=t if serves else self.serves_at - START_S)

    def _requests(self):
        counted = {"finished": self.num_finished, "failed": self.num_finished if self.fails_requests else 0}
        times = {} if self.fails_requests else dict.fromkeys(("0.25", "+Inf"), self.num_finished)
        return counted | {"in_flight": self.num_in_flight, "first_token_seconds": times}

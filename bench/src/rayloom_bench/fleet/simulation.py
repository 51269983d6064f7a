"""Fleet: engines that start, fail and end, and requests that a policy routes to them, in virtual time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rayloom_bench.fleet.arrivals import Arrival
from rayloom_bench.fleet.engine import TOKEN, EngineListener, EngineShape, SimulatedEngine, VirtualClock
from rayloom_bench.fleet.outcome import FinishedRequest, FleetOutcome
from rayloom_bench.fleet.policies import Policy, RoutedRequest
from rayloom_engine.config import BLOCK_SIZE
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core.sequence import Origin, Sequence
from rayloom_engine.protocol.messages import CoreMessage
from rayloom_engine.routing.fairness import HeldRequest, in_turns


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    shape: EngineShape
    num_engines: int
    start_s: float = 30.0  # seconds from the decision to start an engine, or from a failure, until it serves
    mean_s_between_failures: float | None = None  # mean seconds between failures of one engine; None: no engine fails
    resumes: bool = True  # True: requests of a lost engine continue on another engine; False: they are lost
    seed: int = 0


@dataclass(slots=True)
class _Request:
    routed: RoutedRequest
    arrival: Arrival
    prompt_ids: tuple[int, ...]
    num_generated: int = 0
    first_token_s: float = 0.0
    num_resumes: int = 0


@dataclass(slots=True)
class _Member:
    """An engine of the fleet with its unfinished requests."""

    engine: SimulatedEngine
    since_s: float  # time of the decision to start this engine; its accelerators are in use from then on
    requests: dict[str, _Request] = field(default_factory=dict)


class Fleet(EngineListener):
    """One run. The first `num_engines` engines serve from 0 s on."""

    def __init__(self, settings: FleetSettings, policy: Policy, arrivals: Iterable[Arrival]) -> None:
        self._settings = settings
        self._policy = policy
        self._arrivals: Iterator[Arrival] = iter(arrivals)
        self._clock = VirtualClock()
        self._rng = random.Random(f"failures/{settings.seed}")  # nosec: not for secrets
        self._members: dict[str, _Member] = {}
        self._held: dict[str, _Request] = {}
        self._names = itertools.count()
        self._num_requests = 0
        self._num_unfinished = 0
        self._has_arrived = False  # True after the last arrival
        self._finished: list[FinishedRequest] = []
        self._num_lost = 0
        self._num_failures = 0
        self._engine_s = 0.0
        self._queries = self._hits = 0

    def run(self, name: str = "") -> FleetOutcome:
        """Handles all events until every request has ended."""
        for _ in range(self._settings.num_engines):
            self._serve(self._add())
        self._next_arrival()
        num_events = 0
        while not (self._has_arrived and self._num_unfinished == 0) and self._clock.handle_next():
            num_events += 1
        for member in list(self._members.values()):
            self._remove(member)
        return FleetOutcome(
            policy=name,
            finished=tuple(self._finished),
            num_lost=self._num_lost + len(self._held),
            span_s=self._clock.now_s,
            engine_hours=self._engine_s / 3600,
            num_failures=self._num_failures,
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            num_events=num_events,
        )

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is None:
            self._has_arrived = True
            return
        self._clock.at(arrival.at_s, lambda: self._arrive(arrival))

    def _arrive(self, arrival: Arrival) -> None:
        self._num_requests += 1
        self._num_unfinished += 1
        room = self._settings.shape.max_model_len
        prompt_ids = arrival.prompt_ids()[: room - 1]
        routed = RoutedRequest(f"{self._num_requests}", arrival.tenant, prompt_ids, BLOCK_SIZE)
        self._send(_Request(routed, arrival, prompt_ids))
        self._next_arrival()

    def _send(self, request: _Request) -> None:
        """Sends a request to an engine. If no engine serves, holds the request until one does."""
        routed = request.routed
        name = self._policy.pick(routed)
        if name is None:
            self._held[routed.request_id] = request
            return
        member = self._members[name]
        member.requests[routed.request_id] = request
        self._policy.sent(name, routed)
        sequence = Sequence(
            request_id=routed.request_id,
            prompt_ids=request.prompt_ids,
            generated_ids=(TOKEN,) * request.num_generated,
            params=DecodingParams(max_tokens=request.arrival.num_output, temperature=0.0, ignore_eos=True),
            origin=Origin(arrival=request.arrival.at_s, tenant=routed.tenant),
        )
        member.engine.submit(sequence)

    # Messages of engines.

    def outputs(self, engine: str, outputs: list[SequenceOutput]) -> None:
        member = self._members[engine]
        now_s = self._clock.now_s
        for output in outputs:
            request = member.requests[output.sequence_id]
            if not request.num_generated:
                request.first_token_s = now_s
            request.num_generated += 1
            self._policy.has_token(engine, output.sequence_id)
            if output.finish_reason is not None:
                del member.requests[output.sequence_id]
                self._policy.ended(engine, output.sequence_id)
                self._finish(request)

    def refused(self, engine: str, sequence_id: str) -> None:
        del self._members[engine].requests[sequence_id]
        self._policy.ended(engine, sequence_id)
        self._num_lost += 1
        self._num_unfinished -= 1

    def report(self, engine: str, message: CoreMessage) -> bool:
        return self._policy.receive(engine, message)

    def _finish(self, request: _Request) -> None:
        num = request.num_generated
        self._num_unfinished -= 1
        self._finished.append(
            FinishedRequest(
                ttft_s=request.first_token_s - request.arrival.at_s,
                itl_s=(self._clock.now_s - request.first_token_s) / (num - 1) if num > 1 else 0.0,
                num_output=num,
                num_resumes=request.num_resumes,
            )
        )

    # Engines start, fail and end.

    def _add(self) -> _Member:
        name = f"engine-{next(self._names)}"
        engine = SimulatedEngine(name, self._settings.shape, self._clock, self)
        self._members[name] = _Member(engine, self._clock.now_s)
        return self._members[name]

    def _serve(self, member: _Member) -> None:
        self._policy.added(member.engine.name)
        if self._policy.wants_reports:
            member.engine.subscribe()
        if self._settings.mean_s_between_failures is not None:
            seconds = self._rng.expovariate(1 / self._settings.mean_s_between_failures)
            self._clock.after(seconds, lambda: self._fail(member))
        held, self._held = self._held, {}
        requests = [
            HeldRequest(request_id=name, tenant=each.routed.tenant, arrival=each.arrival.at_s)
            for name, each in held.items()
        ]
        for request in in_turns(requests, self._num_unfinished_of()):
            self._send(held[request.request_id])

    def _fail(self, member: _Member) -> None:
        """Ends an engine and starts another engine in its place. The lost engine's KV cache is gone."""
        if member.engine.is_lost:
            return
        self._num_failures += 1
        requests = list(member.requests.values())
        self._remove(member)
        self._start()
        for request in requests:
            if self._settings.resumes:
                request.num_resumes += 1
                request.routed = RoutedRequest(
                    request.routed.request_id,
                    request.routed.tenant,
                    (*request.prompt_ids, *(TOKEN,) * request.num_generated),
                    BLOCK_SIZE,
                )
                self._send(request)
            else:
                self._num_lost += 1
                self._num_unfinished -= 1

    def _start(self) -> None:
        member = self._add()
        self._clock.after(self._settings.start_s, lambda: self._serve(member))

    def _remove(self, member: _Member) -> None:
        del self._members[member.engine.name]
        self._policy.removed(member.engine.name)
        member.engine.lose()
        self._engine_s += self._clock.now_s - member.since_s
        counters = member.engine.engine.scheduler.counters
        self._queries += counters.prefix_queries
        self._hits += counters.prefix_hits

    def _num_unfinished_of(self) -> dict[str, int]:
        """Tenant -> number of its sequences on all engines."""
        nums: dict[str, int] = {}
        for member in self._members.values():
            for request in member.requests.values():
                nums[request.routed.tenant] = nums.get(request.routed.tenant, 0) + 1
        return nums

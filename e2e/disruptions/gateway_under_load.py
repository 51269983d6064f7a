"""Disturbs a service with gateways while clients receive streams of every kind, and reports the effects on the clients.

The rules: Clients do not retry. New requests arrive from the disturbance on, until it is over. The disturbance happens
when every stream has at least 12 tokens and none has more than half of its tokens. Weights are float32. A request has
failed in each of these cases: an HTTP error, an error event, no [DONE], an answer that differs from the undisturbed
answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clients.mixed_load import LATE_TOKENS, NUM_REQUESTS, Load
from clients.service import READY_SECONDS, Service
from disruptions.running_load import running_load
from observers.timeline import Timeline

STRIKE_AT = 6  # early, because a fault takes the time of up to 100 further tokens to happen on a busy machine
NUM_STEADY = 3  # number of parallel streams that arrive during the disturbance
HEADER = (
    "| disturbance | longest pause of a stream, s | before it | first token, s | over after, s | streams | repeated |"
    " failed |",
    "|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    stream: dict[str, Any]  # report of load_agent.py
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRecord:
    what: str
    streams: list[dict[str, Any]]
    failures: list[Failure]
    timeline: Timeline
    over_at: float  # Unix time

    @property
    def pause_s(self) -> float:
        """The longest time between two tokens of a stream after the beginning of the disturbance."""
        return max(_longest(each["times"], self.timeline.began_at) for each in self.streams)

    @property
    def usual_pause_s(self) -> float:
        """The longest time between two tokens of a stream before the disturbance."""
        began = self.timeline.began_at
        before = [[at for at in each["times"] if at < began] for each in self.streams]
        return max(_longest(times, times[0]) for times in before if times)

    @property
    def first_token_s(self) -> float:
        """The longest time to the first token among the requests that were sent after the disturbance."""
        late = [each for each in self.streams if each["is_late"] and each["times"]]
        return max(float(each["times"][0] - each["began"]) for each in late)

    @property
    def repeated(self) -> list[dict[str, Any]]:
        """The streams that a client repeated because its connection broke."""
        return [each for each in self.streams if each["broken"]]

    def row(self) -> str:
        over_s = self.timeline.seconds(self.over_at)
        seconds = (self.pause_s, self.usual_pause_s, self.first_token_s, over_s)
        numbers = (len(self.streams), len(self.repeated), len(self.failures))
        return "| " + " | ".join((self.what, *(f"{each:.1f}" for each in seconds), *map(str, numbers))) + " |"


def disturb_gateway(
    service: Service,
    load: Load,
    what: str,
    strike: Callable[[], object],
    *,
    is_over: Callable[[], bool],
    seconds: float = READY_SECONDS,
    **more: Any,
) -> GatewayRecord:
    """Calls `strike` while streams run, by the rules above. `more`: further settings of LoadAgent."""
    settings: dict[str, Any] = {"requests": load.requests(), "late_requests": load.requests(LATE_TOKENS)}
    settings |= {"urls": [service.url] * NUM_REQUESTS, "steady": NUM_STEADY, "late_every_s": 0.2} | more
    with Timeline(service) as timeline, running_load(service, strike_at=STRIKE_AT, **settings) as running:
        running.strike(timeline, what, strike)
        over_at = running.wait(timeline, is_over, seconds)
    streams, had_tokens = running.records["streams"], running.records["had"]
    asked = [each["body"]["max_tokens"] for each in settings["requests"]]
    sizes = [num_tokens * len(choices) for num_tokens, choices in zip(asked, load.answers, strict=True)]
    late = [had for had, size in zip(had_tokens, sizes, strict=True) if had > size // 2]
    assert not late, f"the disturbance came too late: {had_tokens} of {sizes}"
    timeline.note(timeline.began_at, "client", f"streams had {had_tokens} tokens of {sizes}")
    failures = [Failure(stream=each, what=problem) for each in streams if (problem := load.problem_of(each))]
    return GatewayRecord(what=what, streams=streams, failures=failures, timeline=timeline, over_at=over_at)


def _longest(times: list[float], since: float) -> float:
    """The longest time between two consecutive tokens, if the second token arrived after `since`."""
    pairs = itertools.pairwise(times)
    return max((later - earlier for earlier, later in pairs if later > since), default=0.0)

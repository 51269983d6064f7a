"""The load of a service: the number of fully used engines that the service's tokens need. Pure.

    load of an engine = seconds that its queue takes / seconds that the queue may take
                      + tokens in its KV cache / tokens that the KV cache or the slots can hold

The first part is about prompts, the second part is about running sequences. Each part is 1 for a fully used engine, so
the sum over all engines is a number of engines. The engines measure the rates themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayloom_operator.api.autoscaling.state import ScalingInputs

# The mean wait in a queue may take only this share of the goal. Waits differ: the longest of ten waits is about twice
# the mean.
_QUEUE_SHARE = 0.5
# An engine is full if it uses at least this share of its slots or KV cache. In a full engine, a waiting sequence gets a
# slot only when a running sequence ends.
_FULL = 0.95
_MOST_ENGINES = 99_999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The load that an engine reported. `is_known` is False if its last report is missing or old."""

    is_known: bool
    # Requests at the engine's own API port that are not answered in full. `Held.in_flight` counts only requests at
    # gateways.
    in_flight: int = 0
    had_requests: bool = False  # requests ended since the last reconcile, or this is the first reconcile
    queued_tokens: int = 0
    num_waiting: int = 0  # waiting sequences
    running_tokens: int = 0
    max_running_tokens: int = 0
    mean_output_tokens: float = 0.0
    prefill_per_s: float | None = None  # prompt tokens a second; None before the engine has measured it
    decode_per_s: float | None = None

    @property
    def running_share(self) -> float:
        return self.running_tokens / self.max_running_tokens if self.max_running_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The requests in the gateways of a service. The defaults are for a service whose gateways are not polled."""

    tokens: int = 0  # tokens of sequences that no engine has accepted yet
    requests: int = 0  # number of these sequences
    in_flight: int = 0  # all requests that are not answered in full, held or running
    is_complete: bool = True  # every gateway pod that the spec asks for is ready and has answered recently
    had_requests: bool = False  # requests ended since the last reconcile, or this is the first reconcile
    num_blind: int = 0  # number of gateway pods that have no tokenizer, or are ready and do not answer

    @property
    def wakes(self) -> bool:
        """Returns whether a service without engines needs an engine."""
        return bool(self.requests or self.tokens or self.num_blind)

    @property
    def is_idle(self) -> bool:
        return self.is_complete and not (self.in_flight or self.had_requests or self.wakes)


NOTHING_HELD = Held()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    engines: float  # number of fully used engines that the load needs
    queue: float  # the part of `engines` for waiting tokens; inversely proportional to the goal
    is_complete: bool  # every engine reported its load, and if tokens wait, a rate is known
    is_idle: bool  # `is_complete` holds, and no request waits, runs, is held or has ended since the last reconcile
    inputs: ScalingInputs


def load_of(engines: Sequence[EngineLoad], held: Held, ttft_s: float, earlier_per_s: float = 0.0) -> ServiceLoad:
    """Returns the load of all engines together.

    `ttft_s`: the seconds within which a request should have its first token. `earlier_per_s`: the earlier rate of one
    engine, in prompt tokens per second. `earlier_per_s` is used while no engine has measured a rate.
    """
    known = [each for each in engines if each.is_known]
    rates = [each.prefill_per_s for each in known if each.prefill_per_s]
    # An engine that has not measured its rate is assumed to have the mean rate of the other engines.
    usual_per_s = sum(rates) / len(rates) if rates else earlier_per_s
    queued = sum(each.queued_tokens for each in known)
    running = sum(each.running_tokens for each in known)
    seconds = sum(_queue_s(each, usual_per_s) for each in known)
    if usual_per_s:
        seconds += held.tokens / usual_per_s
    # The limit is needed because an engine may report a rate so low that the quotient is infinite.
    queue = min(seconds / (_QUEUE_SHARE * ttft_s), _MOST_ENGINES)
    number = min(queue + sum(each.running_share for each in known), _MOST_ENGINES)
    is_used = any(each.in_flight or each.had_requests or each.num_waiting for each in known)
    is_complete = len(known) == len(engines) and (bool(usual_per_s) or not queued + held.tokens)
    return ServiceLoad(
        engines=number,
        queue=queue,
        is_complete=is_complete,
        is_idle=is_complete and held.is_idle and not (queued or running or is_used),
        inputs=ScalingInputs(
            engines=len(known),
            queued_tokens=queued,
            running_tokens=running,
            held_tokens=held.tokens,
            held_requests=held.requests,
            tokens_per_second=round(sum(rates) if rates else earlier_per_s),
            needed_engines=f"{number:.2f}",
        ),
    )


def _queue_s(engine: EngineLoad, usual_per_s: float) -> float:
    """Returns the seconds until every waiting sequence of the engine has its first token."""
    per_s = engine.prefill_per_s or usual_per_s
    seconds = engine.queued_tokens / per_s if per_s else 0.0
    if engine.running_share >= _FULL and engine.decode_per_s:
        seconds += engine.num_waiting * engine.mean_output_tokens / engine.decode_per_s
    return seconds

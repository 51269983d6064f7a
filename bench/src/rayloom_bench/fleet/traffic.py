"""Traffic: requests at random, with the distributions of production traces. Pure: equal seeds give equal requests.

Gaps between arrivals have a Gamma distribution, and lengths a lognormal distribution, cut at the trace's limits. Input
and output lengths are drawn independently, because their correlation in the traces is between -0.11 and 0.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from rayloom_bench.fleet.arrivals import Arrival, Segment

_NUM_REMEMBERED = 8192  # number of latest prompts that a later request may continue
_NUM_CANDIDATES = 48  # number of prompts of about the wanted age; the one with the best length is chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lognormal numbers of tokens, within limits."""

    mu: float
    sigma: float
    least: int = 1
    most: int

    def draw(self, rng: random.Random) -> int:
        return min(max(self.least, round(rng.lognormvariate(self.mu, self.sigma))), self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Distributions of requests. `source`: the trace to which they are fitted."""

    source: str
    rate: float  # requests a second in the trace
    gamma_shape: float  # shape of the distribution of gaps between arrivals: 1 = Poisson, less = in bursts
    inputs: Lengths
    outputs: Lengths
    num_common: int = 0  # tokens at the beginning of every prompt
    continued: float = 0.0  # share of requests that continue an earlier prompt
    continued_part: float = 0.8  # share of a continuing prompt that is a copy of the earlier prompt
    ages: tuple[float, float] = (0.0, 0.0)  # seconds since the earlier prompt: median, deviation of the logarithm


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Each request begins with one of `num_prefixes` prefixes, drawn by Zipf's law with exponent 1.

    The request's own question follows the prefix.
    """

    num_prefixes: int = 24
    num_prefix_tokens: int = 1024
    num_own: int = 32
    num_output: int = 32
    rate: float = 4.0  # Poisson


AZURE = "Azure Public Dataset, AzureLLMInferenceTrace 2023 (CC-BY 4.0)"
MOONCAKE = "Mooncake, FAST '25 release (Apache-2.0)"
# The parameters were measured from the traces: means and deviations of the logarithms, and the coefficient of variation
# of the gaps.
TRAFFIC = {
    "chat": Traffic(
        source=f"{AZURE}, conversation",
        rate=5.5,
        gamma_shape=0.835,
        inputs=Lengths(mu=6.63, sigma=0.99, most=4096),
        outputs=Lengths(mu=5.02, sigma=0.86, most=1000),
    ),
    "code": Traffic(
        source=f"{AZURE}, code",
        rate=2.6,
        gamma_shape=0.006,
        inputs=Lengths(mu=7.00, sigma=1.36, most=7437),
        outputs=Lengths(mu=2.79, sigma=0.85, most=1000),
    ),
    "long-chat": Traffic(
        source=f"{MOONCAKE}, conversation",
        rate=3.4,
        gamma_shape=0.11,
        inputs=Lengths(mu=8.74, sigma=1.20, least=513, most=126_000),
        outputs=Lengths(mu=5.34, sigma=1.36, most=2000),
        num_common=512,
        # In the trace 39 % of the requests reuse more than the common block. Most of these requests are long. Here
        # requests of all lengths continue a prompt, so 39 % would reuse too few tokens. With 47 %, 36.6 % of the tokens
        # are reused, as in the trace.
        continued=0.47,
        ages=(123.0, 0.95),
    ),
}


def generate(traffic: Traffic, *, rate: float, seconds: float, divisor: float, seed: int) -> Iterator[Arrival]:
    """Yields the requests of `seconds` seconds, `rate` a second on average.

    All lengths are divided by `divisor`, so that they fit a model with a smaller context than the trace's.
    """
    rng = random.Random(f"{traffic.source}/{seed}")  # nosec: not for secrets; a string seed is portable
    texts = itertools.count(1)
    earlier: list[tuple[float, tuple[Segment, ...]]] = []  # (time of arrival, prompt), oldest first
    common: tuple[Segment, ...] = ()
    if traffic.num_common:
        common = (Segment(0, round(traffic.num_common / divisor)),)
    num_common = _num_tokens(common)
    at_s = rng.gammavariate(traffic.gamma_shape, 1 / (traffic.gamma_shape * rate))
    while at_s < seconds:
        num_input = max(num_common + 1, round(traffic.inputs.draw(rng) / divisor))
        beginning: tuple[Segment, ...] = common
        if earlier and rng.random() < traffic.continued:
            wanted_s = at_s - rng.lognormvariate(math.log(traffic.ages[0]), traffic.ages[1])
            beginning = _continued(earlier, wanted_s, round(traffic.continued_part * num_input))
        num_left = num_input - _num_tokens(beginning)
        prompt = (*beginning, Segment(next(texts), num_left))
        yield Arrival(at_s=at_s, prompt=prompt, num_output=max(1, round(traffic.outputs.draw(rng) / divisor)))
        if traffic.continued:
            earlier.append((at_s, prompt))
            if len(earlier) == 2 * _NUM_REMEMBERED:
                del earlier[:_NUM_REMEMBERED]
        at_s += rng.gammavariate(traffic.gamma_shape, 1 / (traffic.gamma_shape * rate))


def generate_shared(prefixes: SharedPrefixes, *, num_requests: int, seed: int) -> Iterator[Arrival]:
    """Yields requests with shared prefixes."""
    rng = random.Random(f"shared prefixes/{seed}")  # nosec: not for secrets; a string seed is portable
    weights = [1 / (place + 1) for place in range(prefixes.num_prefixes)]
    at_s = 0.0
    for number in range(num_requests):
        at_s += rng.expovariate(prefixes.rate)
        (prefix,) = rng.choices(range(prefixes.num_prefixes), weights)
        own = Segment(prefixes.num_prefixes + number, prefixes.num_own)
        yield Arrival(
            at_s=at_s, prompt=(Segment(prefix, prefixes.num_prefix_tokens), own), num_output=prefixes.num_output
        )


def _continued(
    earlier: list[tuple[float, tuple[Segment, ...]]], wanted_s: float, num_tokens: int
) -> tuple[Segment, ...]:
    """The first `num_tokens` tokens of an earlier prompt, or the whole prompt if it has fewer.

    Of the prompts that arrived at about `wanted_s`, chooses the prompt with the length nearest to `num_tokens`.
    """
    place = bisect.bisect(earlier, wanted_s, key=lambda item: item[0])
    first = max(0, min(place - _NUM_CANDIDATES // 2, len(earlier) - _NUM_CANDIDATES))
    candidates = [prompt for _, prompt in earlier[first : first + _NUM_CANDIDATES]]
    return _cut(min(candidates, key=lambda prompt: abs(_num_tokens(prompt) - num_tokens)), num_tokens)


def _num_tokens(prompt: tuple[Segment, ...]) -> int:
    return sum(segment.num_tokens for segment in prompt)


def _cut(prompt: tuple[Segment, ...], num_tokens: int) -> tuple[Segment, ...]:
    """The first `num_tokens` tokens of a prompt, or the whole prompt if it has fewer."""
    kept = []
    for segment in prompt:
        num = min(segment.num_tokens, num_tokens)
        num_tokens -= num
        if num:
            kept.append(Segment(segment.text, num))
    return tuple(kept)

"""Random histories of a scheduler: what arrives and when. test_scheduler_properties.py runs them."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from rayloom_engine.core.decoding import ThinkingBudget
from rt_scheduler import POISON

# Prompts are drawn from two letters, so that shared prefixes are common.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=20).map(tuple)

# Measured seconds of a draft token, of a pass of the draft model, and of a prompt's token in the draft model, where a
# decode takes 1 s: drafts pay, each of these costs is too high, and only the first cost is known.
DRAFT_COSTS = ((0.05, 0.1, 0.01), (2.0, 0.1, 0.01), (0.05, 2.0, 0.01), (0.05, 0.1, 50.0), (0.05, None, None))

THINKING = ThinkingBudget(num_tokens=1, start="", ends=("x",), end_ids=(1,))


@dataclass(frozen=True)
class Arrival:
    prompt: tuple[int, ...]  # one object for all forks, so that the ranks get the prompt once
    max_tokens: int
    tenant: str
    priority: int
    at_step: int
    abort_after: int | None  # steps after arrival
    num_forks: int
    num_generated: int  # more than 0 in a resume
    salt: bytes = b""
    has_prompt_logprobs: bool = False
    # The number of steps for which masks are not ready. If the number is odd, the sequence has a grammar. If it is even
    # and not 0, the sequence has a thinking budget.
    build_steps: int = 0
    poison_at: int | None = None  # the token at this position, modulo the prompt's length, gives NaN

    def prompt_ids(self) -> tuple[int, ...]:
        if self.poison_at is None:
            return self.prompt
        place = self.poison_at % len(self.prompt)
        return (*self.prompt[:place], POISON, *self.prompt[place + 1 :])


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        tenant=st.sampled_from(("", "x", "y")),
        priority=st.integers(0, 2),
        at_step=st.integers(0, 12),
        abort_after=st.one_of(st.none(), st.integers(0, 8)),
        num_forks=st.integers(0, 3),
        num_generated=st.integers(0, 3),
        salt=st.sampled_from((b"", b"", b"salt")),
        has_prompt_logprobs=st.integers(0, 3).map(lambda number: number == 3),
        build_steps=st.one_of(st.just(0), st.integers(1, 9)),
        poison_at=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 19)),
    ),
    min_size=1,
    max_size=8,
)


def simple_arrival(
    prompt: tuple[int, ...],
    max_tokens: int,
    at_step: int,
    num_forks: int = 0,
    num_generated: int = 0,
    build_steps: int = 0,
) -> Arrival:
    return Arrival(
        prompt=prompt,
        max_tokens=max_tokens,
        tenant="",
        priority=0,
        at_step=at_step,
        abort_after=None,
        num_forks=num_forks,
        num_generated=num_generated,
        build_steps=build_steps,
    )


def history(**given: object) -> dict[str, object]:
    """The arguments of the test of random histories: those given, and for all others values without an effect."""
    usual: dict[str, object] = {
        "depth": 1,
        "num_ahead": 0,
        "window": None,
        "collects": [False],
        "trials": [None],
        "losses": set(),
        "keeps_memory": False,
        "token_s": None,
        "num_kept": None,
        "guesses": None,
        "num_guesses": 1,
        "late_masks": False,
        "draft_costs": None,
        "withholds": False,
        "num_host_slots": 0,
        "keeps_host_memory": True,
    }
    return {**usual, **given}

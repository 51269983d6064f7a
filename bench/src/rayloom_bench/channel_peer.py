"""The rank's side of `bench channel`: answers every step plan at once, as a process or as the body of a Ray actor."""

from __future__ import annotations

import os
import sys
from typing import Literal

from rayloom_engine.core.step import SampledToken, StepResult
from rayloom_engine.protocol.channel import ChannelClosed, dial
from rayloom_engine.protocol.ranks import Computed, Greeting, Run

TOKEN_VARIABLE = "RAYLOOM_BENCH_TOKEN"


def answer(order: Run) -> Computed:
    """Returns a result like that of a real step: one token for each slot that samples."""
    sampled = tuple(SampledToken(step.slot, 11 + step.slot) for step in order.plan.slots if step.samples)
    result = StepResult(
        step_id=order.plan.step_id, epoch=order.plan.epoch, sampled=sampled, forward_s=0.0123, sample_s=0.0012
    )
    return Computed(order.ticket, result)


def main(address: str, role: Literal["steps", "control"]) -> None:
    """Answers until the peer closes the channel: through shared memory for the role `steps`, over TCP for `control`."""
    channel, _ = dial(address, os.environ[TOKEN_VARIABLE], Greeting(role=role, proof=""))
    try:
        while True:
            channel.send(answer(channel.expect(Run)))
    except ChannelClosed:
        channel.close()


if __name__ == "__main__":
    main(sys.argv[1], "steps" if sys.argv[2] == "steps" else "control")

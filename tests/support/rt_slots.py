"""Slots for tests of a rank."""

from __future__ import annotations

from collections.abc import Sequence

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import NewSlot
from rayloom_engine.worker.slots import Slot


def make_slot(
    prompt: Sequence[int] = (1, 2), generated: Sequence[int] = (), eos: tuple[int, ...] = (), **params
) -> Slot:
    params.setdefault("max_tokens", 10)
    return Slot(
        NewSlot(
            slot=0,
            request_id="a",
            token_ids=(*prompt, *generated),
            num_prompt_tokens=len(prompt),
            block_table=(0,),
            params=DecodingParams(**params),
            eos_token_ids=eos,
        )
    )

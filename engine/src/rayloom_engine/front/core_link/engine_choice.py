"""Decides which engines may compute a sequence, and chooses one of them. Only reads the state of the links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rayloom_engine.front.core_link.engine_link import EngineLink
from rayloom_engine.front.core_link.sequences import ClientSequence
from rayloom_engine.protocol.fingerprint import Fingerprint, continuation
from rayloom_engine.routing.router import choose

SUSPECT_AFTER_S = 3.0  # seconds without a status, see `is_usable`; a core sends a status every second
# A sequence whose engine was lost this often in a row, without a token in between, may be the cause of the losses. From
# then on, only its last engine gets the sequence. This engine can find out whether the request is poisonous
# (core/suspicion.py), and the other engines survive.
LOSSES_UNTIL_PINNED = 2
# for this many seconds after a loss, only the last engine may get the sequence; then other engines may get it, too
PINNED_S = 30.0
MOST_LOSSES = 6
MOST_CORRUPT = 3  # a NaN or an infinity on this number of engines ends a sequence: its request may be the cause
# Seconds for which an engine that replaces lost ranks keeps its sequences. After that, other engines replay them,
# because a rank that has to start in a new pod takes minutes.
REBUILD_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRules:
    """Rules for the use of engines. The defaults are for the front inside an engine, which uses this engine alone."""

    is_gateway: bool = False  # engines come and go, and another engine may continue a sequence
    hold_s: float = math.inf  # the most seconds that a sequence waits for an engine
    max_held: float = math.inf  # the most sequences that may wait for an engine
    max_held_tokens: float = math.inf  # the most tokens of all sequences that wait for an engine
    silence_s: float | None = None  # seconds of silence after which an engine counts as lost


def is_usable(link: EngineLink, rules: PoolRules) -> bool:
    """True if the engine may be given sequences.

    Inside an engine, the front uses its only engine even while this engine starts. A gateway gives no sequences to an
    engine that has sent no status for SUSPECT_AFTER_S: the engine may be lost.
    """
    if not rules.is_gateway:
        return link.is_connected
    is_open = link.is_serving and not link.is_draining and not link.is_leaving
    return link.is_connected and is_open and link.status_age_s <= SUSPECT_AFTER_S


def can_compute(link: EngineLink, sequence: ClientSequence, model: Fingerprint | None, now_s: float) -> bool:
    """True if a usable engine of a gateway may be given this sequence. `model`: the model of the prompt's tokenizer."""
    place = sequence.place
    if link.name in place.refused_by or link.name in place.corrupt_by or link.name in place.no_adapter_on:
        return False
    is_pinned = place.num_losses >= LOSSES_UNTIL_PINNED and now_s - place.last_loss_s < PINNED_S
    if is_pinned and link.name != place.last_engine:
        return False
    if continuation(place.fingerprint or model, link.fingerprint) == "other model":
        return False
    if sequence.embeds is not None and sequence.embeds.width != link.hidden_size:
        return False
    return link.max_model_len is None or sequence.most_tokens <= link.max_model_len


def unlike_corrupt(links: list[EngineLink], sequence: ClientSequence) -> list[EngineLink]:
    """Returns the engines of `links` whose fingerprint no broken engine has.

    An engine is broken if it computed a NaN or an infinity for `sequence`. A mistake in a release breaks all engines
    with the same fingerprint. Damaged weights break a single engine. If each of `links` has the fingerprint of a broken
    engine, returns all `links`.
    """
    corrupt = sequence.place.corrupt_by.values()
    return [link for link in links if link.fingerprint not in corrupt] or links


def is_current(link: EngineLink, sequence: ClientSequence, attempt: int) -> bool:
    """The fence: True if a message about `sequence` is from its present engine and about its present attempt."""
    return sequence.place.engine == link.name and sequence.place.attempt == attempt


def chosen_engine(links: Sequence[EngineLink], sequence: ClientSequence) -> str | None:
    """Returns the name of the engine in `links` that shall compute `sequence`; None if `links` is empty.

    The caller has checked that all engines in `links` can compute the sequence.

    All engines are compared with the same decode cost, the mean of their measured costs. Their own costs are not
    compared, because measurements on equal engines differ by chance. An engine that reports no cost counts with a cost
    of 1.
    """
    blocks = sequence.blocks(next((size for link in links if (size := link.estimate.index.block_size)), 0))
    return choose(
        [
            link.estimate.view(sequence.tenant, sequence.num_tokens, blocks.of_size(link.estimate.index.block_size))
            for link in links
        ],
        prompt_tokens=sequence.num_tokens,
        decode_token_cost=sum(link.estimate.load.decode_token_cost for link in links) / len(links),
        tie_key=blocks.tie_key,
    )

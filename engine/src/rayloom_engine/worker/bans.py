"""Bans: the tokens of a slot that cannot be chosen next because of min_tokens, bad_words or allowed_token_ids.

Bans never leave a slot without a token. If the bans together cover all tokens, only allowed_token_ids applies. If they
cover all tokens and allowed_token_ids is not set, no token is banned.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rayloom_engine.worker.slots import Slot
from rayloom_engine.worker.thinking import mask_of

Ids = npt.NDArray[np.int64]


def all_banned_ids(slot: Slot, vocab_size: int) -> Ids | None:
    """Returns the ids of banned tokens; an id may occur twice. None if every token may be chosen.

    Samplers do not need these ids for a slot with a mask: `mask_slot` has removed the banned tokens from the mask.
    """
    allowed = slot.params.allowed_token_ids
    banned = {token_id for token_id in slot.banned_ids if token_id < vocab_size}
    if allowed is None:
        if not 0 < len(banned) < vocab_size:
            return None
        return np.array(list(banned), dtype=np.int64)
    others = _other_ids(slot, vocab_size)
    if not banned or banned.issuperset(allowed):
        return others
    both: Ids = np.concatenate([others, np.array(list(banned), dtype=np.int64)])
    return both


def mask_slot(slot: Slot, vocab_size: int) -> None:
    """Sets the slot's mask: the tokens that the form allows, without banned tokens.

    If thinking forces a token, the mask allows only this token, even if it is a banned token. With no form and no
    forced token, the slot has no mask. It also has no mask if GrammarFault is raised.
    """
    slot.allowed = None
    forced = None if slot.thinking is None else slot.thinking.forced()
    if forced is not None:
        slot.allowed = mask_of(forced, vocab_size)
        return
    if slot.form is None:
        return
    banned = all_banned_ids(slot, vocab_size)
    slot.allowed = slot.form.allowed(() if banned is None else banned)


def _other_ids(slot: Slot, vocab_size: int) -> Ids:
    """Returns all ids except those of allowed_token_ids. The first call for a slot computes them."""
    if slot.other_ids is None:
        is_other_V = np.ones(vocab_size, dtype=np.bool_)
        is_other_V[list(slot.params.allowed_token_ids or ())] = False
        slot.other_ids = np.flatnonzero(is_other_V).astype(np.int64)
    return slot.other_ids

"""Limits that count all choices of a request together."""

from __future__ import annotations

from rayloom_engine.errors import RequestError
from rayloom_engine.sampling_params import SamplingParams

MAX_ALLOWED_IDS = 2**19  # entries; the core and the ranks get a copy for each choice


def check_num_allowed_ids(num_prompts: int, params: SamplingParams) -> None:
    """Raises RequestError if all choices together would have more than MAX_ALLOWED_IDS entries in allowed_token_ids."""
    assert isinstance(params.allowed_token_ids, tuple | None)
    num_choices = num_prompts * params.n
    num_ids = len(params.allowed_token_ids or ())
    if num_ids * num_choices > MAX_ALLOWED_IDS:
        raise RequestError(
            f"allowed_token_ids has {num_ids} ids for each of {num_choices} choices, {num_ids * num_choices} in all, "
            f"at most {MAX_ALLOWED_IDS} are allowed; lower n, send fewer prompts or allow fewer tokens",
            "allowed_token_ids",
        )

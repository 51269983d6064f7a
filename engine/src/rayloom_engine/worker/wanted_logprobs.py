"""The log-probabilities of tokens that a request names with `logprob_token_ids`."""

from __future__ import annotations

from rayloom_engine.core.step import TokenLogprobs


def with_tokens(entry: TokenLogprobs, token_ids: tuple[int, ...], logits: list[float]) -> TokenLogprobs:
    """Returns `entry` with other alternatives: its own token first, then `token_ids`, in their order.

    `logits`: the logit of the entry's own token, then those of `token_ids`.
    """
    own, *of_others = logits
    log_sum = own - entry.logprob
    others = zip(token_ids, of_others, strict=True)
    top = ((token_id, logit - log_sum) for token_id, logit in others if token_id != entry.token_id)
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, ((entry.token_id, entry.logprob), *top))

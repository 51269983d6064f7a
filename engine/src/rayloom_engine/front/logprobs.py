"""Log-probabilities in the three shapes that clients expect: chat, completions, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity; vLLM uses the same number


class LogprobWriter:
    """Writes logprobs with a tokenizer's words. `as_ids` writes tokens as "token_id:N", which is never ambiguous."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The `logprobs` object of a chat choice."""
        content = []
        for entry in entries:
            item = self._chat_item(entry.token_id, entry.logprob)
            item["top_logprobs"] = [self._chat_item(token_id, logprob) for token_id, logprob in entry.top]
            content.append(item)
        return {"content": content, "refusal": None}

    def completion(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offset: int
    ) -> tuple[dict[str, Any], int]:
        """The `logprobs` object of a completion choice, and the text offset after it.

        An entry is None for a prompt's first token. `offset` is where the first token begins in the choice's text, and
        negative by the length of the tokens in front that the text lacks; these are written as 0.
        """
        tokens, values, tops, offsets = [], [], [], []
        for token_id, entry in zip(token_ids, entries, strict=True):
            tokens.append(self.name(token_id))
            offsets.append(max(offset, 0))
            offset += len(self._tokenizer.token_text(token_id))
            values.append(None if entry is None else max(entry.logprob, LOWEST))
            tops.append(None if entry is None else self._top(entry))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset

    def prompt(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
        """vLLM's prompt_logprobs: None for the first token, then token id -> logprob, rank and text."""
        documents: list[dict[str, Any] | None] = [None]
        for entry in entries:
            # The prompt's own token comes first, as in vLLM: there are clients that read no further.
            ranked = [(entry.token_id, entry.logprob, entry.rank)]
            ranked += [
                (token_id, logprob, rank)
                for rank, (token_id, logprob) in enumerate(entry.top, start=1)
                if token_id != entry.token_id
            ]
            documents.append(
                {
                    str(token_id): {
                        "logprob": max(logprob, LOWEST),
                        "rank": rank,
                        "decoded_token": self._tokenizer.token_text(token_id),
                    }
                    for token_id, logprob, rank in ranked
                }
            )
        return documents

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        # As in vLLM the token itself comes first; it is there too when it is not among the most likely.
        top = {self.name(entry.token_id): max(entry.logprob, LOWEST)}
        for token_id, logprob in entry.top:
            top.setdefault(self.name(token_id), max(logprob, LOWEST))
        return top

    def _chat_item(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.name(token_id),
            "logprob": max(logprob, LOWEST),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

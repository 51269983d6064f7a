"""Log-probabilities in the three JSON formats that clients expect: chat, completions, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.front.http.json_pieces import LazyList, lazy
from rayloom_engine.text.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON lacks; vLLM uses the same number


class LogprobWriter:
    """Writes log-probabilities, naming tokens by their text.

    `as_ids` names tokens "token_id:N" instead, which is never ambiguous.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Returns the `logprobs` object of a chat choice."""
        return {"content": lazy(map(self._chat_entry, entries), len(entries), _width(entries)), "refusal": None}

    def chat_entries(self, entries: Sequence[TokenLogprobs]) -> list[Any]:
        """Returns the list `content` of a `logprobs` object, for a few tokens."""
        return [self._chat_entry(entry) for entry in entries]

    def completion(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offset: int
    ) -> dict[str, Any]:
        """Returns the `logprobs` object of a completion choice.

        The entry of a prompt's first token is None. `offset`: position of the first token in the choice's text. If the
        text lacks leading special tokens, `offset` is minus the length of these tokens, and the offsets of these tokens
        are written as 0.
        """
        num = len(token_ids)
        assert len(entries) == num
        values = (None if entry is None else max(entry.logprob, LOWEST) for entry in entries)
        tops = (None if entry is None else self._top(entry) for entry in entries)
        return {
            "tokens": lazy(map(self.name, token_ids), num),
            "token_logprobs": lazy(values, num),
            "top_logprobs": lazy(tops, num, _width(entries)),
            "text_offset": lazy(self._offsets(token_ids, offset), num),
        }

    def num_chars(self, token_ids: Sequence[int]) -> int:
        """Returns the length of the tokens' texts, by which `text_offset` grows."""
        return sum(map(len, map(self._tokenizer.token_text, token_ids)))

    def prompt(self, entries: Sequence[TokenLogprobs]) -> list[Any] | LazyList:
        """Returns vLLM's prompt_logprobs: None for the first token, then an object for each further token.

        An object maps token ids to logprob, rank and text.
        """
        return lazy(chain((None,), map(self._prompt_entry, entries)), 1 + len(entries), _width(entries))

    def _prompt_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        # The entry of the prompt's own token comes first, as in vLLM: some clients read only the first entry.
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [
            (token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(entry.top, start=1)
            if token_id != entry.token_id
        ]
        return {
            str(token_id): {
                "logprob": max(logprob, LOWEST),
                "rank": rank,
                "decoded_token": self._tokenizer.token_text(token_id),
            }
            for token_id, logprob, rank in ranked
        }

    def _offsets(self, token_ids: Sequence[int], offset: int) -> Iterator[int]:
        for token_id in token_ids:
            yield max(offset, 0)
            offset += len(self._tokenizer.token_text(token_id))

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        item = self._chat_item(entry.token_id, entry.logprob)
        item["top_logprobs"] = [self._chat_item(token_id, logprob) for token_id, logprob in entry.top]
        return item

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        # As in vLLM, the entry of the token itself comes first, even if the token is not among the most likely.
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


def _width(entries: Sequence[TokenLogprobs | None]) -> int:
    """Returns the number of log-probabilities in an entry. All entries of a request have the same number."""
    last = entries[-1] if entries else None
    return 1 if last is None else 1 + len(last.top)

"""Preamble: consumes the tokens before a form, up to the text after which the form begins."""

from __future__ import annotations

import numpy as np

from rayloom_engine.grammar.matcher import Mask
from rayloom_engine.grammar.vocabulary import Vocabulary

_BLANKS = b" \t\r\n"


class Endings:
    """The banned tokens: tokens that complete the text before a form and then add characters other than blanks.

    The added characters would be the form's first characters, and the grammar would not check them. One object serves
    all answers with the same text before their form.
    """

    def __init__(self, vocabulary: Vocabulary, after: str) -> None:
        self.after = after.encode()
        self.vocabulary = vocabulary
        by_length: dict[int, list[int]] = {}  # number of bytes of `after` that were generated -> banned tokens
        for token_id in range(vocabulary.tokenizer.vocab_size):
            token = vocabulary.token_bytes(token_id)
            if self.after[-1:] not in token[:-1]:
                continue
            for num_before in range(len(self.after)):
                rest = self.after[num_before:]
                begins = token.startswith(rest) if num_before else rest in token
                if begins and token.partition(rest)[2].strip(_BLANKS):
                    by_length.setdefault(num_before, []).append(token_id)
        self._banned = {num: np.array(ids, dtype=np.int64) for num, ids in by_length.items()}

    def mask(self, text: bytes, mask: Mask) -> bool:
        """Writes the tokens that may follow `text` to `mask`. Returns False, and writes nothing, if all tokens may."""
        banned = [ids for num, ids in self._banned.items() if num == 0 or text.endswith(self.after[:num])]
        if not banned:
            return False
        mask.fill(-1)
        for ids in banned:
            clear(mask, ids)
        return True


def clear(mask: Mask, token_ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    """Removes tokens from a mask."""
    bits = ~(np.int64(1) << (token_ids % 32))
    np.bitwise_and.at(mask, token_ids // 32, bits.astype(np.uint32).view(np.int32))


class Preamble:
    """The state of one answer up to the beginning of its form."""

    def __init__(self, endings: Endings) -> None:
        self._endings = endings
        self._text = b""  # the answer's last bytes; always fewer bytes than `endings.after`
        self.is_over = not endings.after

    def copy(self) -> Preamble:
        """Returns an independent preamble in the same state."""
        copied = Preamble(self._endings)
        copied._text = self._text
        copied.is_over = self.is_over
        return copied

    def advance(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Consumes tokens until the preamble is over. Returns the other tokens, which belong to the form."""
        after = self._endings.after
        for index, token_id in enumerate(token_ids):
            if self.is_over:
                return token_ids[index:]
            text = self._text + self._endings.vocabulary.token_bytes(token_id)
            self.is_over = after in text
            self._text = text[max(0, len(text) - len(after) + 1) :]
        return ()

    def fill(self, mask: Mask) -> bool:
        """Writes the allowed tokens to `mask`. Returns False, and writes nothing, if all tokens are allowed."""
        return self._endings.mask(self._text, mask)

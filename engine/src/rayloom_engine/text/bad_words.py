"""Turns the words of the field `bad_words` into token sequences that an answer must not contain."""

from __future__ import annotations

from collections.abc import Sequence

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError
from rayloom_engine.text.tokenizer import Tokenizer

MAX_SEQUENCES = 1000  # limit for all words together; a step compares each token sequence with the end of the answer


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of each word as encoded at the beginning of a text, and as encoded after a blank.

    A tokenizer may spell a word in further ways, for example letter by letter. As in vLLM, such spellings are not
    banned. Raises RequestError for a word without tokens, and for too many sequences.
    """
    sequences: dict[tuple[int, ...], None] = {}  # an ordered set
    for word in words:
        stripped = word.lstrip()
        alone = tuple(tokenizer.encode(stripped, add_special_tokens=False))
        if not alone:
            raise RequestError(f"bad_words has {shown(word)}, which has no tokens; leave it out", "bad_words")
        sequences[alone] = None
        after_blank = tuple(tokenizer.encode(f" {stripped}", add_special_tokens=False))
        # If the blank is a separate token, the sequence `alone` already bans the word after a blank.
        if after_blank and after_blank[-len(alone) :] != alone:
            sequences[after_blank] = None
        if len(sequences) > MAX_SEQUENCES:
            raise RequestError(
                f"bad_words gives more than {MAX_SEQUENCES} token sequences; give fewer words", "bad_words"
            )
    return tuple(sequences)

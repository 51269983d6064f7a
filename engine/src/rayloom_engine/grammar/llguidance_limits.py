"""Limits for llguidance: how much work it may do for a grammar, and for one mask."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance._lib import LLParserLimits


@cache
def parser_limits() -> LLParserLimits:
    """Returns the limits. A grammar that exceeds one of these limits is refused, or its matcher fails.

    A lexer state takes 1 to 2 KB, so the lexer of a grammar takes at most about 40 MB.
    """
    from llguidance._lib import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,  # work that takes at most 10 ms when a grammar is built
        max_grammar_size=60_000,  # with 65,525 symbols the library panics after it has accepted the grammar
        max_lexer_states=25_000,
        step_lexer_fuel=100_000,  # work that takes at most 7 ms for a mask
        step_max_items=25_000,
        verbose_errors=False,  # with the default, error messages contain the whole grammar
    )

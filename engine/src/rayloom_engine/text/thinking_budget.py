"""Turns `thinking_token_budget` into a ThinkingBudget, with the tags that begin and end the model's reasoning. Pure."""

from __future__ import annotations

import dataclasses

from rayloom_engine.common.json_words import shown
from rayloom_engine.core.decoding import ThinkingBudget
from rayloom_engine.errors import RequestError
from rayloom_engine.sampling_params import SamplingParams
from rayloom_engine.text.message_parsing.channels import CALL, CHANNEL, END, MESSAGE, RETURN, START
from rayloom_engine.text.message_parsing.parser import ParserSettings
from rayloom_engine.text.tokenizer import Tokenizer


def with_thinking(params: SamplingParams, parsing: ParserSettings, tokenizer: Tokenizer) -> SamplingParams:
    """Returns `params` with the budget that `thinking_token_budget` sets. Raises RequestError."""
    num_tokens = params.thinking_token_budget
    if num_tokens is None or num_tokens == -1:
        return params
    budget = thinking_budget(num_tokens, parsing, tokenizer)
    if budget is not None and params.allowed_token_ids is not None:
        assert isinstance(params.allowed_token_ids, tuple)
        missing = [each for each in budget.end_ids if each not in params.allowed_token_ids]
        if missing:
            raise RequestError(
                f"thinking_token_budget needs the tokens of {shown(budget.ends[0])}, but allowed_token_ids lacks "
                f"{missing[0]}; add it",
                "thinking_token_budget",
            )
    return dataclasses.replace(params, thinking=budget)


def thinking_budget(num_tokens: int, parsing: ParserSettings, tokenizer: Tokenizer) -> ThinkingBudget | None:
    """Returns the budget of one answer's reasoning; None if the model writes no reasoning.

    In the harmony format, the budget limits the first message of the channel "analysis".
    """
    calls = ""
    if parsing.is_harmony:
        start = f"{CHANNEL}analysis{MESSAGE}"
        ends: tuple[str, ...] = (END, CALL, RETURN, START)
    elif parsing.reasoning is not None:
        start = "" if parsing.is_open else parsing.reasoning.start
        tools = parsing.tools if parsing.reasoning.call_ends_it else None
        openers = (*tools.openers, *tools.bare_openers) if tools is not None else ()
        ends = (parsing.reasoning.end, *openers)
        calls = tools.name if tools is not None else ""
    else:
        return None
    end_ids = tuple(tokenizer.encode(ends[0], add_special_tokens=False))
    return ThinkingBudget(num_tokens=num_tokens, start=start, ends=ends, calls=calls, end_ids=end_ids)

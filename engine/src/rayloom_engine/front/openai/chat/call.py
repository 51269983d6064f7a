"""ChatCall: a chat request, prepared for the core, with the readers of its choices.

The endpoints for chat, Responses and Messages prepare a ChatRequest here. The endpoints differ only in the documents
that they write.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayloom_engine.front.generation.choice_reader import ChoiceReader
from rayloom_engine.front.model_text import ModelText
from rayloom_engine.front.openai.fields.wire import ChatRequest
from rayloom_engine.front.openai.prompts import ChatPrompt, chat_prompt, transferred_prompt
from rayloom_engine.grammar.compile import grammar_of
from rayloom_engine.sampling_params import SamplingParams, check_token_ids
from rayloom_engine.structured_outputs import StructuredOutputs
from rayloom_engine.text.message_parsing.parser import ParserSettings, TextParser
from rayloom_engine.text.message_parsing.sink import CallRules
from rayloom_engine.text.messages import plain_messages
from rayloom_engine.text.model_formats import ModelFormats
from rayloom_engine.text.thinking_budget import with_thinking
from rayloom_engine.text.tools.call_grammar import call_grammar, calls_or_form
from rayloom_engine.text.tools.call_ids import call_id
from rayloom_engine.text.tools.tool import ToolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A prepared chat. Pass `text`, `prompt_ids` and `params` to the generation."""

    text: ModelText  # `kept_ids`: the special tokens that the parser reads
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    use: ToolUse
    parsing: ParserSettings
    has_reasoning: bool  # the client wants the reasoning

    def reader(self, request_id: str, choice: int) -> ChoiceReader:
        """Returns a new reader of the choice number `choice`.

        The ids of tool calls depend only on the request and its `request_id`, so a repeat gets the same ids.
        """

        @functools.cache
        def origin() -> str:  # computed at the first call, because most answers have none
            return f"{request_id}/{self._prompt_digest()}/{choice}"

        is_short = self.text.formats.tools.short_ids
        rules = CallRules(
            schemas=self._schemas,
            call_id=lambda index: call_id(origin(), index, is_short=is_short),
            max_calls=None if self.use.is_parallel and self.use.mode != "named" else 1,
        )
        return ChoiceReader(
            TextParser(self.parsing, rules),
            self.text,
            skips_special_tokens=self.params.skip_special_tokens,
            has_reasoning=self.has_reasoning,
            has_named_call=self.use.mode == "named",
        )

    @property
    def _schemas(self) -> Mapping[str, Mapping[str, Any]]:
        return {tool.name: tool.parameters for tool in self.use.tools}

    def _prompt_digest(self) -> str:
        """Returns a hash of the prompt. It makes call ids differ if a client reuses a request id for another prompt."""
        return hashlib.sha256(array.array("q", self.prompt_ids).tobytes()).hexdigest()


async def prepare_chat(text: ModelText, wire: ChatRequest) -> ChatCall:
    """Returns the prepared request: messages and tools as token ids, the sampling parameters, the parser's settings.

    Raises RequestError that names the field.
    """
    params = wire.sampling(text.defaults)
    use = wire.tool_use()
    prompt = None if wire.echo else await transferred_prompt(wire.kv_transfer_params, text)
    if prompt is None:
        prompt = await chat_prompt(text, wire.messages, wire)
    check_token_ids(prompt.ids, text.model.vocab_size, "messages")
    prompt_ids = wire.cut_prompt(prompt.ids, params, text.model.max_model_len)
    parsing = _parser_settings(text, wire, use, prompt)
    field = "functions" if wire.has_functions else "tools"
    params = _constrained(params, use, text.formats, parsing, field)
    params = with_thinking(params, parsing, text.tokenizer)
    if not parsing.is_plain:
        text = dataclasses.replace(text, kept_ids=frozenset(text.formats.special_ids.values()))
    return ChatCall(
        text=text,
        prompt_ids=tuple(prompt_ids),
        params=params,
        use=use,
        parsing=parsing,
        has_reasoning=wire.include_reasoning is not False,
    )


def _constrained(
    params: SamplingParams, use: ToolUse, formats: ModelFormats, parsing: ParserSettings, tools_field: str
) -> SamplingParams:
    """Returns the parameters with the grammar of forced or strict calls, if there are any.

    If the request also asks for a JSON form of the answer, and calls are not forced, the grammar allows either calls or
    the form. Every form begins after the reasoning.
    """
    after = parsing.reasoning.end if parsing.reasoning is not None and parsing.is_open else ""
    form = params.structured_outputs
    if form is not None:
        form = dataclasses.replace(form, after=after)
    # If calls and the form begin with the same bracket, llguidance's lexer cannot tell them apart. Then the grammar has
    # only the form, or only the calls if these are forced.
    is_distinct = "{" not in formats.tools.first_openers
    if form is not None and use.mode == "auto" and is_distinct and (form.json is not None or form.json_object):
        grammar = grammar_of(form)
        lark = calls_or_form(use, formats.tools, formats.special_ids, grammar, is_after_reasoning=bool(after))
        form = StructuredOutputs(lark=lark, after=after, field=form.field)
    elif form is None or use.is_forced:
        calls = call_grammar(use, formats.tools, formats.special_ids, is_after_reasoning=bool(after))
        if calls is not None:
            form = StructuredOutputs(lark=calls, after=after, field=tools_field)
    return params if form is None else dataclasses.replace(params, structured_outputs=form)


def _parser_settings(text: ModelText, wire: ChatRequest, use: ToolUse, prompt: ChatPrompt) -> ParserSettings:
    formats = text.formats
    reasoning = formats.reasoning
    is_open = reasoning is not None and reasoning.is_open(prompt.text, continued=_continued(wire))
    return ParserSettings(
        tools=formats.tools if use.mode != "none" else None,
        reasoning=reasoning,
        is_harmony=formats.is_harmony,
        is_open=is_open,
        hidden=tuple(formats.special_ids) if wire.skip_special_tokens is not False else (),
    )


def _continued(wire: ChatRequest) -> str | None:
    """Returns the text of the message that the answer continues; None if the answer begins a message."""
    if not wire.continue_final_message:
        return None
    [last] = plain_messages(wire.messages[-1:])
    return str(last["content"])

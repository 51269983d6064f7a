"""ChatCall: a chat request, prepared for the core, with the readers of its choices.

The endpoints for chat, Responses and Messages prepare a ChatRequest here. They differ only in the documents that they
write.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayloom_engine.front.generation.choice_reader import ChoiceReader
from rayloom_engine.front.model_text import ModelText
from rayloom_engine.front.openai.prompts import chat_prompt
from rayloom_engine.front.openai.wire import ChatRequest
from rayloom_engine.sampling_params import SamplingParams, check_token_ids
from rayloom_engine.text.message_parsing.plain import PlainParser


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A prepared chat. Pass `text`, `prompt_ids` and `params` to the generation."""

    text: ModelText  # its detokenizer keeps the special tokens that the parser needs
    prompt_ids: tuple[int, ...]
    params: SamplingParams

    def reader(self, request_id: str, choice: int) -> ChoiceReader:
        """Returns a new reader of the choice number `choice`. Equal arguments give equal ids of tool calls."""
        return ChoiceReader(PlainParser())


async def prepare_chat(text: ModelText, wire: ChatRequest) -> ChatCall:
    """Returns the prepared request: messages and tools as token ids, the sampling parameters, the parser's settings.

    Raises RequestError that names the field.
    """
    params = wire.sampling(text.defaults)
    prompt_ids = await chat_prompt(text, wire.messages, wire)
    check_token_ids(prompt_ids, text.model.vocab_size, "messages")
    return ChatCall(text=text, prompt_ids=tuple(prompt_ids), params=params)

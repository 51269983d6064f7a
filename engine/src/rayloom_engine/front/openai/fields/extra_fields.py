"""ExtraFields: fields of chats that Responses and Messages accept besides the fields of their own APIs.

The fields have the same meaning as in chats.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rayloom_engine.front.openai.fields.sampling_fields import AllowedTokenIds, BadWords
from rayloom_engine.front.openai.fields.wire import ChatRequest, StopTokenIds, Whole, Wire


def as_in_chats(name: str) -> Any:
    """Returns an optional field with the description that it has in a chat request."""
    return Field(None, description=ChatRequest.model_fields[name].description)


class ExtraFields(Wire):
    """Base of both requests. The values are passed on to the chat request."""

    min_p: float | None = as_in_chats("min_p")
    repetition_penalty: float | None = as_in_chats("repetition_penalty")
    presence_penalty: float | None = as_in_chats("presence_penalty")
    frequency_penalty: float | None = as_in_chats("frequency_penalty")
    logit_bias: dict[str, Any] | None = as_in_chats("logit_bias")
    seed: Whole | None = as_in_chats("seed")
    stop_token_ids: StopTokenIds | None = as_in_chats("stop_token_ids")
    bad_words: BadWords | None = as_in_chats("bad_words")
    allowed_token_ids: AllowedTokenIds | None = as_in_chats("allowed_token_ids")
    min_tokens: Whole | None = as_in_chats("min_tokens")
    thinking_token_budget: Whole | None = as_in_chats("thinking_token_budget")
    ignore_eos: bool | None = as_in_chats("ignore_eos")
    skip_special_tokens: bool | None = as_in_chats("skip_special_tokens")
    include_stop_str_in_output: bool | None = as_in_chats("include_stop_str_in_output")
    structured_outputs: dict[str, Any] | None = as_in_chats("structured_outputs")
    include_reasoning: bool | None = as_in_chats("include_reasoning")
    chat_template_kwargs: dict[str, Any] | None = as_in_chats("chat_template_kwargs")
    priority: Whole | None = as_in_chats("priority")
    speculation: bool | None = as_in_chats("speculation")
    cache_salt: str | None = as_in_chats("cache_salt")
    kv_transfer_params: dict[str, Any] | None = as_in_chats("kv_transfer_params")
    request_id: str | None = as_in_chats("request_id")

    def given(self, *names: str) -> dict[str, Any]:
        """Returns name -> value of each field that the client gave, for `names` and the fields of ExtraFields."""
        fields = (*names, "model", *EXTRA_NAMES)
        return {name: value for name in fields if (value := getattr(self, name)) is not None}


EXTRA_NAMES = tuple(name for name in ExtraFields.model_fields if name != "model")

"""ResponsesRequest: the fields of a request to /v1/responses."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rayloom_engine.front.openai.fields.extra_fields import ExtraFields, as_in_chats
from rayloom_engine.front.openai.fields.wire import Whole

LOGPROBS = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
]


class Nested(BaseModel):
    """Base of the objects inside a request."""

    model_config = ConfigDict(strict=True, extra="ignore")


class ResponseStreamOptions(Nested):
    include_obfuscation: bool | None = Field(None, description="Accepted; events are never padded.")


class TextOptions(Nested):
    format: dict[str, Any] | None = Field(
        None,
        description='The form of the answer: an object with the type "text", "json_object" or "json_schema"; the last '
        "has `name`, `schema`, `strict` and `description` beside it.",
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="Accepted without effect; the model alone decides, and `max_output_tokens` limits it."
    )


class ReasoningOptions(Nested):
    effort: str | None = as_in_chats("reasoning_effort")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Accepted without effect; the answer has the reasoning itself instead of a summary."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="The older name of summary."
    )
    context: Literal["auto", "current_turn", "all_turns"] | None = Field(
        None, description="Accepted without effect; the chat template decides which earlier reasoning the model reads."
    )


class ResponsesRequest(ExtraFields):
    input: Any = Field(
        description="A text, or a list of items: messages with the content as text or as `input_text` and "
        "`output_text` parts, `function_call`, `function_call_output` and `reasoning`.",
        json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    tools: list[Any] | None = Field(
        None, description='Functions that the model may call: objects with the type "function".'
    )
    tool_choice: Any = Field(
        None,
        description='"auto", "none", "required", `{"type": "function", "name": NAME}`, or "allowed_tools" with `mode` '
        'and `tools`. Default: "auto" if there are tools.',
        json_schema_extra={"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]},
    )
    parallel_tool_calls: bool | None = Field(None, description="The model may call several functions. Default: true.")
    text: TextOptions | None = Field(None, description="The form of the answer.")
    reasoning: ReasoningOptions | None = Field(None, description="Options of the model's reasoning.")
    max_output_tokens: Whole | None = Field(
        None, description="Most tokens of the answer, reasoning included. Default: the rest of the context."
    )
    max_tool_calls: Whole | None = Field(
        None, description="Accepted without effect; it limits calls of tools that run in the server."
    )
    temperature: float | None = as_in_chats("temperature")
    top_p: float | None = as_in_chats("top_p")
    top_k: Whole | None = as_in_chats("top_k")
    stop: Any = Field(
        None,
        description=as_in_chats("stop").description,
        json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    )
    include: list[Include] | None = Field(
        None,
        description=f"`{LOGPROBS}` adds log-probabilities to the answer's text. OpenAI's other values change nothing.",
    )
    top_logprobs: Whole | None = Field(
        None, description=f"This many alternatives for each token; needs `{LOGPROBS}` in include. Default: 0."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="Nothing is ever dropped from the input: a prompt that does not fit is refused."
    )
    metadata: dict[str, str] | None = Field(None, description="Returned in the answer.")
    store: bool | None = Field(None, description="Accepted without effect; answers are not stored.")
    service_tier: str | None = Field(None, description="Accepted without effect; all requests are treated alike.")
    user: str | None = Field(None, description="Returned in the answer.")
    safety_identifier: str | None = Field(None, description="Returned in the answer.")
    prompt_cache_key: str | None = Field(
        None, description="Returned in the answer; equal prefixes are reused without it."
    )
    stream: bool | None = Field(None, description="The answer is sent as server-sent events. Default: false.")
    stream_options: ResponseStreamOptions | None = Field(
        None, description="An object with fields of its own. Only with stream."
    )
    enable_response_messages: bool | None = Field(
        None,
        description="The answer has `input_messages` and `output_messages`: prompt and answer as text with all special "
        "tokens, and as token ids. Not in streams. Default: false.",
    )

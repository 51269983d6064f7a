"""The answers of Responses and Messages as pydantic models. Only the OpenAPI document uses them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from rayloom_engine.front.document.answers import AnswerModel, ChatTokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(AnswerModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(description="Always empty.")
    logprobs: list[ChatTokenLogprob] = Field(description="Empty unless `include` asks for them.")


class ReasoningText(AnswerModel):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(AnswerModel):
    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(AnswerModel):
    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[Any] = Field(description="Always empty.")
    content: list[ReasoningText]


class OutputFunctionCall(AnswerModel):
    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str = Field(description="Names the call in a `function_call_output`.")
    name: str
    arguments: str = Field(description="The arguments as JSON text.")


class InputTokensDetails(AnswerModel):
    cached_tokens: int = Field(description="Prompt tokens that were found in the prefix cache.")
    cache_write_tokens: int = Field(description="Prompt tokens that were written into the prefix cache.")


class OutputTokensDetails(AnswerModel):
    reasoning_tokens: int


class ResponseUsage(AnswerModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class RawMessage(AnswerModel):
    type: Literal["raw_message_tokens"]
    message: str
    tokens: list[int]


class ResponseAnswer(AnswerModel):
    """The response object. Fields without a description have the values of the request."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="Unix time in seconds.")
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None = Field(description="The error of a stream that failed.")
    incomplete_details: dict[str, str] | None = Field(description='The reason: "max_output_tokens".')
    output: list[OutputMessage | OutputReasoning | OutputFunctionCall] = Field(description="The answer.")
    usage: ResponseUsage | None = Field(description="Null until the answer is complete.")
    model: str
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False] = Field(description="Answers are never stored.")
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: str | None
    warnings: list[str] | None = Field(None, description="Parts of `text.format` that cannot be enforced.")
    input_messages: list[RawMessage] | None = Field(None, description="The prompt, with enable_response_messages.")
    output_messages: list[RawMessage] | None = Field(None, description="The answer, with enable_response_messages.")


class ResponseEvent(AnswerModel):
    """An event of OpenAI's API: `response.created`, `response.output_text.delta` and so on. The type decides the other
    fields.
    """

    model_config = ConfigDict(extra="allow", defer_build=True)

    type: str
    sequence_number: int = Field(description="Counted from 0.")


class ContentBlock(AnswerModel):
    """A block of text, thinking or tool_use. The type decides the other fields."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    type: Literal["text", "thinking", "tool_use"]


class ThinkingTokens(AnswerModel):
    thinking_tokens: int


class MessagesUsage(AnswerModel):
    """The three numbers of input tokens add up to the length of the prompt."""

    input_tokens: int = Field(description="All other prompt tokens.")
    cache_creation_input_tokens: int = Field(description="Prompt tokens that were written into the prefix cache.")
    cache_read_input_tokens: int = Field(description="Prompt tokens that were found in the prefix cache.")
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageAnswer(AnswerModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None = Field(description="The stop sequence that ended the answer.")
    usage: MessagesUsage


class MessageEvent(AnswerModel):
    """An event of Anthropic's API, such as `content_block_delta`. The type decides the other fields."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    type: str


class CountTokensAnswer(AnswerModel):
    input_tokens: int


class AnthropicErrorDetail(AnswerModel):
    type: str = Field(description="The kind of error, as in Anthropic's API.")
    message: str = Field(description="What is wrong and what to change.")
    param: str | None = Field(description="The field at fault.")
    code: str | int | None = Field(description="A name for programs, see docs/api.md.")


class AnthropicErrorAnswer(AnswerModel):
    """The body of every answer with a status of 400 or more, on the paths of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorDetail

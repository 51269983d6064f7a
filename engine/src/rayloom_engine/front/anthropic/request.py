"""MessagesRequest and CountTokensRequest: the fields of requests to /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from rayloom_engine.front.openai.fields.extra_fields import ExtraFields, as_in_chats
from rayloom_engine.front.openai.fields.wire import Whole, Wire

MIN_THINKING_TOKENS = 1024
_TEXT_OR_BLOCKS: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]
}


class ThinkingOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description='"disabled": the model does not think, if its template can ask for that. "adaptive": as if the '
        "field were left out."
    )
    budget_tokens: Whole | None = Field(
        None,
        description='Most tokens of thinking if type is "enabled"; the answer follows. '
        f"From {MIN_THINKING_TOKENS} to one less than max_tokens.",
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="Accepted without effect; the answer has the whole thinking."
    )


class OutputOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    effort: str | None = as_in_chats("reasoning_effort")
    format: dict[str, Any] | None = Field(
        None, description='The form of the answer: an object with the type "json_schema" and a `schema`.'
    )


class ToolChoice(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["auto", "any", "tool", "none"] = Field(
        description='"auto": the model decides. "any": it calls a tool. "tool": it calls the tool `name`. "none": it '
        "calls none."
    )
    name: str | None = Field(None, description="The tool to call, for the type tool.")
    disable_parallel_tool_use: bool | None = Field(None, description="The model calls one tool at most.")


class PromptFields(Wire):
    """The fields that decide the prompt."""

    messages: list[Any] = Field(
        description="The conversation, a list of objects with role and content. The roles are user, assistant and "
        "system. Content is a string or a list of blocks: `text`, `tool_use`, `tool_result`, `thinking`. If the last "
        "message is the assistant's, the answer continues it, unless it is empty."
    )
    system: Any = Field(
        None,
        description="A system message before the messages, as a string or a list of text blocks.",
        json_schema_extra=_TEXT_OR_BLOCKS,
    )
    tools: list[Any] | None = Field(
        None, description="Tools that the client runs: objects with `name`, `description` and `input_schema`."
    )
    tool_choice: ToolChoice | None = Field(None, description="The use of the tools. Default: auto, if there are tools.")
    thinking: ThinkingOptions | None = Field(
        None, description="The model's thinking. Default: as the model's chat template decides."
    )
    output_config: OutputOptions | None = Field(None, description="Effort and form of the answer.")


class CountTokensRequest(PromptFields):
    chat_template_kwargs: dict[str, Any] | None = as_in_chats("chat_template_kwargs")


class MessagesRequest(PromptFields, ExtraFields):
    least_tokens: ClassVar[int] = 1

    max_tokens: Whole = Field(description="Most tokens of the answer, thinking included; at least 1.")
    stop_sequences: list[str] | None = Field(None, description="Texts that end the answer, as `stop` in a chat.")
    temperature: float | None = as_in_chats("temperature")
    top_p: float | None = as_in_chats("top_p")
    top_k: Whole | None = as_in_chats("top_k")
    stream: bool | None = Field(None, description="The answer is sent as server-sent events. Default: false.")

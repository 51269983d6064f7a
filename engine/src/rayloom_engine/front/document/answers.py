"""The answers of chat and completions as pydantic models. Only the OpenAPI document uses them.

A test checks the handlers' answers against the schemas of these models.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

WARNINGS = "The parts of the request's form that cannot be enforced. Left out if there are none; once in a stream."
FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class AnswerModel(BaseModel):
    """Base of all answers. A field without a default is always present.

    pydantic builds the models only when the OpenAPI document is made.
    """

    model_config = ConfigDict(defer_build=True, protected_namespaces=())


class ErrorDetail(AnswerModel):
    message: str = Field(description="What is wrong and what to change.")
    type: str = Field(description="The kind of error, as in OpenAI's API.")
    param: str | None = Field(description="The field at fault.")
    code: str | int | None = Field(description="A name for programs, see docs/api.md.")


class ErrorAnswer(AnswerModel):
    """The body of every answer with a status of 400 or more."""

    error: ErrorDetail


class PromptTokensDetails(AnswerModel):
    cached_tokens: int = Field(description="Prompt tokens that were found in the prefix cache.")
    audio_tokens: int


class CompletionTokensDetails(AnswerModel):
    reasoning_tokens: int
    audio_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(AnswerModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(AnswerModel):
    token: str = Field(description="The token's text, or `token_id:N` with return_tokens_as_token_ids.")
    logprob: float = Field(description="-9999 stands for minus infinity.")
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerModel):
    content: list[ChatTokenLogprob]
    refusal: None


class CompletionLogprobs(AnswerModel):
    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="Null for a prompt's first token.")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Where each token begins in the text.")


class PromptLogprob(AnswerModel):
    logprob: float
    rank: int = Field(description="1 is the most likely token.")
    decoded_token: str


PromptLogprobEntries = list[dict[str, PromptLogprob] | None]


class FunctionOfCall(AnswerModel):
    name: str
    arguments: str = Field(description="The arguments as JSON text.")


class ToolCallAnswer(AnswerModel):
    id: str
    type: Literal["function"]
    function: FunctionOfCall


class AnswerMessage(AnswerModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = Field(None, description="The model's reasoning, if the model writes any.")
    reasoning: str | None = Field(None, description="The same text as `reasoning_content`.")
    tool_calls: list[ToolCallAnswer] | None = None
    function_call: FunctionOfCall | None = Field(None, description="The call, if the request has `functions`.")


class ChatChoice(AnswerModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = Field(description="The stop string or stop id that ended the answer.")
    token_ids: list[int] | None


class ChatCompletion(AnswerModel):
    id: str
    object: Literal["chat.completion"]
    created: int = Field(description="Unix time in seconds.")
    model: str
    system_fingerprint: str = Field(description="Equal on servers that compute the same tokens.")
    choices: list[ChatChoice]
    usage: Usage
    kv_transfer_params: None = Field(None, description="Only if the request has the field.")
    warnings: list[str] | None = Field(None, description=WARNINGS)
    prompt_logprobs: PromptLogprobEntries | None
    prompt_token_ids: list[int] | None


class FunctionDelta(AnswerModel):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(AnswerModel):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta | None = None


class ChatDelta(AnswerModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    function_call: FunctionDelta | None = None


class ChatChunkChoice(AnswerModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(AnswerModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice] = Field(description="Empty in the last chunk with include_usage.")
    usage: Usage | None = Field(None, description="Only if the request sets include_usage.")
    warnings: list[str] | None = Field(None, description=WARNINGS)
    prompt_logprobs: PromptLogprobEntries | None = None
    prompt_token_ids: list[int] | None = None


class TextChoice(AnswerModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobEntries | None
    token_ids: list[int] | None
    prompt_token_ids: list[int] | None


class TextCompletion(AnswerModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage
    kv_transfer_params: None = Field(None, description="Only if the request has the field.")
    warnings: list[str] | None = Field(None, description=WARNINGS)


class TextChunkChoice(AnswerModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobEntries | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextCompletionChunk(AnswerModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChunkChoice]
    usage: Usage | None = None
    warnings: list[str] | None = Field(None, description=WARNINGS)


class ModelCard(AnswerModel):
    id: str = Field(description="The name that requests put into `model`.")
    object: Literal["model"]
    created: int
    owned_by: str
    root: str = Field(
        description="A hub id or a path, from which clients load the tokenizer; of a LoRA adapter, its folder."
    )
    parent: str | None = Field(description="Of a LoRA adapter: the name of the served model; else null.")
    max_model_len: int | None = Field(description="Most tokens of prompt and answer; null before the load.")


class AliasTarget(AnswerModel):
    model: str
    weight: int


class AliasCard(ModelCard):
    """A further name of a gateway's models."""

    root: str = Field(description="The model with the most weight.")
    max_model_len: int | None = Field(description="The shortest of the models' lengths; null before the load.")
    targets: list[AliasTarget] = Field(description="The models behind the name, with their shares of the requests.")


class ModelList(AnswerModel):
    object: Literal["list"]
    data: list[ModelCard | AliasCard]


class TokenizeAnswer(AnswerModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None


class DetokenizeAnswer(AnswerModel):
    prompt: str


class HealthAnswer(AnswerModel):
    status: Literal["ok", "ready"]
    state: str = Field(description="serving, recovering, draining or starting.")


class LoadAnswer(AnswerModel):
    server_load: int = Field(description="Requests in flight.")


class ServerInfo(AnswerModel):
    vllm_config: str | dict[str, Any] = Field(description="The settings: a text, or an object with config_format=json.")
    vllm_env: dict[str, str] = Field(description="Environment variables of the engine that hold no secret.")
    system_env: dict[str, str | None] = Field(description="Versions of the machine's software.")


class VersionAnswer(AnswerModel):
    version: str


class TokenizerInfo(AnswerModel):
    """The keys of the model's tokenizer_config.json, which differ among models, and the fields below."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    tokenizer_class: str
    model_max_length: int = Field(description="Most tokens of prompt and answer together.")
    chat_template: str | None = None

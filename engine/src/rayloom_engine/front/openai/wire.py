"""The requests of the API port as pydantic models: OpenAI's fields, and vLLM's fields where OpenAI has none.

For every field, null means the default. tools/write_api_docs.py makes the tables of docs/api.md from the descriptions
and ranges here. fields.py lists fields of other APIs; any other field is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError
from rayloom_engine.front.http.headers import REQUEST_ID
from rayloom_engine.front.openai.field_types import (
    LISTS_OF_IDS,
    MAX_DETOKENIZED,
    MESSAGE,
    TOOL,
    either,
    list_of,
)
from rayloom_engine.front.openai.field_types import StopTokenIds as StopTokenIds
from rayloom_engine.front.openai.field_types import TokenIds as TokenIds
from rayloom_engine.front.openai.field_types import Whole as Whole
from rayloom_engine.front.openai.form_fields import FormFields
from rayloom_engine.front.openai.sampling_fields import SamplingFields
from rayloom_engine.front.openai.tool_fields import MAX_TOOLS, tool_use
from rayloom_engine.front.openai.wire_schema import complete_schema
from rayloom_engine.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from rayloom_engine.sampling_params import (
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from rayloom_engine.text.tools.tool import ToolUse


class Wire(BaseModel):
    """The fields of every request."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=(), json_schema_extra=complete_schema)

    least_tokens: ClassVar[int] = 0  # least max_tokens of this endpoint

    model: str | None = Field(None, description="The served model's name. Default: the served model.")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", json_schema_extra={"additionalProperties": False})

    include_usage: bool | None = Field(None, description="A last chunk with `usage` and no choices.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: the usage so far in every chunk."
    )
    include_obfuscation: bool | None = Field(None, description="Accepted; chunks are never padded.")


class GenerationRequest(FormFields, SamplingFields, Wire):
    """The fields that chat and completions have in common."""

    n: Whole | None = Field(None, description="Choices per prompt.")
    temperature: float | None = Field(
        None, description="0 takes the most likely token. Values above 2, OpenAI's maximum, are allowed."
    )
    top_p: float | None = Field(
        None,
        description="Draws from the most likely tokens whose probabilities add up to this. 0 takes the first of them.",
    )
    top_k: Whole | None = Field(None, description="Draws from this many of the most likely tokens; 0 and -1: from all.")
    min_p: float | None = Field(
        None, description="Draws from tokens that have at least this share of the most likely token's probability."
    )
    repetition_penalty: float | None = Field(
        None, description="Divides the logits of tokens that occur in prompt or answer; 1 is off."
    )
    presence_penalty: float | None = Field(
        None, description="Subtracted from the logits of tokens that occur in the answer."
    )
    frequency_penalty: float | None = Field(None, description="Subtracted from the same logits, once per occurrence.")
    # SamplingParams checks the keys and values of logit_bias, and stops at the first bad one.
    logit_bias: dict[str, Any] | None = Field(
        None, description=f"Token id to a bias from -100 to 100; at most {MAX_LOGIT_BIASES} of them."
    )
    seed: Whole | None = Field(
        None, description="Equal seeds give equal draws; -1 means the default. Default: a random one."
    )
    stop: Any = Field(
        None,
        description=f"Texts that end the answer, at most {MAX_STOP_STRINGS} of up to {MAX_STOP_STRING_CHARS} "
        "characters; an empty one ends nothing.",
        json_schema_extra=either({"type": "string"}, list_of("string")),
    )
    stop_token_ids: StopTokenIds | None = Field(
        None, description=f"Ids that end the answer; at most {MAX_STOP_TOKEN_IDS}."
    )
    min_tokens: Whole | None = Field(None, description="Nothing ends the answer before it has this many tokens.")
    max_tokens: Whole | None = Field(
        None,
        description="Most tokens of the answer; at least 1 in a chat. 0 computes the prompt's log-probabilities alone. "
        "Default: 16, in a chat the rest of the context.",
    )
    max_completion_tokens: Whole | None = Field(
        None, description="OpenAI's newer name of max_tokens. If both are given, max_tokens is ignored."
    )
    ignore_eos: bool | None = Field(None, description="The model's own end token does not end the answer.")
    prompt_logprobs: Whole | None = Field(
        None, description="Log-probabilities of the prompt's tokens, with this many alternatives each. Not for streams."
    )
    skip_special_tokens: bool | None = Field(None, description="Special tokens are left out of the text.")
    include_stop_str_in_output: bool | None = Field(None, description="The text keeps the stop string that ended it.")
    add_special_tokens: bool | None = Field(
        None, description="The tokenizer adds its special tokens. Default: true for prompts, false for chats."
    )
    stream: bool | None = Field(None, description="The answer as server-sent events. Default: false.")
    stream_options: StreamOptions | None = Field(
        None, description="An object with fields of its own. Only with stream."
    )
    priority: Annotated[Whole, Field(ge=-(2**31), lt=2**31)] | None = Field(
        None,
        description="Lower runs first, among the requests of one API key; from -2147483648 to 2147483647. Without the "
        "setting `enable_priority` only 0 is allowed. Default: 0.",
    )
    cache_salt: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Only requests of the same API key with the same text here share cached prompt prefixes."
    )
    request_id: Annotated[str, Field(pattern=rf"^(?:{REQUEST_ID})$")] | None = Field(
        None,
        description="Becomes the answer's id, after `chatcmpl-` or `cmpl-`; 1 to 128 visible ASCII characters. "
        "Default: the X-Request-Id header, or a fresh one.",
    )
    return_token_ids: bool | None = Field(
        None, description="The answer has the token ids of prompt and text too. Default: false."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Log-probabilities name tokens as `token_id:N`. Default: false."
    )

    def _sampling(self, names: dict[str, str], defaults: SamplingDefaults, **settings: Any) -> SamplingParams:
        """Builds SamplingParams from the request's fields, else from `defaults`. `settings` take precedence over them.

        `names`: setting -> the name of its field in this request, for error messages. Raises RequestError.
        """
        if self.max_completion_tokens is not None:
            settings["max_tokens"] = self.max_completion_tokens
            names = {**names, "max_tokens": "max_completion_tokens"}
        for name in _SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None:
                settings.setdefault(name, value)
        for name, value in defaults.settings.items():
            settings.setdefault(name, value)
        try:
            if settings.get("max_tokens") == 0 and self.least_tokens > 0:
                raise RequestError(f"max_tokens must be at least {self.least_tokens} here, given 0", "max_tokens")
            return SamplingParams(**settings, structured_outputs=self.form())
        except RequestError as error:
            raise _renamed(error, names) from error

    def check_priority(self, is_enabled: bool) -> None:
        """Raises RequestError if the request sets a priority but the server does not use priorities."""
        if self.priority and not is_enabled:
            raise RequestError(
                f"priority is not enabled on this server, given {self.priority}; leave it out or set it to 0, or start "
                "the server with --enable-priority (in an LLMService: spec.engine.args.enablePriority: true)",
                "priority",
            )

    def check_stream(self) -> None:
        """Raises RequestError for options that cannot be combined."""
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is only for streams; set stream to true or leave it out", "stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs is not for streams; set stream to false or leave it out", "prompt_logprobs"
            )


_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "logprob_token_ids",
    "min_tokens",
    "max_tokens",
    "ignore_eos",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


class TemplateFields(BaseModel):
    """The fields that decide how messages become a prompt."""

    add_generation_prompt: bool | None = Field(
        None, description="The prompt ends where the assistant's answer begins. Default: true."
    )
    continue_final_message: bool | None = Field(
        None, description="The prompt ends inside the last message; needs add_generation_prompt false. Default: false."
    )
    documents: list[dict[str, Any]] | None = Field(
        None, description="Documents for the chat template, which reads them as the variable `documents`."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables for the chat template, such as `enable_thinking`."
    )
    tools: list[Any] | None = Field(
        None,
        description=f"Functions that the model may call, at most {MAX_TOOLS}: objects with `type` (function) and "
        "`function`, an object with name, description, parameters (a JSON schema) and strict.",
        json_schema_extra=either({"type": "array", "items": TOOL, "maxItems": MAX_TOOLS}),
    )


class ChatRequest(TemplateFields, GenerationRequest):
    least_tokens: ClassVar[int] = 1

    messages: list[Any] = Field(
        description="The conversation, a list of objects with role and content. The roles are system, developer, user, "
        "assistant, tool and function; any other role is passed to the chat template. Content is a string or a list of "
        "text parts.",
        json_schema_extra={"items": MESSAGE},
    )
    logprobs: bool | None = Field(None, description="Log-probabilities of the answer's tokens. Default: false.")
    top_logprobs: Whole | None = Field(
        None, description="This many alternatives for each token; needs logprobs. Default: 0."
    )
    tool_choice: Any = Field(
        None,
        description='"none": no call. "auto": the model chooses. "required": at least one call. '
        '{"type": "function", "function": {"name": NAME}}: a call of this function. Default: auto if there are tools.',
        json_schema_extra=either({"type": "string"}, {"type": "object"}),
    )
    parallel_tool_calls: bool | None = Field(None, description="The answer may have several calls. Default: true.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None,
        description="A variable for the chat template: none, minimal, low, medium, high, xhigh or max. none also sets "
        "`enable_thinking` to false, unless chat_template_kwargs has it.",
    )
    thinking_token_budget: Whole | None = Field(
        None,
        description="After this many tokens of reasoning the tag follows that ends it, then the answer; -1: no limit.",
    )
    echo: bool | None = Field(
        None,
        description="The answer's text begins with the last message, if that is the assistant's. Default: false.",
    )
    include_reasoning: bool | None = Field(None, description="The answer has the model's reasoning. Default: true.")

    def sampling(self, defaults: SamplingDefaults = NO_DEFAULTS) -> SamplingParams:
        """Returns the sampling parameters. Raises RequestError that names the field."""
        self.check_stream()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs; set logprobs to true", "top_logprobs")
        if self.logprob_token_ids and not self.logprobs:
            raise RequestError("logprob_token_ids needs logprobs; set logprobs to true", "logprob_token_ids")
        num_top = (self.top_logprobs or 0) if self.logprobs else None
        own = {"max_tokens": self.max_tokens, "thinking_token_budget": self.thinking_token_budget}
        return self._sampling({"logprobs": "top_logprobs"}, defaults, logprobs=num_top, **own)

    def echoed(self) -> str:
        """Returns the text in front of the answer: with `echo`, that of the assistant's last message."""
        last = self.messages[-1] if self.echo and self.messages else None
        if not isinstance(last, dict) or last.get("role") != "assistant":
            return ""
        content = last.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))

    def template_names(self) -> dict[str, Any]:
        """Returns further variables for the chat template."""
        names: dict[str, Any] = {} if self.documents is None else {"documents": self.documents}
        if self.reasoning_effort is not None:
            names["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            names["enable_thinking"] = False
        return {**names, **(self.chat_template_kwargs or {})}

    def tool_use(self) -> ToolUse:
        """Returns the tools and how the model may use them. Raises RequestError that names the field."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)


class CompletionRequest(GenerationRequest):
    prompt: Any = Field(
        None,
        description="A string, a list of strings, a list of token ids or a list of such lists. An empty string, or "
        "no prompt, stands for the beginning of a document: the tokens that the tokenizer puts in front of a text. If "
        "there are none, it stands for the first of these that exists: `<|endoftext|>`, the model's beginning token, "
        "its end token.",
        json_schema_extra=either({"type": "string"}, list_of("string"), list_of("integer"), LISTS_OF_IDS),
    )
    logprobs: Whole | None = Field(
        None, description="Log-probabilities of the answer's tokens, with this many alternatives each. Default: none."
    )
    echo: bool | None = Field(
        None, description="The answer's text, and its logprobs, begin with the prompt. Default: false."
    )
    best_of: Whole | None = Field(None, description="If given, must be equal to n.")

    def sampling(self, defaults: SamplingDefaults = NO_DEFAULTS) -> SamplingParams:
        """Returns the sampling parameters. Raises RequestError that names the field."""
        self.check_stream()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                f"best_of {shown(self.best_of)} is not supported; leave it out or set it to n", "best_of"
            )
        settings: dict[str, Any] = {} if self.logprobs is None else {"logprobs": self.logprobs}
        if self.echo and self.logprobs is not None:
            if self.prompt_logprobs not in (None, self.logprobs):
                raise RequestError(
                    f"prompt_logprobs {self.prompt_logprobs} with echo and logprobs {self.logprobs} is not supported; "
                    "leave it out or set both to the same number",
                    "prompt_logprobs",
                )
            settings["prompt_logprobs"] = self.logprobs
        return self._sampling({}, defaults, **settings)


class TokenizeRequest(TemplateFields, Wire):
    """Either `prompt` or `messages`."""

    prompt: str | None = Field(None, description="A text.")
    messages: list[Any] | None = Field(
        None,
        description="A conversation instead of a prompt, as in a chat.",
        json_schema_extra=either({"type": "array", "items": MESSAGE}),
    )
    add_special_tokens: bool | None = Field(
        None, description="The tokenizer adds its special tokens. Default: true for prompts, false for chats."
    )
    return_token_strs: bool | None = Field(
        None, description="The answer has the vocabulary's spelling of each token too. Default: false."
    )

    def template_names(self) -> dict[str, Any]:
        """Returns further variables for the chat template."""
        names = {} if self.documents is None else {"documents": self.documents}
        return {**names, **(self.chat_template_kwargs or {})}

    def tool_use(self) -> ToolUse:
        """Returns the tools. Raises RequestError that names the field."""
        return tool_use(self.tools, None, None)


class DetokenizeRequest(Wire):
    tokens: TokenIds = Field(description=f"Token ids, at most {MAX_DETOKENIZED}.")


ENDPOINTS: dict[str, type[Wire]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def _renamed(error: RequestError, names: dict[str, str]) -> RequestError:
    """Returns `error` with the field name that the client used.

    The names differ for some settings: a chat sends `logprobs` as `top_logprobs`, and `max_tokens` may come as
    `max_completion_tokens`.
    """
    name = names.get(error.field or "")
    if name is None or error.field is None:
        return error
    return RequestError(str(error).replace(error.field, name), name)

"""The requests of the API port as typed models: OpenAI's fields, and vLLM's where OpenAI has no word.

A field that exists elsewhere, changes the answer and is not implemented is refused unless it has its default value: an
answer that silently ignores `tools` is worse than a 400. Fields that nobody knows are accepted and logged once.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rayloom_engine.errors import RequestError
from rayloom_engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams, shown

logger = logging.getLogger(__name__)

# Field -> values that mean "not used", besides null.
_NOT_IMPLEMENTED: dict[str, tuple[object, ...]] = {
    # OpenAI, both endpoints
    "service_tier": ("auto", "default"),
    # OpenAI, chat
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "store": (False,),
    # OpenAI, completions
    "suffix": ("",),
    # vLLM
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": (),
    "vllm_xargs": (),
    "kv_transfer_params": (),
}

# Fields that change nothing in the answer: accepted in silence.
_WITHOUT_EFFECT = frozenset(
    ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls")
)

MAX_DETOKENIZED = 2**20  # tokens in one request to turn them back into text

_logged_names: set[str] = set()
_MAX_LOGGED_NAMES = 100  # a client that invents names must not fill the log


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None


class GenerationRequest(_Wire):
    """What chat and completions share. Null means the default."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None  # SamplingParams checks the numbers: it stops at the first bad one
    seed: int | None = None
    stop: Any = None  # a string or a list of strings
    # Without fail_fast there is one error object per bad element, and a body has room for millions.
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def _sampling(self, **settings: Any) -> SamplingParams:
        """SamplingParams of the fields that were given, and of `settings`, which come first."""
        for name in _SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None:
                settings.setdefault(name, value)
        return SamplingParams(**settings)

    def check_stream(self) -> None:
        """Raises RequestError for options that exclude each other."""
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
    "min_tokens",
    "max_tokens",
    "ignore_eos",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


class ChatRequest(GenerationRequest):
    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def sampling(self) -> SamplingParams:
        """Raises RequestError naming the field."""
        self.check_stream()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs set to true", "top_logprobs")
        given = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        try:
            return self._sampling(max_tokens=given, logprobs=(self.top_logprobs or 0) if self.logprobs else None)
        except RequestError as error:
            raise _renamed(error, {"logprobs": "top_logprobs"}) from error


class CompletionRequest(GenerationRequest):
    prompt: Any = None  # a string, a list of strings, a list of ids or a list of lists of ids
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    def sampling(self) -> SamplingParams:
        """Raises RequestError naming the field."""
        self.check_stream()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(f"best_of {self.best_of} is not supported; leave it out or set it to n", "best_of")
        settings: dict[str, Any] = {} if self.logprobs is None else {"logprobs": self.logprobs}
        if self.echo and self.logprobs is not None:
            settings["prompt_logprobs"] = self.logprobs
        return self._sampling(**settings)


class TokenizeRequest(_Wire):
    """Either `prompt` or `messages`."""

    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(_Wire):
    tokens: Annotated[list[int], Field(max_length=MAX_DETOKENIZED, fail_fast=True)]


Wire = TypeVar("Wire", bound=_Wire)


def parse_request(model: type[Wire], document: dict[str, Any]) -> Wire:
    """The typed request in a JSON object. Raises RequestError naming the first field at fault."""
    for name, neutral in _NOT_IMPLEMENTED.items():
        value = document.get(name)
        if value is not None and value not in neutral:
            hint = f" or set it to {neutral[0]!r}" if neutral else ""
            raise RequestError(f"{name} is not supported by this server; leave it out{hint}", name)
    try:
        request = model.model_validate(document)
    except ValidationError as error:
        raise _request_error(error) from error
    for name in request.model_extra or ():
        if name not in _NOT_IMPLEMENTED and name not in _WITHOUT_EFFECT:
            _log_unknown(name)
    return request


def parse_prompts(prompt: object) -> list[str | tuple[int, ...]]:
    """The prompts in a completion's `prompt`. Raises RequestError."""
    if prompt is None:
        raise RequestError("prompt is missing; give a string, a list of strings or token ids", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(type(item) is int for item in prompt):
            return [tuple(prompt)]
        if all(isinstance(item, str) for item in prompt):
            return list(prompt)
        if all(isinstance(item, list) and all(type(token_id) is int for token_id in item) for item in prompt):
            return [tuple(item) for item in prompt]
    raise RequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists, and not empty",
        "prompt",
    )


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        return RequestError(f"{field} is missing; the request needs it", field)
    if first["type"] == "too_long":
        return RequestError(f"{field} has too many entries, at most {first['ctx']['max_length']} are allowed", field)
    given = shown(first["input"])
    expected = _EXPECTED.get(first["type"])
    if expected is None:
        return RequestError(f"{field}: {first['msg'].lower()}, given {given}", field)
    return RequestError(f"{field} must be {expected}, given {given}", field)


# Pydantic's error types in the words of JSON.
_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}


def _renamed(error: RequestError, names: dict[str, str]) -> RequestError:
    """The same refusal in the words of the request: chat calls some settings otherwise."""
    name = names.get(error.field or "")
    if name is None or error.field is None:
        return error
    return RequestError(str(error).replace(error.field, name), name)


def _log_unknown(name: str) -> None:
    if name not in _logged_names and len(_logged_names) < _MAX_LOGGED_NAMES:
        _logged_names.add(name)
        logger.info("requests have a field that is not known and has no effect: %.80r", name)

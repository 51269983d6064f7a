"""GenerationRequest: the fields that chats and completions have in common, and how they become SamplingParams."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import RequestError
from rayloom_engine.front.http.headers import REQUEST_ID
from rayloom_engine.front.openai.fields.field_types import StopTokenIds as StopTokenIds
from rayloom_engine.front.openai.fields.field_types import TokenIds as TokenIds
from rayloom_engine.front.openai.fields.field_types import Whole as Whole
from rayloom_engine.front.openai.fields.field_types import (
    either,
    list_of,
)
from rayloom_engine.front.openai.fields.form_fields import FormFields
from rayloom_engine.front.openai.fields.sampling_fields import SamplingFields
from rayloom_engine.front.openai.fields.wire_schema import complete_schema
from rayloom_engine.sampling_defaults import SamplingDefaults
from rayloom_engine.sampling_params import (
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)


class Wire(BaseModel):
    """The fields of every request."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=(), json_schema_extra=complete_schema)

    least_tokens: ClassVar[int] = 0  # least max_tokens of this endpoint

    model: str | None = Field(
        None, description="The served model's name, or that of a LoRA adapter. Default: the served model."
    )


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", json_schema_extra={"additionalProperties": False})

    include_usage: bool | None = Field(
        None, description="The stream ends with a chunk that has `usage` and no choices."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="Every chunk has the usage up to that chunk; needs include_usage."
    )
    include_obfuscation: bool | None = Field(None, description="Accepted; chunks are never padded.")


class GenerationRequest(FormFields, SamplingFields, Wire):
    """The fields that chat and completions have in common."""

    # Name of a setting -> name of the field in this request, if the names differ.
    field_names: ClassVar[Mapping[str, str]] = {}

    n: Whole | None = Field(None, description="Choices per prompt.")
    temperature: float | None = Field(
        None, description="0 takes the most likely token. Values above 2, OpenAI's maximum, are allowed."
    )
    top_p: float | None = Field(
        None,
        description="Draws from the most likely tokens whose probabilities add up to this. 0 takes the most likely.",
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
    frequency_penalty: float | None = Field(
        None, description="Subtracted from the logit of each token of the answer, once for each of its occurrences."
    )
    # SamplingParams checks the keys and values of logit_bias, and stops at the first error.
    logit_bias: dict[str, Any] | None = Field(
        None, description=f"Maps token ids to biases from -100 to 100; at most {MAX_LOGIT_BIASES} ids."
    )
    seed: Whole | None = Field(
        None, description="Equal seeds give equal draws; -1 means the default. Default: a random one."
    )
    stop: Any = Field(
        None,
        description=f"Texts that end the answer, at most {MAX_STOP_STRINGS} of up to {MAX_STOP_STRING_CHARS} "
        "characters; an empty text has no effect.",
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
        None,
        description="Log-probabilities of the prompt's tokens, with this many alternatives each, at most "
        "`--max-logprobs`; -1: the whole vocabulary. In a stream they are in the first chunk.",
    )
    use_beam_search: bool | None = Field(
        None,
        description="The choices are the n most likely answers that a beam search with n beams finds. temperature, "
        "top_p, top_k, min_p and seed then have no effect, and a stream has the text at its end. Refused together with "
        "penalties, logit_bias, stop, bad_words, allowed_token_ids, prompt_logprobs, logprob_token_ids, "
        "thinking_token_budget or a form of the answer. Default: false.",
    )
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = Field(
        None,
        description="With use_beam_search: the log-probability of an answer is divided by this power of its length, "
        "the prompt included; from -10 to 10. Default: 1.",
    )
    skip_special_tokens: bool | None = Field(None, description="Special tokens are left out of the text.")
    include_stop_str_in_output: bool | None = Field(None, description="The text keeps the stop string that ended it.")
    add_special_tokens: bool | None = Field(
        None, description="The tokenizer adds its special tokens. Default: true for prompts, false for chats."
    )
    stream: bool | None = Field(None, description="The answer is sent as server-sent events. Default: false.")
    stream_options: StreamOptions | None = Field(
        None, description="An object with fields of its own. Only with stream."
    )
    priority: Annotated[Whole, Field(ge=-(2**31), lt=2**31)] | None = Field(
        None,
        description="Of the requests of one API key, those with lower numbers run first; from -2147483648 to "
        "2147483647. Without the setting `enable_priority` only 0 is allowed. Default: 0.",
    )
    speculation: bool | None = Field(
        None, description="false switches the setting `speculation` off for this answer. Default: true."
    )
    cache_salt: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Requests of one API key share cached prompt prefixes only if this text is the same."
    )
    kv_transfer_params: dict[str, Any] | None = Field(
        None,
        description="Sent by a router that lets one engine compute the prompt and another the answer. This engine "
        "always computes both, so only the key `prompt_token_ids` has an effect: in a chat without echo it replaces "
        "the messages as the prompt. The answer has this field as null.",
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
        None,
        description="Log-probabilities name tokens as `token_id:N`. Default: the setting of this name, usually false.",
    )

    def names_tokens_by_id(self, config: EngineConfig) -> bool:
        """True if log-probabilities name tokens by ids: as the request's field says or, without it, the setting."""
        asked = self.return_tokens_as_token_ids
        return config.return_tokens_as_token_ids if asked is None else asked

    def _sampling(self, defaults: SamplingDefaults, **settings: Any) -> SamplingParams:
        """Builds SamplingParams from the request's fields, else from `defaults`. `settings` override both.

        A beam search ignores `defaults`. Raises RequestError.
        """
        if self.max_completion_tokens is not None:
            settings["max_tokens"] = self.max_completion_tokens
        for name in _SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None:
                settings.setdefault(name, value)
        for name, value in () if self.use_beam_search else defaults.settings.items():
            settings.setdefault(name, value)
        with self.own_names():
            if settings.get("max_tokens") == 0 and self.least_tokens > 0:
                raise RequestError(f"max_tokens must be at least {self.least_tokens} here, given 0", "max_tokens")
            return SamplingParams(**settings, structured_outputs=self.form())

    @contextlib.contextmanager
    def own_names(self) -> Iterator[None]:
        """A context in which a RequestError about a setting gets the name of the field that the client used.

        The names differ for some settings: a chat sends `logprobs` as `top_logprobs`, and `max_tokens` may come as
        `max_completion_tokens`.
        """
        try:
            yield
        except RequestError as error:
            name = error.field or ""
            own = self.field_names.get(name)
            if name == "max_tokens" and self.max_completion_tokens is not None:
                own = "max_completion_tokens"
            if own is None:
                raise
            message = re.sub(rf"(?<![\w-]){name}(?!\w)", own, str(error))
            raise RequestError(message, own) from error

    def beam_length_penalty(self) -> float | None:
        """Returns the length penalty of a beam search; None if the request does not ask for a beam search.

        Raises RequestError for a length penalty without a beam search.
        """
        if self.use_beam_search:
            return 1.0 if self.length_penalty is None else self.length_penalty
        if self.length_penalty not in (None, 1.0):
            raise RequestError(
                "length_penalty needs use_beam_search; set it to true, or leave both out", "length_penalty"
            )
        return None

    def check_priority(self, is_enabled: bool) -> None:
        """Raises RequestError if the request sets a priority but the server does not use priorities."""
        if self.priority and not is_enabled:
            raise RequestError(
                f"priority is not enabled on this server, given {self.priority}; leave it out or set it to 0, or start "
                "the server with --enable-priority (in an LLMService: spec.engine.args.enablePriority: true)",
                "priority",
            )

    def check_stream(self) -> None:
        """Raises RequestError for `stream_options` without `stream`."""
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options is only for streams; set stream to true or leave it out", "stream_options"
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
    "speculation",
    "skip_special_tokens",
    "include_stop_str_in_output",
)

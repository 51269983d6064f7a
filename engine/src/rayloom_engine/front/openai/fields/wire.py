"""The requests of the API port as pydantic models: OpenAI's fields, and vLLM's fields where OpenAI has none.

For every field, null means the default. tools/write_api_docs.py makes the tables of docs/api.md from the descriptions
and ranges here. other_apis.py lists fields of other APIs. A field that is in neither file is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from rayloom_engine.common.json_words import shown
from rayloom_engine.errors import RequestError
from rayloom_engine.front.openai.fields.field_types import (
    FUNCTION,
    FUNCTION_NAME,
    LISTS_OF_IDS,
    MAX_DETOKENIZED,
    MESSAGE,
    TOOL,
    either,
    list_of,
)
from rayloom_engine.front.openai.fields.field_types import StopTokenIds as StopTokenIds
from rayloom_engine.front.openai.fields.field_types import TokenIds as TokenIds
from rayloom_engine.front.openai.fields.field_types import Whole as Whole
from rayloom_engine.front.openai.fields.function_fields import function_use
from rayloom_engine.front.openai.fields.generation_request import GenerationRequest as GenerationRequest
from rayloom_engine.front.openai.fields.generation_request import StreamOptions as StreamOptions
from rayloom_engine.front.openai.fields.generation_request import Wire as Wire
from rayloom_engine.front.openai.fields.tool_fields import MAX_TOOLS, tool_use
from rayloom_engine.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from rayloom_engine.sampling_params import (
    SamplingParams,
)
from rayloom_engine.text.tools.tool import ToolUse


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
    field_names: ClassVar[Mapping[str, str]] = {"logprobs": "top_logprobs"}

    messages: list[Any] = Field(
        description="The conversation, a list of objects with role and content. The roles are system, developer, user, "
        "assistant, tool and function; any other role is passed to the chat template. Content is a string or a list of "
        "text parts.",
        json_schema_extra={"items": MESSAGE},
    )
    logprobs: bool | None = Field(None, description="Log-probabilities of the answer's tokens. Default: false.")
    top_logprobs: Whole | None = Field(
        None,
        description="This many alternatives for each token, at most `--max-logprobs`, which is 20 by default; -1: the "
        "whole vocabulary. Needs logprobs. Default: 0.",
    )
    tool_choice: Any = Field(
        None,
        description='"none": no call. "auto": the model chooses. "required": at least one call. '
        '{"type": "function", "function": {"name": NAME}}: a call of this function. {"type": "allowed_tools", '
        '"allowed_tools": {"mode": MODE, "tools": [...]}}: as if there were only these tools, named in the same way; '
        "the mode is auto or required. Default: auto if there are tools.",
        json_schema_extra=either({"type": "string"}, {"type": "object"}),
    )
    functions: list[Any] | None = Field(
        None,
        description="OpenAI's older form of tools: objects with name, description and parameters. The answer has at "
        "most one call, in `function_call`, and then the `finish_reason` function_call.",
        json_schema_extra=either({"type": "array", "items": FUNCTION, "maxItems": MAX_TOOLS}),
    )
    function_call: Any = Field(
        None,
        description='For functions: "none", "auto" or {"name": NAME}. Default: auto if there are functions.',
        json_schema_extra=either({"type": "string", "enum": ["none", "auto"]}, FUNCTION_NAME),
    )
    parallel_tool_calls: bool | None = Field(None, description="The answer may have several calls. Default: true.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None,
        description="A variable for the chat template: none, minimal, low, medium, high, xhigh or max. none also sets "
        "`enable_thinking` to false, unless chat_template_kwargs has it.",
    )
    thinking_token_budget: Whole | None = Field(
        None,
        description="Most tokens of reasoning: the server then writes the tag that ends the reasoning, and the answer "
        "follows. -1: no limit.",
    )
    echo: bool | None = Field(
        None,
        description="The answer's text begins with the last message, if that is the assistant's. Default: false.",
    )
    include_reasoning: bool | None = Field(
        None, description="Whether the answer contains the model's reasoning. Default: true."
    )

    def sampling(self, defaults: SamplingDefaults = NO_DEFAULTS) -> SamplingParams:
        """Returns the sampling parameters. Raises RequestError that names the field."""
        self.check_stream()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs; set logprobs to true", "top_logprobs")
        if self.logprob_token_ids and not self.logprobs:
            raise RequestError("logprob_token_ids needs logprobs; set logprobs to true", "logprob_token_ids")
        num_top = (self.top_logprobs or 0) if self.logprobs else None
        own = {"max_tokens": self.max_tokens, "thinking_token_budget": self.thinking_token_budget}
        return self._sampling(defaults, logprobs=num_top, **own)

    @property
    def has_functions(self) -> bool:
        """True if the request has tools in the older form. The answer then has its call in the older form, too."""
        return bool(self.functions) or self.function_call not in (None, "none")

    def echoed(self) -> str:
        """Returns the text in front of the answer: with `echo`, the assistant's last message; else an empty text."""
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
        if self.has_functions:
            if self.tools or self.tool_choice is not None:
                raise RequestError(
                    "functions and function_call are older names of tools and tool_choice; give one pair", "functions"
                )
            return function_use(self.functions, self.function_call)
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
    prompt_embeds: Any = Field(
        None,
        description="A prompt of embeddings, or a list of them: each the base64 of a file that torch.save has written, "
        "with a tensor of the shape [positions, hidden size] in float32, bfloat16 or float16. These prompts come "
        "before those in `prompt`, which may be missing or empty. Needs the setting `enable_prompt_embeds`. Refused "
        "together with echo, prompt_logprobs and use_beam_search.",
        json_schema_extra=either({"type": "string"}, list_of("string")),
    )
    logprobs: Whole | None = Field(
        None,
        description="Log-probabilities of the answer's tokens, with this many alternatives each, at most "
        "`--max-logprobs`, which is 20 by default; -1: the whole vocabulary. Default: none.",
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
        return self._sampling(defaults, **settings)


class LoadAdapterRequest(Wire):
    """A LoRA adapter to load."""

    lora_name: str = Field(description="The name that requests put into `model`.")
    lora_path: str = Field(
        description="A folder with adapter_config.json and adapter_model.safetensors, or a repository of the hub with "
        "these files: ORG/NAME, hf://ORG/NAME or hf://ORG/NAME@REVISION."
    )
    load_inplace: bool | None = Field(None, description="Replace an adapter of the same name.")


class UnloadAdapterRequest(Wire):
    """A LoRA adapter to unload."""

    lora_name: str = Field(description="Its name.")
    lora_int_id: int | None = Field(None, description="Accepted without effect.")


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

"""ModelText: the model's tokenizer and chat template, and the facts about the model that the front needs.

A front reads the files as soon as the core has found them. The ranks begin to load only then, so the front is usually
done first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rayloom_engine.common.process import return_free_memory
from rayloom_engine.config import EngineConfig
from rayloom_engine.protocol.messages import ServedModel
from rayloom_engine.sampling_defaults import NO_DEFAULTS, SamplingDefaults, read_sampling_defaults
from rayloom_engine.sampling_params import ContextTooLong, SamplingParams
from rayloom_engine.text.chat_template import ChatTemplate
from rayloom_engine.text.model_formats import ModelFormats, model_formats
from rayloom_engine.text.tokenizer import Tokenizer

# Tokenising a text of fewer characters takes less time than the change to a thread and back.
ENCODE_IN_THREAD_ABOVE_CHARS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFiles:
    """Everything that a front reads in a model's folder."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    formats: ModelFormats = field(default_factory=ModelFormats)
    defaults: SamplingDefaults = NO_DEFAULTS  # values of settings that a request leaves out

    @classmethod
    async def load(
        cls, folder: Path, config: EngineConfig, load_tokenizer: Callable[[Path], Awaitable[Tokenizer]] | None = None
    ) -> TextFiles:
        """Reads the files in a thread. `load_tokenizer` is called in place of Tokenizer.load.

        Raises ModelError or OSError.
        """
        tokenizer = await (load_tokenizer(folder) if load_tokenizer else asyncio.to_thread(Tokenizer.load, folder))
        template = await asyncio.to_thread(ChatTemplate.load, folder, tokenizer.special_tokens)
        files = await asyncio.to_thread(cls(tokenizer=tokenizer, template=template).with_settings, folder, config)
        await asyncio.to_thread(return_free_memory)  # reading a tokenizer takes twice the memory of the tokenizer
        return files

    def with_settings(self, folder: Path, config: EngineConfig) -> TextFiles:
        """Returns these files with the settings of `config` applied to them. Raises ModelError or OSError."""
        formats = model_formats(self.template, self.tokenizer, config.tool_parser, config.reasoning_parser)
        defaults = read_sampling_defaults(folder) if config.generation_config == "auto" else NO_DEFAULTS
        return replace(self, formats=formats, defaults=defaults)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    model: ServedModel
    tokenizer: Tokenizer
    template: ChatTemplate | None
    formats: ModelFormats = field(default_factory=ModelFormats)
    defaults: SamplingDefaults = NO_DEFAULTS  # values of settings that a request leaves out
    contexts: tuple[int, ...] = ()  # context lengths of a gateway's engines; model.max_model_len is the longest
    kept_ids: frozenset[int] = frozenset()  # special tokens that stay in an answer's text, because a parser reads them

    @classmethod
    def of(cls, model: ServedModel, files: TextFiles) -> ModelText:
        return cls(
            model=model,
            tokenizer=files.tokenizer,
            template=files.template,
            formats=files.formats,
            defaults=files.defaults,
        )

    def context_of(self, params: SamplingParams, prompt_len: int) -> int:
        """Returns the context length within which a request must stay.

        With max_tokens, returns the longest context length of all engines. Without max_tokens, the answer may fill the
        whole context; the shorter the context is, the more engines can compute and continue the request. So without
        max_tokens, returns the shortest context length of which prompt and min_tokens fill at most three quarters. If
        there is no such length, returns the longest length.
        """
        if params.max_tokens is not None:
            return self.model.max_model_len
        num_known = prompt_len + params.min_tokens
        return min((each for each in self.contexts if 4 * num_known <= 3 * each), default=self.model.max_model_len)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of `text`. Long texts are tokenised in a thread, so that streams continue meanwhile.

        Raises ContextTooLong before tokenising if the text has more characters than a full context could hold:
        tokenising megabytes would take seconds.
        """
        if len(text) > self.model.max_model_len * self.tokenizer.max_token_chars:
            raise ContextTooLong(
                f"the text has {len(text)} characters, more than the model's context of "
                f"{self.model.max_model_len} tokens can hold; shorten it"
            )
        if len(text) <= ENCODE_IN_THREAD_ABOVE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

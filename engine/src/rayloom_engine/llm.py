"""`LLM`: the engine in this process, for scripts and notebooks.

with LLM("builtin://smollm2-135m") as llm:
    for output in llm.generate(["Hello"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from tqdm import tqdm

from rayloom_engine.build import build_engine
from rayloom_engine.choice_limits import check_num_allowed_ids
from rayloom_engine.config import parse_config
from rayloom_engine.core.output import SequenceOutput
from rayloom_engine.core.sequence import BROKEN_FORM, CORRUPT
from rayloom_engine.core.sequence import Sequence as CoreSequence
from rayloom_engine.core.stats import SchedulerStats
from rayloom_engine.core.step import TokenLogprobs
from rayloom_engine.errors import CORRUPT_LOGITS, ConfigError, CorruptLogits, EngineDead, RequestError
from rayloom_engine.executor_choice import choose_executor
from rayloom_engine.grammar.validate import validate_here
from rayloom_engine.models.checkpoint.progress import no_progress
from rayloom_engine.sampling_defaults import NO_DEFAULTS, read_sampling_defaults
from rayloom_engine.sampling_params import SamplingParams, check_token_ids
from rayloom_engine.text.bad_words import bad_word_ids
from rayloom_engine.text.chat_template import ChatTemplate
from rayloom_engine.text.message_parsing.parser import ParserSettings
from rayloom_engine.text.model_formats import model_formats
from rayloom_engine.text.output_decoder import OutputDecoder
from rayloom_engine.text.stop_strings import StopAutomaton
from rayloom_engine.text.thinking_budget import with_thinking
from rayloom_engine.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """A generated choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # one per token, if requested
    finish_reason: str  # "stop" | "length"
    stop_reason: str | int | None  # the stop string or stop token id; None for EOS


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its choices."""

    prompt: str | None  # None if the prompt was given as ids
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]  # logprobs of all prompt tokens except the first, if requested
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    outputs: tuple[CompletionOutput, ...]


class _Choice:
    """A choice that is being generated. Its tokens are added as they arrive."""

    def __init__(self, decoder: OutputDecoder, prompt_index: int, index: int) -> None:
        self.decoder = decoder
        self.prompt_index = prompt_index
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.num_cached_tokens = 0
        self.finish_reason = ""
        self.stop_reason: str | int | None = None

    def add(self, output: SequenceOutput) -> bool:
        """Adds the output of a step. Returns True if the choice is now complete."""
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.num_cached_tokens = self.num_cached_tokens or output.num_cached_tokens
        delta = self.decoder.add(output.token_ids, output.logprobs, output.finish_reason, output.stop_token_id)
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.finish_reason is None:
            return False
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        return True

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class LLM:
    """A loaded model that answers batches of prompts. Not thread-safe."""

    def __init__(self, model: str = "builtin://smollm2-135m", **settings: Any) -> None:
        """Loads the model. `settings`: fields of EngineConfig (dtype, max_model_len, num_kv_blocks, threads, ...).

        Raises ConfigError or ModelError.
        """
        config = parse_config({"model": model, **settings})
        if choose_executor(config, os.environ).has_rank_processes:
            raise ConfigError(
                f"LLM runs one rank in this process, given executor {config.executor!r} with "
                f"{config.parallelism}; leave these out, or use `rayloom-engine serve`"
            )
        if config.takes_adapters:
            raise ConfigError(
                "adapters: no prompt of LLM can name an adapter; leave adapters and allow_runtime_lora_updating out, "
                "or use `rayloom-engine serve`"
            )
        if config.enable_prompt_embeds:
            raise ConfigError(
                "enable_prompt_embeds: no prompt of LLM can be embeddings; leave it out, or use `rayloom-engine serve`"
            )
        built = build_engine(config, epoch=1, progress=no_progress)
        folder = Path(built.model.path)
        self._engine = built.engine
        self.model = built.model
        self.tokenizer = Tokenizer.load(folder)
        self._max_logprobs = config.max_logprobs
        self._defaults = read_sampling_defaults(folder) if config.generation_config == "auto" else NO_DEFAULTS
        self._template = ChatTemplate.load(folder, self.tokenizer.special_tokens)
        self._formats = model_formats(self._template, self.tokenizer, config.tool_parser, config.reasoning_parser)
        self._is_shut_down = False
        self._next_id = 0

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def stats(self) -> SchedulerStats:
        """Returns the present load, and totals since the start. Do not call it after `shutdown`."""
        return self._engine.stats()

    def shutdown(self) -> None:
        """Frees the model and its KV cache. A second call does nothing."""
        if not self._is_shut_down:
            self._is_shut_down = True
            del self._engine

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the settings of the model's generation_config.json, which `generate` uses by default."""
        settings: dict[str, Any] = dict(self._defaults.settings)
        if self._defaults.max_tokens is not None:
            settings["max_tokens"] = self._defaults.max_tokens
        return SamplingParams(**settings)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Returns one RequestOutput per prompt, in order. A prompt is a text or a list of token ids.

        Without `sampling_params`, uses the result of `get_default_sampling_params`, with max_tokens limited to the room
        in the context. If one of the prompts cannot be computed, raises RequestError and computes no prompt.
        """
        many = _many_prompts(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in many]
        ids = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in many]
        params = _params_for(sampling_params, len(many), self._defaults_for(ids, SamplingParams().max_tokens))
        if any(each.thinking_token_budget not in (None, -1) for each in params):
            raise RequestError(
                "thinking_token_budget is for chats, whose reasoning has known tags; use chat, or leave it out",
                "thinking_token_budget",
            )
        return self._run(texts, ids, params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Returns one RequestOutput per conversation, in order. A single conversation needs no list around it.

        Without sampling_params, uses the settings of the model's generation_config.json. Only these settings and the
        context then limit the length of an answer. Raises RequestError as `generate` does.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; use generate with a prompt")
        many = _many_conversations(messages)
        texts = [self._template.render(conversation) for conversation in many]
        ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        params = _params_for(sampling_params, len(many), self._defaults_for(ids, None))
        params = [
            with_thinking(each, self._parsing(text), self.tokenizer) for each, text in zip(params, texts, strict=True)
        ]
        return self._run(list(texts), ids, params, use_tqdm)

    def _parsing(self, prompt: str) -> ParserSettings:
        formats = self._formats
        is_open = formats.reasoning is not None and formats.reasoning.is_open(prompt)
        return ParserSettings(reasoning=formats.reasoning, is_harmony=formats.is_harmony, is_open=is_open)

    def _defaults_for(self, prompts: list[list[int]], max_tokens: int | None) -> SamplingParams:
        """Returns the default SamplingParams for these prompts. `max_tokens`: used if the model sets none."""
        settings: dict[str, Any] = dict(self._defaults.settings)
        if self._defaults.max_tokens is None or not prompts:
            return SamplingParams(max_tokens=max_tokens, **settings)
        params = SamplingParams(max_tokens=None, **settings)
        return self._defaults.with_length(params, prompts, self.model.max_model_len, None)

    def _run(
        self, texts: list[str | None], prompts: list[list[int]], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        if self._is_shut_down:
            raise EngineDead("this LLM was shut down; make a new one")
        choices: dict[str, _Choice] = {}
        sequences = []
        for prompt_index, (prompt_ids, sampling) in enumerate(zip(prompts, params, strict=True)):
            check_token_ids(prompt_ids, self.model.vocab_size)
            sampling.check_logprobs(self._max_logprobs, self.model.vocab_size)
            check_num_allowed_ids(1, sampling)
            if sampling.structured_outputs is not None:
                validate_here(sampling.grammar, sampling.structured_outputs.field)
            shared_ids = tuple(prompt_ids)  # one object for all choices: the scheduler compares prompts by identity
            seed = secrets.randbits(62)
            leader = None
            stops = StopAutomaton(sampling.stop_strings)
            bad_words = bad_word_ids(self.tokenizer, sampling.bad_word_strings)
            for index in range(sampling.n):
                request_id = f"local/{self._next_id}"
                self._next_id += 1
                decoding = sampling.decoding(
                    index, len(prompt_ids), self.model.max_model_len, self.model.vocab_size, seed
                )
                decoding = msgspec.structs.replace(decoding, bad_words=bad_words)
                decoder = OutputDecoder(self.tokenizer, sampling, self.model.eos_token_ids, prompt_ids, stops)
                choices[request_id] = _Choice(decoder, prompt_index, index)
                sequences.append(
                    CoreSequence(
                        request_id=request_id,
                        prompt_ids=shared_ids,
                        params=decoding,
                        eos_token_ids=self.model.eos_token_ids,
                        fork_of=leader,
                    )
                )
                leader = leader or request_id
        for sequence in sequences:
            self._engine.add(sequence, is_resume=True)  # is_resume: even a full queue accepts it
        try:
            self._finish_all(choices, use_tqdm)
        finally:
            for sequence in sequences:  # no sequence of this batch may stay in the engine, not even after an interrupt
                self._engine.abort(sequence.request_id)
        by_prompt: list[list[_Choice]] = [[] for _ in prompts]
        for choice in choices.values():
            by_prompt[choice.prompt_index].append(choice)
        return [_request_output(*parts) for parts in zip(texts, prompts, by_prompt, strict=True)]

    def _finish_all(self, choices: dict[str, _Choice], use_tqdm: bool) -> None:
        unfinished = set(choices)
        with tqdm(total=len(choices), desc="generate", unit="seq", disable=not use_tqdm) as bar:
            while unfinished:
                for output in self._engine.step():
                    if output.finish_reason == CORRUPT:
                        raise CorruptLogits(CORRUPT_LOGITS)
                    if output.finish_reason == BROKEN_FORM:
                        raise RequestError(output.message, "structured_outputs")
                    if output.sequence_id not in unfinished:
                        continue  # a stop string has ended the choice in an earlier output of this step
                    if choices[output.sequence_id].add(output):
                        # a stop string has ended the choice, but the engine would continue the sequence
                        if output.finish_reason is None:
                            self._engine.abort(output.sequence_id)
                        unfinished.discard(output.sequence_id)
                        bar.update()


def _many_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns a list of prompts. A single text or list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if all(isinstance(item, int) for item in prompts) and prompts:
        return [[item for item in prompts if isinstance(item, int)]]
    return [item for item in prompts if not isinstance(item, int)]


def _many_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Returns a list of conversations. A single list of messages is one conversation."""
    if all(isinstance(item, Mapping) for item in messages) and messages:
        return [[item for item in messages if isinstance(item, Mapping)]]
    return [item for item in messages if not isinstance(item, Mapping)]


def _params_for(
    given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int, default: SamplingParams
) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or default] * num_prompts
    if len(given) != num_prompts:
        raise RequestError(f"{len(given)} sampling_params for {num_prompts} prompts; give one, or one per prompt")
    return list(given)


def _request_output(text: str | None, prompt_ids: list[int], choices: list[_Choice]) -> RequestOutput:
    return RequestOutput(
        prompt=text,
        prompt_token_ids=tuple(prompt_ids),
        prompt_logprobs=choices[0].prompt_logprobs,
        num_cached_tokens=choices[0].num_cached_tokens,
        outputs=tuple(choice.output() for choice in choices),
    )

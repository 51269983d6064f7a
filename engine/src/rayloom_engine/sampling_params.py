"""SamplingParams: a user's settings for one request, with vLLM's names and defaults.

A request becomes n sequences. Ranks get the settings of each sequence as `core.decoding.DecodingParams`. Stop strings,
include_stop_str_in_output and skip_special_tokens are used only where text is made from tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType

from rayloom_engine.common.json_words import first_of, shown
from rayloom_engine.common.ranges import Range
from rayloom_engine.common.seeds import choice_seed
from rayloom_engine.core.decoding import DecodingParams, ThinkingBudget
from rayloom_engine.errors import RequestError
from rayloom_engine.grammar.compile import grammar_of
from rayloom_engine.structured_outputs import StructuredOutputs

MAX_CHOICES = 128  # OpenAI's limit on n
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_CHARS = 4096  # characters of all stop strings together
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 2**20  # the most ids; no vocabulary has as many
MAX_BAD_WORDS = 500
MAX_BAD_WORD_CHARS = 16384  # characters of all bad words together
MAX_COUNT = 2**31 - 1  # limit of token counts and token ids: far above any context, yet every tensor can hold it
GREEDY_BELOW = 1e-5  # a smaller temperature would overflow float32 logits, so it means greedy, as in vLLM

_MAX_NAMED = 5  # a message names at most this many wrong values


class ContextTooLong(RequestError):
    """The prompt and the requested tokens do not fit in the model's context."""


RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "n": Range(low=1, high=MAX_CHOICES, is_whole=True),
        # Temperatures above OpenAI's maximum of 2 are allowed, because they only make answers more random, and users of
        # other servers send them.
        "temperature": Range(low=0.0),
        "top_p": Range(low=0.0, high=1.0),
        "top_k": Range(low=-1, high=MAX_COUNT, is_whole=True),
        "min_p": Range(low=0.0, high=1.0),
        "repetition_penalty": Range(low=0.01, high=100.0),  # outside this range float32 logits overflow
        "presence_penalty": Range(low=-2.0, high=2.0),
        "frequency_penalty": Range(low=-2.0, high=2.0),
        "seed": Range(low=-(2**63), high=2**63 - 1, is_whole=True),
        "min_tokens": Range(low=0, high=MAX_COUNT, is_whole=True),
        "thinking_token_budget": Range(low=-1, high=MAX_COUNT, is_whole=True),
        "max_tokens": Range(low=0, high=MAX_COUNT, is_whole=True),
        # The upper limit is a setting of the server, so check_logprobs checks it.
        "logprobs": Range(low=-1, high=MAX_COUNT, is_whole=True),
        "prompt_logprobs": Range(low=-1, high=MAX_COUNT, is_whole=True),
    }
)
_MAY_BE_NONE = frozenset(("seed", "max_tokens", "logprobs", "prompt_logprobs", "thinking_token_budget"))
_BIAS = Range(low=-100.0, high=100.0)
_TOKEN_ID = Range(low=0, high=MAX_COUNT, is_whole=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The settings of one request. The constructor raises RequestError that names the wrong field."""

    n: int = 1  # choices per prompt
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # [0, 1]; 0 = only the most likely token
    top_k: int = 0  # 0 or -1 = all
    min_p: float = 0.0  # [0, 1]
    repetition_penalty: float = 1.0  # [0.01, 100]; 1 = off
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> bias in [-100, 100]
    seed: int | None = None  # None or -1 = a new seed for each request
    stop: str | Iterable[str] | None = ()  # kept as a tuple; an empty string stops nothing
    stop_token_ids: Iterable[int] | None = ()  # kept as a tuple
    min_tokens: int = 0  # before this many tokens, EOS, stop ids and stop strings do not end the answer
    max_tokens: int | None = 16  # None = up to the end of the context; 0 = no answer, only the prompt's logprobs
    thinking_token_budget: int | None = None  # the most tokens of a chat's reasoning; None or -1 = no limit
    thinking: ThinkingBudget | None = None  # the limit with the tags of the model; only chats set this field
    ignore_eos: bool = False
    # Alternatives per generated token; None = none, 0 = the chosen token only, -1 = the whole vocabulary.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # number of alternatives for each token of the prompt
    # With logprobs: the alternatives are the chosen token and these tokens. The number in logprobs has no effect.
    logprob_token_ids: Iterable[int] | None = ()
    bad_words: Iterable[str] | None = ()  # words that the answer never contains; kept as a tuple
    allowed_token_ids: Iterable[int] | None = None  # only these tokens are chosen; kept as a tuple
    skip_special_tokens: bool = True  # leave special tokens out of the text
    include_stop_str_in_output: bool = False
    speculation: bool = True  # False: no drafts of next tokens are verified for this request
    structured_outputs: StructuredOutputs | None = None  # the form of the answer; None = any
    grammar: str = field(init=False, default="")  # grammar of the form; empty if there is none

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                allowed.check(name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}; lower it", "min_tokens"
            )
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "speculation"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, given {shown(getattr(self, name))}", name)
        # These fields accept several types, and are converted here to one type, although the dataclass is frozen.
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(
            self, "logprob_token_ids", _token_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
        )
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        if self.allowed_token_ids is not None:
            allowed_ids = _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            object.__setattr__(self, "allowed_token_ids", allowed_ids)
            if not allowed_ids:
                raise RequestError(
                    "allowed_token_ids is empty, so no token could be chosen; leave it out or add ids",
                    "allowed_token_ids",
                )
        if self.logprob_token_ids and self.logprobs is None:
            raise RequestError("logprob_token_ids needs logprobs; ask for logprobs, too", "logprob_token_ids")
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        object.__setattr__(self, "grammar", self._grammar())

    def _grammar(self) -> str:
        form = self.structured_outputs
        if form is None:
            return ""
        if not isinstance(form, StructuredOutputs):
            raise RequestError(
                f"structured_outputs must be StructuredOutputs, given {shown(form)}", "structured_outputs"
            )
        if self.allowed_token_ids is not None:
            raise RequestError(
                "allowed_token_ids cannot be combined with a form of the answer (response_format, structured_outputs "
                "or a tool call that must follow); leave one of them out",
                "allowed_token_ids",
            )
        return grammar_of(form)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple without duplicates."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def bad_word_strings(self) -> tuple[str, ...]:
        """`bad_words` as a tuple without duplicates."""
        assert isinstance(self.bad_words, tuple)
        return self.bad_words

    def decoding(
        self,
        index: int,
        prompt_len: int,
        max_model_len: int,
        vocab_size: int,
        fresh_seed: int,
        *,
        max_output_tokens: int | None = None,
    ) -> DecodingParams:
        """Returns the DecodingParams, without bad_words, of choice `index` for a prompt of `prompt_len` tokens.

        `fresh_seed` (any integer >= 0) is used if the user gave no seed. Raises ContextTooLong if prompt and output do
        not fit into `max_model_len`. Raises RequestError for ids outside the vocabulary, or if the answer would have
        too many tokens.
        """
        wanted = self.check_room(prompt_len, max_model_len)
        room = max_model_len - prompt_len
        if max_output_tokens is not None and wanted > max_output_tokens:
            raise RequestError(
                f"max_tokens {wanted} is more than this server allows; ask for at most {max_output_tokens}",
                "max_tokens",
            )
        max_tokens = self.max_tokens if self.max_tokens is not None else min(room, max_output_tokens or room)
        max_tokens = max(max_tokens, 1)  # the step that computes the last prompt token always samples one token
        assert isinstance(self.stop_token_ids, tuple) and isinstance(self.logprob_token_ids, tuple)
        assert isinstance(self.allowed_token_ids, tuple | None)
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", tuple(self.logit_bias)),
            ("logprob_token_ids", self.logprob_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
        ):
            outside = [token_id for token_id in ids if token_id >= vocab_size]
            if outside:
                raise RequestError(
                    f"{name} has token id {first_of(outside, _MAX_NAMED)}, but the model's {vocab_size} ids go from 0 "
                    f"to {vocab_size - 1}; use smaller ids",
                    name,
                )
        return DecodingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=float(self.temperature) if self.temperature >= GREEDY_BELOW else 0.0,
            top_p=float(self.top_p),
            top_k=min(max(self.top_k, 0), vocab_size),
            min_p=float(self.min_p),
            repetition_penalty=float(self.repetition_penalty),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            logit_bias=tuple(sorted(self.logit_bias.items())),
            seed=self.seed_of(index, fresh_seed),
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            allowed_token_ids=self.allowed_token_ids,
            logprobs=0 if self.logprob_token_ids else _num_alternatives(self.logprobs, vocab_size),
            logprob_token_ids=self.logprob_token_ids,
            prompt_logprobs=_num_alternatives(self.prompt_logprobs, vocab_size),
            speculation=self.speculation,
            thinking=self.thinking,
            grammar=self.grammar,
            grammar_after="" if self.structured_outputs is None else self.structured_outputs.after,
        )

    def check_logprobs(self, max_logprobs: int, vocab_size: int) -> SamplingParams:
        """Returns these settings. If a number of alternatives is -1, it is replaced by the vocabulary's size.

        `max_logprobs`: the most alternatives that the server's setting allows. Raises RequestError for more.
        """
        most = vocab_size if max_logprobs == -1 else max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            given = getattr(self, name)
            number = _num_alternatives(given, vocab_size)
            if number is not None and number > most:
                words = f"-1, the whole vocabulary of {vocab_size} tokens" if given == -1 else shown(given)
                raise RequestError(
                    f"{name} must be at most {most} on this server, given {words}; lower it, or start the server with "
                    "a higher --max-logprobs (in an LLMService: spec.engine.args.maxLogprobs)",
                    name,
                )
        if -1 not in (self.logprobs, self.prompt_logprobs):
            return self
        return replace(
            self,
            logprobs=_num_alternatives(self.logprobs, vocab_size),
            prompt_logprobs=_num_alternatives(self.prompt_logprobs, vocab_size),
        )

    def check_room(self, prompt_len: int, max_model_len: int) -> int:
        """Returns the number of tokens that must fit after the prompt.

        Raises ContextTooLong if these tokens do not fit, and RequestError if the prompt has no tokens.
        """
        if prompt_len < 1:
            raise RequestError("the prompt has no tokens; give at least one", "prompt")
        wanted = max(self.max_tokens or 0, self.min_tokens, 1)
        if wanted > max_model_len - prompt_len:
            raise ContextTooLong(
                f"the model's context is {max_model_len} tokens, but the prompt has {prompt_len} and {wanted} more "
                f"were asked for, {prompt_len + wanted} in all; shorten the prompt or lower max_tokens"
            )
        return wanted

    def seed_of(self, index: int, fresh_seed: int) -> int:
        """Returns the seed of choice `index` of a prompt.

        Choices of a prompt have equal DecodingParams except for the seed.
        """
        return choice_seed(fresh_seed if self.seed is None or self.seed == -1 else self.seed, index)


def _num_alternatives(number: int | None, vocab_size: int) -> int | None:
    return vocab_size if number == -1 else number


def check_token_ids(token_ids: Sequence[int], vocab_size: int, field: str = "prompt") -> None:
    """Raises RequestError that names the first id for which the model has no embedding.

    `field`: the request's field with the ids. Ids that come from a tokenizer need this check, too, because a tokenizer
    may have more ids than the model.
    """
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    outside = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
    raise RequestError(
        f"{field} has token id {shown(outside)}, which is out of vocabulary: the model's {vocab_size} ids go "
        f"from 0 to {vocab_size - 1}; leave it out",
        field,
    )


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings: tuple[object, ...] = (stop,)
    if isinstance(stop, Iterable) and not isinstance(stop, str | bytes | Mapping):
        strings = tuple(stop)
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(strings)} strings, at most {MAX_STOP_STRINGS} are allowed", "stop")
    checked: dict[str, None] = {}  # an ordered set
    for string in strings:
        if not isinstance(string, str):
            raise RequestError(f"stop must be a string or a list of strings, given {shown(string)}", "stop")
        if len(string) > MAX_STOP_STRING_CHARS:
            raise RequestError(
                f"a stop string may have {MAX_STOP_STRING_CHARS} characters, given one with {len(string)}", "stop"
            )
        if string:
            checked[string] = None
    num_chars = sum(map(len, checked))
    if num_chars > MAX_STOP_CHARS:
        raise RequestError(
            f"the stop strings have {num_chars} characters together, at most {MAX_STOP_CHARS} are allowed; "
            "give fewer or shorter ones",
            "stop",
        )
    return tuple(checked)


def _bad_words(words: object) -> tuple[str, ...]:
    if words is None:
        return ()
    if not isinstance(words, Iterable) or isinstance(words, str | bytes | Mapping):
        raise RequestError(f"bad_words must be a list of strings, given {shown(words)}", "bad_words")
    checked: dict[str, None] = {}  # an ordered set
    num_chars = 0
    for word in words:
        if not isinstance(word, str):
            raise RequestError(f"bad_words must be a list of strings, given {shown(word)} in it", "bad_words")
        if not word.strip():
            raise RequestError(f"bad_words has {shown(word)}, which is no word; leave it out", "bad_words")
        checked[word] = None
        num_chars += len(word)
        if len(checked) > MAX_BAD_WORDS or num_chars > MAX_BAD_WORD_CHARS:
            raise RequestError(
                f"bad_words has too many words; at most {MAX_BAD_WORDS} words with {MAX_BAD_WORD_CHARS} characters "
                "together are allowed",
                "bad_words",
            )
    return tuple(checked)


def _token_ids(name: str, ids: object, most: int = MAX_STOP_TOKEN_IDS) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes):
        raise RequestError(f"{name} must be a list of token ids, given {shown(ids)}", name)
    token_ids = tuple(islice(ids, most + 1))
    if len(token_ids) > most:
        raise RequestError(f"{name} has more than {most} ids; give fewer", name)
    for token_id in token_ids:
        _TOKEN_ID.check(name, token_id)
    return tuple(dict.fromkeys(token_ids))


def _logit_bias(biases: object) -> dict[int, float]:
    if biases is None:
        return {}
    if not isinstance(biases, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, given {shown(biases)}", "logit_bias")
    if len(biases) > MAX_LOGIT_BIASES:
        raise RequestError(
            f"logit_bias has {len(biases)} entries, at most {MAX_LOGIT_BIASES} are allowed", "logit_bias"
        )
    checked = {}
    no_ids = []
    for key, bias in biases.items():
        # Keys in JSON are strings, so accept a string of digits as an id.
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 else key
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id <= MAX_COUNT:
            no_ids.append(key)
            continue
        _BIAS.check("logit_bias", bias)
        checked[token_id] = float(bias)
    if no_ids:
        given = first_of(no_ids, _MAX_NAMED)
        raise RequestError(f"logit_bias must have token ids as keys, given {given}", "logit_bias")
    return checked

"""Forms: the grammars of a rank's running sequences, on the rank that samples.

The state of a matcher depends only on the token ids in plans, like all state of a rank. So a matcher needs no message
of its own. After a preemption, a rebuild or a restart of the core, a new matcher consumes the generated ids from the
NewSlot.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, TypeVarTuple

import numpy as np
import numpy.typing as npt

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.errors import GrammarFault
from rayloom_engine.grammar.matcher import Mask, Matcher, may_follow_ahead
from rayloom_engine.grammar.preamble import Endings, Preamble, clear
from rayloom_engine.grammar.vocabulary import Vocabulary
from rayloom_engine.worker.builds import Build, Builds

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
Ids = npt.NDArray[np.int64]

# The most recently used grammars are kept for later sequences, up to this number and this total length. The length is
# limited because a matcher's memory grows with the length of its grammar.
_MAX_GRAMMARS = 32
_MAX_BYTES = 256 * 1024
# A rank is idle after this many seconds without a step. This time is longer than a pause of a running batch
# (milliseconds). It is also longer than the time from the server's readiness to the first request of a client that
# waits for the readiness.
QUIET_S = 1.0


class Forms:
    """The vocabulary and the grammars of a rank. A rebuild of the engine keeps them."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary]) -> None:
        """`load_vocabulary` may raise GrammarFault. A thread calls it, for the first form or when the rank is idle."""
        self._builds = Builds()
        # This build has no CPU limit, because it depends on no client's grammar.
        self._vocabulary = Build(load_vocabulary, has_cpu_limit=False)
        self._has_begun = threading.Event()  # the vocabulary is loaded, or is being loaded
        self._is_watched = False
        self._matchers: OrderedDict[str, Build[Matcher]] = OrderedDict()
        self._endings: OrderedDict[str, Build[Endings]] = OrderedDict()

    def report_to(self, report_progress: Callable[[], None]) -> None:
        """Sets the function `report_progress`, which a step calls while it waits for a grammar."""
        self._builds.report_progress = report_progress

    def load_when_idle(self, progress: Callable[[], object], quiet_s: float = QUIET_S) -> None:
        """Loads the vocabulary once `progress` has returned the same value for `quiet_s`. A second call does nothing.

        Loading takes 0.15 s, in which no other Python code of the process runs. So it should delay neither a start nor
        the streams of other sequences.
        """
        if self._is_watched:
            return
        self._is_watched = True

        def watch() -> None:
            seen = progress()
            while not self._has_begun.wait(quiet_s):
                before = seen
                seen = progress()
                if seen == before:
                    self._load()

        threading.Thread(target=watch, name="vocabulary", daemon=True).start()

    def begin(self, params: DecodingParams) -> Form:
        """Returns the form of a sequence. The form has no generated tokens yet. Its grammar is built on a thread."""
        self._load()
        matcher = _kept(self._matchers, params.grammar, lambda: self._build(params.grammar))
        after = params.grammar_after
        endings = _kept(self._endings, after, lambda: self._build_endings(after)) if after else None
        return Form(self._builds, self._vocabulary, matcher, endings, may_follow_ahead=may_follow_ahead(params.grammar))

    def note_wait(self) -> None:
        """Counts the time since the last call as a wait for the grammar that is being built."""
        self._builds.note_wait()

    @property
    def is_built(self) -> bool:
        """True if `token_bytes` does not wait for the vocabulary. Starts to load it if it is not being loaded."""
        self._load()
        return self._builds.is_done(self._vocabulary)

    def wait_a_slice(self) -> None:
        """Waits until the vocabulary is loaded, but at most 0.1 s."""
        self._builds.wait_a_slice(self._vocabulary)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text. Raises GrammarFault if the tokenizer cannot be used."""
        self._load()
        return self._builds.wait_for(self._vocabulary).token_bytes(token_id)

    def _load(self) -> None:
        self._builds.begin(self._vocabulary)
        self._has_begun.set()

    def _build(self, grammar: str) -> Build[Matcher]:
        return self._builds.start(lambda: Matcher.build(self._loaded_vocabulary(), grammar))

    def _build_endings(self, after: str) -> Build[Endings]:
        return self._builds.start(lambda: Endings(self._loaded_vocabulary(), after))

    def _loaded_vocabulary(self) -> Vocabulary:
        """Returns the vocabulary. For the thread of builds, which may wait. Raises GrammarFault if it was given up."""
        if self._vocabulary.given_up and not self._vocabulary.future.done():
            raise GrammarFault(self._vocabulary.given_up)
        return self._vocabulary.future.result()


class Form:
    """The state of one sequence's grammar, after the token ids that were appended."""

    def __init__(
        self,
        builds: Builds,
        vocabulary: Build[Vocabulary],
        matcher: Build[Matcher],
        endings: Build[Endings] | None,
        *,
        may_follow_ahead: bool,
    ) -> None:
        """`may_follow_ahead`: False if the matcher must not consume tokens of a draft; then do not call `ahead`."""
        self._builds = builds
        self._vocabulary = vocabulary
        self._first = matcher
        self._endings = endings
        self.may_follow_ahead = may_follow_ahead
        self._waiting: list[int] = []  # appended ids that the matcher has not consumed yet
        self._consumed: list[int] = []  # ids that the matcher has consumed
        self._matcher: Matcher | None = None
        self._copies_ahead = False  # True: a draft needs a copy of the matcher (see `ahead`)
        self._preamble: Preamble | None = None
        self._mask: Mask = np.zeros(0, dtype=np.int32)  # has its size once there is a matcher
        self._is_ahead = False
        self._fault: GrammarFault | None = None

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds generated ids."""
        self._waiting += token_ids

    @property
    def is_built(self) -> bool:
        """True if `allowed` does not wait for the thread that builds grammars."""
        return self._matcher is not None or self._fault is not None or self._missing() is None

    def wait_a_slice(self) -> None:
        """Waits until the grammar is built, but at most 0.1 s."""
        missing = self._missing()
        if missing is not None:
            self._builds.wait_a_slice(missing)

    def _missing(self) -> Build[Any] | None:
        """Returns a build for which `allowed` would have to wait; None if all builds are done."""
        builds: tuple[Build[Any] | None, ...] = (self._vocabulary, self._first, self._endings)
        return next((build for build in builds if build is not None and not self._builds.is_done(build)), None)

    def catch_up(self, has_time: Callable[[], bool]) -> bool:
        """Consumes appended ids as long as `has_time` returns True. Returns False if more than one id is left.

        Many ids wait after a preemption, a pause of drafts, or a draft that could not be taken back. A usual id takes
        2 us, an id of a very ambiguous grammar 30 ms. Raises GrammarFault.
        """
        return len(self._waiting) <= 1 or self._guarded(self._catch_up, has_time)

    def allowed(self, banned_ids: Sequence[int] | Ids) -> Mask | None:
        """Returns a mask of the tokens that may come next; None if all tokens may.

        `banned_ids` are removed from the mask, unless no other token is left. The mask is valid until the next call
        outside of `ahead`. Raises GrammarFault if the sequence cannot continue.
        """
        return self._guarded(self._next_mask, banned_ids)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """In this context, `append` and `allowed` follow a draft. At its end the form is as it was before.

        A fault of the draft's tokens is forgotten, too. Raises GrammarFault if the sequence cannot continue.
        """
        own = self._guarded(self._read)
        num_consumed = len(self._consumed)
        preamble = None if self._preamble is None else self._preamble.copy()
        if self._copies_ahead:
            self._matcher = self._guarded(own.copy)
        self._is_ahead = True
        try:
            yield
        finally:
            self._is_ahead = False
            self._waiting = []
            self._preamble = preamble
            num_ahead = len(self._consumed) - num_consumed
            del self._consumed[num_consumed:]
            if self._copies_ahead:
                self._matcher = own
                self._fault = None
            else:
                self._take_back(own, num_ahead)

    def legal_prefix(self, token_ids: Sequence[int]) -> int:
        """Returns how many of the tokens, from the first token on, may come next. Raises GrammarFault."""
        return self._guarded(self._legal_prefix, tuple(token_ids))

    def forced(self) -> list[int]:
        """Returns tokens of the text with which the grammar forces the answer to continue; [] if it forces none.

        Raises GrammarFault.
        """
        return self._guarded(self._forced)

    def _guarded(self, call: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
        """Returns the result of the call. An exception becomes the form's fault, and then every call raises it.

        It is not a context manager: entering and leaving one costs a tenth of the time that computing a mask takes.
        """
        if self._fault is not None:
            raise self._fault
        try:
            return call(*arguments)
        except GrammarFault as fault:
            self._fault = fault
            raise
        except Exception as error:  # an exception of the library, even a bug, must only end this sequence
            logger.exception("a grammar cannot be followed")
            self._fault = GrammarFault(f"the grammar library failed: {type(error).__name__}")
            raise self._fault from error

    def _read(self) -> Matcher:
        """Consumes the ids that were appended. Returns the matcher."""
        if self._matcher is None:
            first = self._builds.wait_for(self._first)
            self._preamble = None if self._endings is None else Preamble(self._builds.wait_for(self._endings))
            self._matcher = first.copy()
            self._mask = np.empty(self._builds.wait_for(self._vocabulary).num_words, dtype=np.int32)
        token_ids = self._waiting
        self._waiting = []
        if self._preamble is not None and not self._preamble.is_over:
            token_ids = list(self._preamble.advance(tuple(token_ids)))
        num_consumed = self._matcher.advance(token_ids)
        self._consumed += token_ids[:num_consumed]  # the other ids are end tokens behind the end
        return self._matcher

    def _catch_up(self, has_time: Callable[[], bool]) -> bool:
        waiting = self._waiting
        start = 0
        try:
            while len(waiting) - start > 1:
                if not has_time():
                    return False
                self._waiting = [waiting[start]]
                start += 1
                self._read()
        finally:
            self._waiting = waiting[start:]
        return True

    def _legal_prefix(self, token_ids: tuple[int, ...]) -> int:
        matcher = self._read()
        following = token_ids
        if self._preamble is not None and not self._preamble.is_over:
            following = self._preamble.copy().advance(token_ids)
        num_before = len(token_ids) - len(following)
        return num_before + (matcher.num_accepted(following) if following else 0)

    def _forced(self) -> list[int]:
        matcher = self._read()
        is_before = self._preamble is not None and not self._preamble.is_over
        return [] if is_before else matcher.forced()

    def _next_mask(self, banned_ids: Sequence[int] | Ids) -> Mask | None:
        matcher = self._read()
        mask = np.empty_like(self._mask) if self._is_ahead else self._mask
        if self._preamble is not None and not self._preamble.is_over:
            if not self._preamble.fill(mask):
                return None
        else:
            matcher.fill(mask)
        return self._without(mask, banned_ids)

    def _take_back(self, matcher: Matcher, num_tokens: int) -> None:
        """Takes back the last `num_tokens` tokens that the matcher has consumed. `_consumed` has the other tokens.

        A matcher with a fault cannot take tokens back. Then a new matcher will consume the other tokens, and later
        drafts get copies of the matcher.
        """
        if self._fault is None:
            if num_tokens == 0:
                return
            with suppress(GrammarFault):
                matcher.rollback(num_tokens)
                return
        self._copies_ahead = True
        self._fault = None
        self._matcher = self._guarded(self._builds.wait_for(self._first).copy)
        self._waiting = self._consumed
        self._consumed = []

    def _without(self, mask: Mask, banned_ids: Sequence[int] | Ids) -> Mask:
        """Removes the banned tokens from the mask, unless no other token is left. Returns the mask."""
        if len(banned_ids):
            whole = mask.copy()
            clear(mask, np.asarray(banned_ids, dtype=np.int64))
            if not mask.any():
                # The answer is complete although it has fewer than min_tokens, or the form needs a banned token.
                mask[:] = whole
        return mask


def _kept(kept: OrderedDict[str, Build[_T]], key: str, make: Callable[[], Build[_T]]) -> Build[_T]:
    """Returns the build of `key`, made by `make` if there is none.

    Removes the least recently used builds if there are too many, or if their keys are too long together.
    """
    build = kept.get(key)
    if build is None:
        build = kept[key] = make()
        num_bytes = sum(len(text.encode()) for text in kept)
        while len(kept) > 1 and (len(kept) > _MAX_GRAMMARS or num_bytes > _MAX_BYTES):
            num_bytes -= len(kept.popitem(last=False)[0].encode())
    kept.move_to_end(key)
    return build

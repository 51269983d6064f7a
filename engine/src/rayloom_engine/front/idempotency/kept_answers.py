"""KeptAnswers: lets a client that repeats its request read the answer to the first request.

A request with a RequestName is computed in a task of its own, which writes a KeptAnswer. The connections of the request
and of its repeats read this KeptAnswer. So repeats work at every endpoint whose handler returns a response, for streams
and for whole answers.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from rayloom_engine.config import EngineConfig
from rayloom_engine.front.http.body import hold_body
from rayloom_engine.front.http.body_budget import HeldBody
from rayloom_engine.front.http.errors import ApiError, ClientGone, is_fault
from rayloom_engine.front.idempotency.answer_book import AnswerBook, Entry, KeepLimits, KeyReused
from rayloom_engine.front.idempotency.answer_reader import AnswerReader
from rayloom_engine.front.idempotency.kept_answer import Computation, KeptAnswer
from rayloom_engine.front.idempotency.request_name import IDEMPOTENCY_KEY, RequestName, request_name
from rayloom_engine.front.operations.lifecycle import Lifecycle
from rayloom_engine.front.operations.metrics import Metrics

Handler = Callable[[Request], Awaitable[Response]]
KeptEntry = Entry[KeptAnswer]

MOST_TICK_S = 0.5  # most seconds between two checks of the answers that have no reader
MAX_ANSWER_BYTES = 8 * 1024 * 1024  # a larger answer is sent, but not kept

logger = logging.getLogger(__name__)


def keep_limits(config: EngineConfig) -> KeepLimits:
    """Returns the bounds for a server with these settings."""
    return KeepLimits(seconds=config.repeat_seconds, max_detached_choices=max(1, config.max_num_seqs // 4))


class KeptAnswers:
    """The kept answers of an API port. For one event loop."""

    def __init__(self, limits: KeepLimits, max_body_bytes: int, lifecycle: Lifecycle, metrics: Metrics) -> None:
        """If `limits.seconds` is 0, no answer is kept. A drain of `lifecycle` waits for all readers."""
        self._limits = limits
        self._max_body_bytes = max_body_bytes
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._book: AnswerBook[KeptAnswer] = AnswerBook(limits)
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._book)

    def change(self, limits: KeepLimits, max_body_bytes: int, lifecycle: Lifecycle, metrics: Metrics) -> None:
        """Serves a port with these settings from now on. Kept answers stay.

        A drain of the earlier lifecycle still waits for the readers that began before this call.
        """
        self._limits = self._book.limits = limits
        self._max_body_bytes = max_body_bytes
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._observe()
        self._watch_idle()

    async def answer(self, request: Request, handler: Handler) -> Response:
        """Returns the response of `handler` or, for a repeat, the response to the first request with the same name.

        Raises the exceptions of `handler`, and ApiError 400 or 422 for an Idempotency-Key that cannot be used.
        """
        name = request_name(request)
        if name is not None and name.is_key:
            request.state.seed = name.seed
            if "x-request-id" not in request.headers:
                request.state.request_id = name.request_id
        if name is None or self._limits.seconds == 0:
            return await handler(request)
        body = await self._hold_body(request)
        digest = hashlib.sha256(body.data).digest()
        try:
            entry = self._book.find(name.entry_key(digest), digest)
        except KeyReused:
            body.drop()
            raise _reused(name) from None
        if entry is None:
            return await self._read(request, self._begin(request, handler, name, body, digest), is_repeat=False)
        body.drop()
        self._book.join(entry)
        self._observe()
        return await self._read(request, entry, is_repeat=True)

    async def _hold_body(self, request: Request) -> HeldBody:
        try:
            return await hold_body(request, self._max_body_bytes)
        except Exception as error:
            # counted here: the handler counts its own errors, but it does not run
            self._metrics.observe_failure(error)
            raise

    async def _read(self, request: Request, entry: KeptEntry, *, is_repeat: bool) -> AnswerReader:
        """Waits until the entry's answer has begun. Returns a response that reads this answer."""
        kept = entry.answer
        lifecycle = self._lifecycle
        lifecycle.begin_read()
        reader = AnswerReader(
            kept, request.receive, lambda is_whole: self._left(entry, lifecycle, is_whole=is_whole), is_repeat=is_repeat
        )
        try:
            await reader.until_begun()
        finally:
            has_own_id = request.headers.get("x-request-id") == request.state.request_id
            if is_repeat and kept.request_id is not None and not has_own_id:
                request.state.request_id = kept.request_id  # the first request's id, which its body may have set
        if is_repeat:
            self._metrics.repeats_answered.add(1)
        return reader

    def _begin(self, request: Request, handler: Handler, name: RequestName, body: HeldBody, digest: bytes) -> KeptEntry:
        kept = KeptAnswer(body, lambda num_bytes: self._grown(entry, num_bytes))
        entry = Entry(
            key=name.entry_key(digest),
            digest=digest,
            tenant=request.state.tenant,
            is_strict=name.is_key,
            answer=kept,
        )
        self._release(self._book.add(entry))
        task = asyncio.create_task(_compute(kept, request.scope, handler))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(entry, task))
        return entry

    def _ended(self, entry: KeptEntry, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = ClientGone() if task.cancelled() else task.exception()
        assert error is None or isinstance(error, Exception), error
        if error is not None and not entry.num_readers and is_fault(error):
            logger.error("an answer that nobody read any more failed", exc_info=error)
        kept = entry.answer
        kept.finish(error)
        self._release(self._book.end(entry, time.monotonic(), is_good=error is None and kept.is_good))
        self._observe()
        self._watch_idle()

    def _grown(self, entry: KeptEntry, num_bytes: int) -> None:
        released = self._book.grow(entry, num_bytes)
        if entry.is_kept and entry.num_bytes > MAX_ANSWER_BYTES:
            released += self._book.release([entry])
        self._release(released)

    def _left(self, entry: KeptEntry, lifecycle: Lifecycle, *, is_whole: bool) -> None:
        _measure(entry)
        lifecycle.end_read()
        self._release(self._book.leave(entry, time.monotonic(), is_whole=is_whole))
        if entry.is_kept and entry.is_detached and self._lifecycle.drains:
            self._release(self._book.release([entry]))
        self._observe()
        self._watch_idle()

    def _watch_idle(self) -> None:
        """Regularly checks the answers without a reader, as long as there are any."""
        if self._timer is None and self._book.has_idle:
            tick_s = min(MOST_TICK_S, self._limits.seconds / 2)
            self._timer = asyncio.get_running_loop().call_later(tick_s, self._check_idle)

    def _check_idle(self) -> None:
        self._timer = None
        detached = self._book.detached()
        if self._lifecycle.drains:
            self._release(self._book.release(detached))  # during a drain, repeats reach another server
        for entry in detached:
            _measure(entry)
        self._release(self._book.expire(time.monotonic()))
        self._watch_idle()

    def _release(self, released: list[KeptEntry]) -> None:
        for entry in released:
            entry.answer.stop_keeping()
        if released:
            self._observe()

    def _observe(self) -> None:
        self._metrics.detached_answers.set(self._book.num_detached)


async def _compute(kept: KeptAnswer, scope: Scope, handler: Handler) -> None:
    # Without extensions the handler finds no DirectBody, so every part of the answer passes through `kept`.
    scope = {**scope, "extensions": {}}
    request = Request(scope, kept.receive)
    request.state.on_computation = functools.partial(setattr, kept, "computation")
    try:
        response = await handler(request)
    finally:
        kept.request_id = request.state.request_id
    await response(scope, kept.receive, kept.send)


def begin_computation(request: Request, computation: Computation) -> None:
    """Records the computation of the answer to `request`, in case the answer is kept."""
    on_computation: Callable[[Computation], None] | None = getattr(request.state, "on_computation", None)
    if on_computation is not None:
        on_computation(computation)


def seed_of(request: Request) -> int | None:
    """Returns the seed that follows from the request's Idempotency-Key; None if the request has no such key."""
    return getattr(request.state, "seed", None)


def _measure(entry: KeptEntry) -> None:
    computation = entry.answer.computation
    if computation is not None:
        entry.num_choices = computation.num_choices
        entry.num_tokens = computation.num_prompt_tokens + computation.num_output_tokens


def _reused(name: RequestName) -> ApiError:
    return ApiError(
        422,
        f"the {IDEMPOTENCY_KEY} {name.text} came before with another body; send the same body byte for byte, or a new "
        "key for a new request",
        code="idempotency_key_reused",
    )

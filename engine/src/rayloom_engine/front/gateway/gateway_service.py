"""GatewayService: the state of a gateway, which loads its tokenizer from an engine, or from the cache if there is no
engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from rayloom_engine.core.stats import SchedulerStats
from rayloom_engine.errors import ModelError
from rayloom_engine.front.core_link.engine_choice import PoolRules
from rayloom_engine.front.core_link.engine_link import EngineLink
from rayloom_engine.front.core_link.handshake import CoreAddress
from rayloom_engine.front.gateway.adapter_names import GatewayAdapters
from rayloom_engine.front.gateway.contexts import with_contexts
from rayloom_engine.front.gateway.gateway_config import GatewayConfig
from rayloom_engine.front.gateway.shared_tokenizers import SharedTokenizers
from rayloom_engine.front.gateway.text_cache import TextCache, check_files, text_hash
from rayloom_engine.front.gateway.text_fetch import TextFetch
from rayloom_engine.front.model_text import ModelText, TextFiles
from rayloom_engine.front.operations.service import Service
from rayloom_engine.front.operations.status_document import NO_CORE, ReceivedStatus
from rayloom_engine.protocol.fingerprint import continuation
from rayloom_engine.protocol.messages import CoreStatus, ServedModel
from rayloom_engine.status import EngineStatus, State

SILENCE_S = 10.0  # seconds of silence after which a core is lost; a living core sends a status every second

logger = logging.getLogger(__name__)


class GatewayService(Service):
    """The state of a gateway process. Nothing happens until `run` is called.

    The text of a model is its tokenizer, chat template and generation config.
    """

    def __init__(
        self,
        config: GatewayConfig,
        cores: Mapping[str, CoreAddress],
        cache: TextCache,
        *,
        api_url: str,
        tokenizers: SharedTokenizers | None = None,
    ) -> None:
        """`tokenizers`: the tokenizers of all models of this process; None if the process serves this model alone."""
        rules = PoolRules(
            is_gateway=True,
            hold_s=config.gateway.hold_seconds,
            max_held=config.front.max_queued_requests,
            max_held_tokens=config.gateway.max_held_tokens,
            silence_s=SILENCE_S,
        )
        super().__init__(config.front, cores, api_url=api_url, rules=rules)
        self._cache = cache
        self._tokenizers = tokenizers or SharedTokenizers()
        self._fetch = TextFetch()
        self._changing: asyncio.Task[None] | None = None  # the task that loads another text
        self._failed: set[str] = set()  # engines whose text could not be used; the text of other engines is tried first
        self._last_problem = ""
        self._text_hash = ""  # hash of the text in use
        self._stored_context = 0  # the model's context length, stored with the text
        self.engine_adapters = GatewayAdapters()  # same object as `adapters`; the type has more methods
        self.adapters = self.engine_adapters
        self.num_held: Callable[[], int] = lambda: 0  # number of requests that wait and have no sequences yet
        self.client.on_file_part = self._fetch.receive

    def continue_text(self, before: GatewayService) -> None:
        """Uses the text of `before`, a service of the same model with other settings. So this service is ready at once.

        Call it before `run`. If `before` has no text that can be used, this service loads its text as after a start.
        """
        text, files = before.text, before.files
        if text is None or files is None:
            return
        try:
            files = files.with_settings(Path(text.model.path), self.config)
        except (ModelError, OSError) as error:
            self._report(f"cannot load the tokenizer in {text.model.path}: {error}")
            return
        self.client.pool.model = before.client.pool.model
        self.engine_adapters.continue_from(before.engine_adapters)
        self._text_hash = before._text_hash
        self._stored_context = text.model.max_model_len  # used until this service is connected to the engines
        self.text = ModelText.of(text.model, files)
        self._use_files(files)

    def declare_adapters(self, names: Iterable[str] | None) -> None:
        """Sets the names of the LoRA adapters that the engines are to have; None: the names are not known."""
        self.engine_adapters.declare(names)
        self.lifecycle.wake()

    async def run(self) -> None:
        """Loads the text that the service used last, then keeps the connections to all engines until cancelled."""
        try:
            last = None if self.text is not None else await asyncio.to_thread(self._cache.last)
            files = None if last is None else await self._load(last)
            if last is not None and files is not None:
                self._take_over(last, files)
            await super().run()
        finally:
            if self._changing is not None:
                self._changing.cancel()

    def state(self) -> tuple[State, str]:
        """Returns state and reason. Checks the age of the last statuses, because a silent engine causes no event."""
        self.lifecycle.is_core_serving = self.client.is_core_serving
        return self.lifecycle.state

    def status(self) -> EngineStatus:
        """Builds the /status document, in which the sequences that wait for an engine are the queue."""
        document = super().status()
        held = [sequence for sequence in self.client.unfinished() if sequence.place.engine is None]
        load = document.load.model_copy(update={"queued_tokens": sum(each.num_tokens for each in held)})
        return document.model_copy(update={"load": load})

    def update_metrics(self) -> None:
        """Sets the metrics that change without an event: in a gateway, those of the queue."""
        self.metrics.observe_queue(*self._queue())

    def _received(self) -> ReceivedStatus:
        model = None if self.text is None else self.text.model
        num_running, num_waiting = self._queue()
        stats = SchedulerStats(num_running=num_running, num_waiting=num_waiting)
        return ReceivedStatus(core=msgspec.structs.replace(NO_CORE, model=model, stats=stats), is_connected=True)

    def _queue(self) -> tuple[int, int]:
        """Returns how many sequences engines have, and how many sequences and requests wait for an engine."""
        num_waiting = self.client.num_held()
        return sum(1 for _ in self.client.unfinished()) - num_waiting, num_waiting + self.num_held()

    def _update(self) -> None:
        self._fetch.check_connection()
        super()._update()
        if self.engine_adapters.update(self._links_of_model()):
            self.lifecycle.wake()  # requests may wait for the report
        if self.text is not None:
            self.text = with_contexts(self.text, self._stored_context, self.client.pool)

    def _links_of_model(self) -> list[EngineLink]:
        """Returns the links to engines in the list, without engines that serve another model."""
        pool = self.client.pool
        links = [link for link in pool.links.values() if not link.is_leaving]
        return [link for link in links if continuation(pool.model, link.fingerprint) != "other model"]

    def _on_status(self, link: EngineLink, status: CoreStatus) -> None:
        # An engine that still loads its model has no text, so it is no reason to wait.
        with_text = [
            each for each in self.client.pool.links.values() if each.is_connected and each.fingerprint is not None
        ]
        if all(each.name in self._failed for each in with_text):
            self._failed.clear()
        if status.model is not None and self._wants_text_of(link) and self._changing is None:
            self._changing = asyncio.create_task(self._take_text(link, status.model))
        self._update()

    def _wants_text_of(self, link: EngineLink) -> bool:
        """True if the gateway should take the text of `link`'s engine. Its first text may come from any engine.

        A gateway replaces its text if `link`'s engine serves, and if no connected engine has the gateway's text. An
        engine that is no longer in the list does not count, because it only finishes its sequences.
        """
        if link.fingerprint is None or link.name in self._failed:
            return False
        if self.text is None:
            return True
        others = (other for other in self.client.pool.links.values() if other.is_connected and not other.is_leaving)
        statuses = [other.status for other in others]
        models = [status.model for status in statuses if status is not None and status.model is not None]
        return link.is_serving and self._text_hash not in map(text_hash, models)

    async def _take_text(self, link: EngineLink, model: ServedModel) -> None:
        try:
            stored = await asyncio.to_thread(self._cache.find, model)
            if stored is None:
                check_files(model.text_files)
                contents = {file.sha256: await self._fetch.fetch(link, file) for file in model.text_files}
                stored = await asyncio.to_thread(self._cache.store, model, contents)
                logger.info("took %d text files from %s", len(contents), link.name)
            files = await self._load(stored)
            if files is None:
                self._failed.add(link.name)
                return
            # The cache records the text before requests use it: so a gateway that has served can start without engines.
            await asyncio.to_thread(self._cache.use, stored)
            self._take_over(stored, files)
        except ModelError as error:
            self._failed.add(link.name)
            self._report(f"cannot take the tokenizer from {link.name}: {error}")
        except Exception:  # Nobody awaits this task. The next status starts another task.
            self._failed.add(link.name)
            logger.exception("cannot take the tokenizer from %s", link.name)
        finally:
            self._changing = None

    async def _load(self, model: ServedModel) -> TextFiles | None:
        """Returns a stored text. If the text cannot be used, reports the problem and returns None."""
        try:
            return await TextFiles.load(Path(model.path), self.config, self._tokenizers.load)
        except (ModelError, OSError) as error:
            self._report(f"cannot load the tokenizer in {model.path}: {error}")
            return None

    def _take_over(self, model: ServedModel, files: TextFiles) -> None:
        """Uses `files`, the text of `model`, from now on."""
        self.client.pool.model = model.fingerprint
        self._text_hash = text_hash(model)
        self._stored_context = model.max_model_len
        self.text = ModelText.of(model, files)
        self._use_files(files)
        logger.info("text of %s, %s", model.architecture, model.commit or "no commit")

    def _report(self, problem: str) -> None:
        """Logs a problem once, not at every attempt."""
        if problem != self._last_problem:
            logger.error("%s", problem)
            self._last_problem = problem

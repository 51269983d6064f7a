"""Service: the state of one API server process, shared by all handlers. Builds the status document and the metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from rayloom_engine.common.process import node_name
from rayloom_engine.config import EngineConfig
from rayloom_engine.errors import ModelError
from rayloom_engine.front.core_link.core_client import CoreClient
from rayloom_engine.front.core_link.engine_choice import PoolRules
from rayloom_engine.front.core_link.engine_link import EngineLink
from rayloom_engine.front.core_link.handshake import CoreAddress
from rayloom_engine.front.model_text import ModelText, TextFiles
from rayloom_engine.front.operations.adapters import AdapterList, AdapterNames, named_paths
from rayloom_engine.front.operations.core_drain import num_in_core, wait_for_empty_core
from rayloom_engine.front.operations.engines_document import engines_document
from rayloom_engine.front.operations.form_checks import FormChecks
from rayloom_engine.front.operations.lifecycle import Lifecycle, stall_of
from rayloom_engine.front.operations.managed_adapters import ManagedAdapters
from rayloom_engine.front.operations.metrics import Metrics
from rayloom_engine.front.operations.rank_files import RankFiles
from rayloom_engine.front.operations.status_document import NO_CORE, FrontFigures, ReceivedStatus, status_document
from rayloom_engine.protocol.messages import CoreStatus, Draining, EngineAdapters, NeedAdapters
from rayloom_engine.status import EngineStatus, State

logger = logging.getLogger(__name__)

ENGINE_VERSION = version("rayloom-engine")
# Seconds that a reader of the metrics waits for a status. A core whose I/O thread waits for the GIL answers later.
_METRICS_WAIT_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Time limits on the HTTP side, in seconds."""

    ping_s: float = 10.0  # without an event for this time, a stream gets an SSE comment, so that proxies keep it open
    # Time without output after which a stream's status line (200) is sent. Until then, a refusal because of a full
    # queue can still be sent as a 429.
    accept_s: float = 1.0
    adapters_s: float = 30.0  # pause between attempts to load a managed adapter
    adapters_at_start_s: float = 60.0  # longest wait of a starting front for managed adapters
    adapters_at_restart_s: float = 1.0  # longest wait of a restarted front for managed adapters
    ready_s: float = 30.0  # a request waits at most this long for a restarted front to be ready


@dataclass(frozen=True, slots=True)
class FrontStart:
    """The number of this start of the front: the supervisor starts a new front when a front dies."""

    number: int = 1  # counted from 1; higher numbers are restarts
    server_started: float | None = None  # Unix time of the first front's start; None: this front is the first
    adapters_file: Path | None = None  # stores the list of adapters for later fronts

    @property
    def wanted_file(self) -> Path | None:
        """The file beside `adapters_file` that stores the wanted list of managed adapters."""
        file = self.adapters_file
        return None if file is None else file.with_stem(f"{file.stem}-wanted")


class Service:
    """The state of one API server process. Nothing happens until `run` is called."""

    def __init__(
        self,
        config: EngineConfig,
        cores: Mapping[str, CoreAddress],
        *,
        api_url: str,
        waits: Waits | None = None,
        start: FrontStart | None = None,
        rules: PoolRules | None = None,
    ) -> None:
        """`cores`: the addresses of engines by name. The front inside an engine has one address, and no `rules`."""
        start = start or FrontStart()
        self._is_restart = is_restart = start.number > 1
        self.config = config
        self.waits = waits or Waits()
        self.lifecycle = Lifecycle(is_restart=is_restart)
        self.form_checks = FormChecks()
        self.rank_files = RankFiles(lambda needed: self.client.tell(NeedAdapters(needed)))
        self.adapter_list = AdapterList(config, start.adapters_file, self.rank_files)
        self.adapters: AdapterNames = self.adapter_list
        self._wanted_adapters = named_paths(config.adapters)
        self.managed_adapters = (
            ManagedAdapters(self.adapter_list, self._wanted_adapters, self.waits.adapters_s, start.wanted_file)
            if config.managed_adapters
            else None
        )
        self.metrics = Metrics(
            config.api_model_name, config.metrics_prefix, prefix_caching=config.enable_prefix_caching
        )
        self.text: ModelText | None = None
        self.on_unusable: Callable[[str], None] = lambda _: None  # called with the reason why no text can be loaded
        self._api_url = api_url
        now = time.time()
        self.created = int(now if start.server_started is None else start.server_started)
        # Uptime uses the monotonic clock, which cannot jump. It counts from the start of the first front.
        age_s = 0.0 if start.server_started is None else max(0.0, now - start.server_started)
        self._started_s = time.monotonic() - age_s
        self.files: TextFiles | None = None  # the model's text files; None before they are read
        self._loading: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None  # the task that keeps the managed adapters loaded
        self.client = CoreClient(
            cores,
            on_status=self._on_status,
            on_change=self._update,
            on_recovery=self.metrics.observe_recovery,
            rules=rules,
        )
        if not self.client.rules.is_gateway:
            self.lifecycle.on_drain = lambda is_draining: self.client.tell(Draining(is_draining))
        self._front_recovery = (
            self.client.recoveries.add("front_lost", "front", node_name(), at=now, now_s=time.monotonic())
            if is_restart
            else None
        )

    async def run(self) -> None:
        """Keeps the connection to the core open until `run` is cancelled."""
        await self.client.run()

    def fail_all(self, error: Exception) -> None:
        """Ends every unfinished sequence with `error`."""
        self.client.fail_all(error)

    async def wait_for_gateways(self, timeout_s: float) -> int:
        """Waits in a drain until gateways have no sequences in this engine.

        Returns the number of sequences that are left after `timeout_s`. Gateways move their sequences to another engine
        at once. Without another engine, the sequences finish here.
        """
        if self.config.front_port is None or await wait_for_empty_core(self.client, self.lifecycle, timeout_s):
            return 0
        return num_in_core(self.client)

    def engines(self) -> dict[str, Any] | None:
        """Returns the admin port's /engines document; None if this is no gateway."""
        return engines_document(self.client) if self.client.rules.is_gateway else None

    def status_json(self, *, is_minimal: bool) -> str:
        """Returns the admin port's /status document as JSON. `is_minimal`: only the fields that the operator reads."""
        document = self.status()
        return document.minimal_json() if is_minimal else document.model_dump_json()

    def of_model(self, name: str) -> Self | None:
        """Returns this service if its model has this name, else None."""
        return self if name == self.config.api_model_name else None

    def model_text(self) -> ModelText:
        """Returns the loaded tokenizer and template. Raises ApiError 503 if the front does not accept requests."""
        self.lifecycle.check_accepts()
        assert self.text is not None
        return self.text

    def state(self) -> tuple[State, str]:
        """The current state and its reason. Checks ages at every call, because a core that hangs sends no event."""
        core = self.client.status
        is_serving = core is not None and self.client.is_core_serving
        self.lifecycle.stall = stall_of(core, self.client.status_age_s) if core is not None and is_serving else ""
        return self.lifecycle.state

    def status(self) -> EngineStatus:
        """Builds the admin port's /status document."""
        state, reason = self.state()
        figures = FrontFigures(
            engine_version=ENGINE_VERSION,
            state=state,
            reason=reason,
            uptime_s=time.monotonic() - self._started_s,
            num_in_flight=self.lifecycle.num_in_flight,
            num_finished=int(self.metrics.finished.value()),
            num_failed=int(self.metrics.failed.value()),
            first_token_seconds=self.metrics.request_first_token_s.cumulative(),
            recoveries=self.client.recoveries.recoveries,
            adapters=None if self.managed_adapters is None else self.managed_adapters.reports(),
            api_url=self._api_url,
        )
        return status_document(self.config, self._received(), figures)

    def _received(self) -> ReceivedStatus:
        return ReceivedStatus(
            core=self.client.status or NO_CORE,
            age_s=self.client.status_age_s,
            is_connected=self.client.is_connected,
        )

    def update_metrics(self) -> None:
        """Sets the metrics that change without an event."""
        if self.client.status is not None:
            self.metrics.observe_heartbeats(self.client.status, self.client.status_age_s)

    async def metrics_text(self) -> str:
        """Returns all metrics in Prometheus' text format, with the present numbers of running and waiting sequences.

        The core's usual status may be a second old, so a new one is requested. A gateway knows the numbers itself.
        """
        if not self.client.rules.is_gateway:
            for link in self.client.pool.links.values():
                await link.renew_status(_METRICS_WAIT_S)
        self.update_metrics()
        return self.metrics.text()

    def _on_status(self, _link: EngineLink, status: CoreStatus) -> None:
        self.metrics.observe_core(status, self.client.core_pid)
        self.rank_files.received(status)
        folder = status.model_folder or (status.model.path if status.model is not None else "")
        if folder and self._loading is None:
            self._loading = asyncio.create_task(self._load_files(Path(folder)))
        if status.state == "failed" and not self.lifecycle.failure:
            self.lifecycle.fail(status.message or "the core failed")
            logger.error("the engine failed: %s", self.lifecycle.failure)
        self._update()

    async def _load_files(self, folder: Path) -> None:
        try:
            files = await TextFiles.load(folder, self.config)
            await self._start_adapters(folder)
            self._use_files(files)
        except (ModelError, OSError) as error:
            logger.error("%s", error)
            self._give_up(str(error))
        except Exception as error:  # nobody awaits this task: without `_give_up` the front would never end its start
            logger.exception("cannot load the tokenizer in %s", folder)
            self._give_up(f"cannot load the tokenizer in {folder}: {type(error).__name__}: {error}")

    async def _start_adapters(self, folder: Path) -> None:
        """Loads the adapters. Raises ModelError, but not for managed adapters: /status reports their problems.

        The core gets the list only after these adapters are loaded, because gateways forget each name that a list
        lacks. Managed adapters that take long are loaded while the front serves: a hub that does not answer must not
        delay the model.
        """
        if self.managed_adapters is None:
            await self.adapter_list.start(folder, self._wanted_adapters)
        else:
            await self.adapter_list.start(folder, {})
            self._keeping = asyncio.create_task(self.managed_adapters.keep(folder))
            # An earlier front has stored the adapters that it had loaded, so a restart need not wait for the others.
            most_s = self.waits.adapters_at_restart_s if self._is_restart else self.waits.adapters_at_start_s
            await self.managed_adapters.wait_for_first_try(most_s)
        self.adapter_list.on_change = self._report_adapters
        self._report_adapters()

    def _report_adapters(self) -> None:
        self.client.tell(EngineAdapters(tuple(self.adapter_list.entries)))

    def _use_files(self, files: TextFiles) -> None:
        """Uses the text in `files`. From now on, the front becomes ready as soon as its core serves."""
        self.files = files
        if words := files.defaults.words():
            logger.info(
                "requests that leave settings out get those of the model's generation_config.json: %s; "
                "--generation-config none turns this off",
                words,
            )
        self._update()

    def _give_up(self, reason: str) -> None:
        self.lifecycle.fail(reason)
        self.on_unusable(reason)

    def _update(self) -> None:
        """Updates the lifecycle from the states of the core and the tokenizer."""
        lifecycle = self.lifecycle
        lifecycle.is_core_serving = self.client.is_core_serving
        model = self.client.status.model if self.client.status is not None else None
        if self.text is None and self.files is not None and model is not None:
            self.text = ModelText.of(model, self.files)
        # Requests to a gateway wait until an engine serves, so a gateway is ready without an engine.
        can_begin = self.client.is_core_serving or self.client.rules.is_gateway
        if not lifecycle.was_ready and can_begin and self.text is not None:
            lifecycle.become_ready()
            logger.info("ready: %s at %s", self.config.api_model_name, self._api_url)
            if self._front_recovery is not None:
                self._front_recovery.end(time.monotonic())
                self.metrics.observe_recovery(self._front_recovery)
        if not self.client.is_connected:
            self.metrics.forget_batch()
        lifecycle.waiting_for = self._waiting_for()

    def _waiting_for(self) -> str:
        core = self.client.status
        if not self.client.is_connected:
            return "waiting for the core"
        if core is not None and core.state == "recovering":
            where = f" (node {core.lost_node})" if core.lost_node else ""
            return core.message + where + (f"; at {core.phases[-1].name}" if core.phases else "")
        if not self.client.is_core_serving and core is not None and core.phases:
            return f"the core is at {core.phases[-1].name}"
        return "loading the tokenizer" if self.files is None else "the core is starting"

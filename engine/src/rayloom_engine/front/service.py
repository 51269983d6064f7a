"""Service: what the front's handlers share. The model's text side is loaded here, when the core says where it is."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rayloom_engine.common.process import node_name
from rayloom_engine.config import BLOCK_SIZE, EngineConfig
from rayloom_engine.errors import ModelError
from rayloom_engine.front.core_link.core_client import CoreClient
from rayloom_engine.front.operations.lifecycle import Lifecycle, stall_of
from rayloom_engine.front.operations.metrics import Metrics
from rayloom_engine.protocol.messages import CoreStatus, ModelStatus
from rayloom_engine.sampling_params import ContextTooLong
from rayloom_engine.status import (
    EngineStatus,
    KvCache,
    Model,
    Phase,
    Rank,
    Recovery,
    RecoveryPhase,
    Requests,
    State,
)
from rayloom_engine.text.chat_template import ChatTemplate
from rayloom_engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

ENGINE_VERSION = version("rayloom-engine")

# Below this many characters, tokenising takes less than the hop to a thread and back.
ENCODE_IN_THREAD_ABOVE_CHARS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """What turns a model's text into ids and back."""

    model: ModelStatus
    tokenizer: Tokenizer
    template: ChatTemplate | None

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; long texts in a thread, so that the streams go on.

        Raises ContextTooLong at once for a text that cannot fit whatever its tokens are: megabytes take seconds.
        """
        if len(text) > self.model.max_model_len * self.tokenizer.max_token_chars:
            raise ContextTooLong(
                f"the text has {len(text)} characters, more than the model's context of "
                f"{self.model.max_model_len} tokens can hold; shorten it"
            )
        if len(text) <= ENCODE_IN_THREAD_ABOVE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Times of the HTTP side, in seconds."""

    ping_s: float = 10.0  # an SSE comment after this long without an event, so that proxies keep the connection
    # A stream's status line is sent after this long even when the core has said nothing yet. Until then a refusal (full
    # queue) can still be a 429.
    accept_s: float = 1.0
    ready_s: float = 30.0  # how long requests wait for a restarted front to be ready


class Service:
    """One front. `run` must be running for anything to happen."""

    def __init__(
        self,
        config: EngineConfig,
        core_address: str,
        token: str,
        front_id: str,
        *,
        api_url: str,
        waits: Waits | None = None,
        start: int = 1,
        server_started: float | None = None,
    ) -> None:
        """`start` says which front of this server it is, from 1; `server_started` is the Unix time of the first one."""
        self.config = config
        self.waits = waits or Waits()
        self.lifecycle = Lifecycle(is_restart=start > 1)
        self.metrics = Metrics(config.api_model_name)
        self.text: ModelText | None = None
        self._api_url = api_url
        now = time.time()
        self.created = int(now if server_started is None else server_started)
        # By the clock that cannot jump, but counted from the first front's start.
        self._started_s = time.monotonic() - (0.0 if server_started is None else max(0.0, now - server_started))
        self._loading: asyncio.Task[None] | None = None
        self.client = CoreClient(
            core_address,
            token,
            front_id,
            on_status=self._on_status,
            on_change=self._update,
            on_recovery=self.metrics.observe_recovery,
        )
        self._front_recovery = (
            self.client.recoveries.add("front_lost", "front", node_name(), at=now, now_s=time.monotonic())
            if start > 1
            else None
        )

    async def run(self) -> None:
        """Talk to the core until cancelled."""
        await self.client.run()

    def model_text(self) -> ModelText:
        """The loaded text side. Raises ApiError 503 when the front does not accept requests."""
        self.lifecycle.check_accepts()
        assert self.text is not None
        return self.text

    def state(self) -> tuple[State, str]:
        """The state as of now and the reason for it; a hung core is found by looking at the clock."""
        core = self.client.status
        is_serving = core is not None and self.client.is_core_serving
        self.lifecycle.stall = (
            stall_of(
                core.ranks,
                core.last_token_age_s,
                self.client.status_age_s,
                core.heartbeat_age_s,
                core.last_work_age_s,
            )
            if core and is_serving
            else ""
        )
        return self.lifecycle.state

    def status(self) -> EngineStatus:
        """The admin port's /status document."""
        core = self.client.status
        state, reason = self.state()
        is_connected = self.client.is_connected  # ranks and batches of a lost core are gone with it
        stats = core.stats if core is not None else None
        age_s = self.client.status_age_s
        last_token_age_s = core.last_token_age_s if core else None
        last_work_age_s = core.last_work_age_s if core else None
        num_blocks = stats.num_blocks if stats else 0
        num_free = stats.num_free_blocks if stats else 0
        return EngineStatus(
            engine_version=ENGINE_VERSION,
            state=state,
            reason=reason,
            executor=core.executor if core else "",
            epoch=core.epoch if core else 0,
            step=core.step if core else 0,
            last_token_age_seconds=None if last_token_age_s is None else last_token_age_s + age_s,
            last_work_age_seconds=None if last_work_age_s is None else last_work_age_s + age_s,
            uptime_seconds=time.monotonic() - self._started_s,
            model=self._model(core.model) if core and core.model else None,
            startup=[
                Phase(
                    name=phase.name,
                    seconds=phase.seconds,
                    done=phase.done,
                    total=phase.total,
                    unit=phase.unit,
                    finished=phase.is_finished,
                )
                for phase in (core.phases if core else ())
            ],
            ranks=[
                Rank(
                    rank=rank.rank,
                    node=rank.node,
                    host=rank.host,
                    pid=rank.pid,
                    phase=rank.phase,
                    heartbeat_age_seconds=rank.heartbeat_age_s + age_s,
                    step=rank.step,
                    memory_bytes=rank.memory_bytes,
                    advance=rank.advance,
                    communication_seconds=rank.communication_s,
                    weight_bytes_read=rank.weight_bytes_read,
                )
                for rank in (core.ranks if core and is_connected else ())
            ],
            requests=Requests(
                in_flight=self.lifecycle.num_in_flight,
                running=stats.num_running if stats and is_connected else 0,
                waiting=stats.num_waiting if stats and is_connected else 0,
                finished=int(self.metrics.finished.value()),
                failed=int(self.metrics.failed.value()),
                first_token_seconds=self.metrics.request_first_token_s.cumulative(),
            ),
            kv_cache=KvCache(
                num_blocks=num_blocks,
                num_free_blocks=num_free,
                block_size=BLOCK_SIZE,
                usage=(num_blocks - num_free) / num_blocks if num_blocks else 0.0,
            ),
            recoveries=[
                Recovery(
                    cause=recovery.cause,
                    process=recovery.process,
                    node=recovery.node,
                    at=recovery.at,
                    seconds=recovery.seconds,
                    replayed_requests=recovery.replayed_requests,
                    phases=[RecoveryPhase(name=phase.name, seconds=phase.seconds) for phase in recovery.phases],
                )
                for recovery in self.client.recoveries.recoveries
            ],
            api_url=self._api_url,
        )

    def metrics_text(self) -> str:
        """All metrics in Prometheus' text format."""
        if self.client.status is not None:
            self.metrics.observe_heartbeats(self.client.status, self.client.status_age_s)
        return self.metrics.text()

    def _model(self, model: ModelStatus) -> Model:
        return Model(
            name=self.config.api_model_name,
            source=self.config.model,
            commit=model.commit,
            architecture=model.architecture,
            num_parameters=model.num_parameters,
            dtype=model.dtype,
            compute_dtype=model.compute_dtype,
            weight_bytes=model.weight_bytes,
            max_model_len=model.max_model_len,
        )

    def _on_status(self, status: CoreStatus) -> None:
        self.metrics.observe_core(status)
        if status.model is not None and self._loading is None:
            self._loading = asyncio.create_task(self._load_text(status.model))
        if status.state == "failed" and not self.lifecycle.failure:
            self.lifecycle.fail(status.message or "the core failed")
            logger.error("the engine failed: %s", self.lifecycle.failure)
        self._update()

    async def _load_text(self, model: ModelStatus) -> None:
        folder = Path(model.path)
        try:
            tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
            template = await asyncio.to_thread(ChatTemplate.load, folder, tokenizer.special_tokens)
        except (ModelError, OSError) as error:
            self.lifecycle.fail(str(error))
            logger.error("cannot load the tokenizer: %s", error)
            return
        except Exception as error:  # nobody awaits this task: without a failure the front would start for ever
            self.lifecycle.fail(f"cannot load the tokenizer in {folder}: {type(error).__name__}: {error}")
            logger.exception("cannot load the tokenizer in %s", folder)
            return
        self.text = ModelText(model=model, tokenizer=tokenizer, template=template)
        self._update()

    def _update(self) -> None:
        """Bring the lifecycle in line with what is known of core and tokenizer."""
        lifecycle = self.lifecycle
        lifecycle.is_core_serving = self.client.is_core_serving
        if not lifecycle.was_ready and self.client.is_core_serving and self.text is not None:
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
        return "loading the tokenizer" if self.text is None else "the core is starting"

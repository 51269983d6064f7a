"""RunningModels: all models of a gateway. Adds, changes and ends models when the models document changes."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from rayloom_engine.errors import ConfigError
from rayloom_engine.front.core_link.handshake import LinkTls
from rayloom_engine.front.gateway.adapter_names import AdapterState
from rayloom_engine.front.gateway.gateway_config import GatewayConfig
from rayloom_engine.front.gateway.gateway_service import GatewayService
from rayloom_engine.front.gateway.models.documents import engines_of_models, status_of_models, unusable_keys
from rayloom_engine.front.gateway.models.gateway_status import GatewayStatus, ModelsFileStatus
from rayloom_engine.front.gateway.models.key_ring import KeyHolder, KeyRing
from rayloom_engine.front.gateway.models.model_names import ModelNames, key_files
from rayloom_engine.front.gateway.models.models_document import ModelEntry, ModelsDocument, without_models
from rayloom_engine.front.gateway.models.running_model import RunningModel, SharedParts
from rayloom_engine.front.gateway.shared_tokenizers import SharedTokenizers
from rayloom_engine.front.operations.lifecycle import Lifecycle
from rayloom_engine.front.operations.metrics import metrics_text
from rayloom_engine.status import State

logger = logging.getLogger(__name__)

_RESTARTED = "model %s: restarted with other settings; running requests finish with the old ones"


class RunningModels:
    """The state of a gateway process with several models. Connects to no engine until `run` is called.

    Its lifecycle accepts requests as soon as one model does. A drain of the process drains every model.
    """

    def __init__(
        self, config: GatewayConfig, document: ModelsDocument, *, api_url: str, tls: LinkTls | None = None
    ) -> None:
        """Raises ConfigError if the folder for tokenizers cannot be written. `tls`: for connections to engines."""
        self.config = config
        self.lifecycle = Lifecycle()
        self.lifecycle.on_drain = self._wake_models
        self.created = int(time.time())
        self._started_s = time.monotonic()  # for the uptime, because the wall clock may jump
        # Returns the part of `/status` about the models file; an empty part if the document does not come from a file.
        self.file_status: Callable[[], ModelsFileStatus] = ModelsFileStatus
        self.ring = KeyRing()
        self.ring.on_change = self._observe_keys
        self.models: dict[str, RunningModel] = {}
        self.leaving: list[RunningModel] = []  # removed or replaced models that still have running requests
        self._shared = SharedParts(
            config=config,
            lifecycle=self.lifecycle,
            tokenizers=SharedTokenizers(),
            api_url=api_url,
            tls=tls,
            on_ready=self._update_readiness,
        )
        self._group: asyncio.TaskGroup | None = None
        self._body_limits: dict[frozenset[str], int] = {}  # names that a key may use -> the most bytes of a body
        self._tasks: dict[RunningModel, asyncio.Task[None]] = {}
        self.names = self._names_of(document)
        self.apply(document)

    async def run(self) -> None:
        """Runs all models until it is cancelled, including models that are added later."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for model in self.models.values():
                self._start(model)
            await self.ring.watch()

    def apply(self, document: ModelsDocument) -> None:
        """Changes the models and names to those of `document`.

        A model with other settings is replaced by a new RunningModel, and the old RunningModel finishes its requests.
        Other changes of a model's entry do not interrupt streams. A model that cannot be made is not served. In this
        case, all other changes are made, so that removals and key files always apply; then ConfigError is raised.
        """
        new, problems = self._new_models(document)
        document = without_models(document, problems) if problems else document
        before = self.models
        for name, model in new.items():
            if name in before:
                model.continue_from(before[name])
        self.models = {name: new.get(name) or before[name] for name in document.models}
        for name, model in self.models.items():
            model.service.declare_adapters(document.declared_adapters(name))
        self.ring.set_files(key_files(document))
        self.names = self._names_of(document)
        self._body_limits.clear()
        for name, model in before.items():
            if name not in self.models:
                logger.info("model %s: removed; its running requests finish", name)
            if self.models.get(name) is not model:
                self._let_leave(model)
        for name, entry in document.models.items():
            if name in new:
                logger.info(_RESTARTED if name in before else "model %s: started", name)
                self._start(new[name])
            elif entry != before[name].entry:
                logger.info("model %s: has other engines or keys; its streams continue", name)
                before[name].change(entry)
        for model in self.leaving:
            known = document.models.get(model.name)
            if known is not None:
                model.change(known)  # its streams continue on the engines of the model that replaces it
        self._observe_keys()
        self._update_readiness()
        if problems:
            raise ConfigError("; ".join(f"models.{name}: {problem}" for name, problem in problems.items()))

    def _names_of(self, document: ModelsDocument) -> ModelNames:
        return ModelNames(
            document, self.ring, adapter_state=self._adapter_state, check_adapters_known=self._check_adapters_known
        )

    def _adapter_state(self, model: str, name: str) -> AdapterState:
        return self.models[model].service.engine_adapters.state(name) if model in self.models else "unknown"

    def _check_adapters_known(self, model: str, name: str) -> None:
        if model in self.models:
            self.models[model].service.adapters.check_known(name)

    def max_body_bytes(self, caller: KeyHolder) -> int:
        """Returns the most bytes of a body: the largest limit of the models that requests of `caller` may reach."""
        known = self._body_limits.get(caller.names)
        if known is None:
            limits = (self.models[name].max_body_bytes for name in self.names.reachable(caller))
            known = self._body_limits[caller.names] = max(limits, default=self.config.front.max_body_bytes)
        return known

    def fail_all(self, error: Exception) -> None:
        """Ends every unfinished sequence with `error`."""
        for model in [*self.models.values(), *self.leaving]:
            model.service.fail_all(error)

    async def wait_for_gateways(self, timeout_s: float) -> int:
        """Returns 0, because no gateway connects to this process."""
        return 0

    def state(self) -> tuple[State, str]:
        """Returns state and reason. The gateway serves as long as one model does."""
        states = [model.service.state()[0] for model in self.models.values()]
        self.lifecycle.is_core_serving = "serving" in states
        return self.lifecycle.state

    async def metrics_text(self) -> str:
        """Returns the metrics of `models` in Prometheus' text format. Models in `leaving` are left out."""
        services = [model.service for model in self.models.values()]
        for service in services:
            service.update_metrics()
        return metrics_text([service.metrics for service in services])

    def engines(self) -> dict[str, Any]:
        """Returns the admin port's /engines document."""
        return engines_of_models(self.models, self.leaving)

    def status_json(self, *, is_minimal: bool) -> str:
        """Returns the admin port's /status document. The minimal document leaves out the models."""
        state, reason = self.state()
        return GatewayStatus(
            version="v1",
            state=state,
            reason=reason,
            in_flight=self.lifecycle.num_in_flight,
            uptime_seconds=time.monotonic() - self._started_s,
            models_file=self.file_status(),
            unusable_keys=unusable_keys(self.ring),
            models={} if is_minimal else status_of_models(self.models),
        ).model_dump_json(exclude_defaults=is_minimal)

    def of_model(self, name: str) -> GatewayService | None:
        """Returns the service of the model with this name; None if there is no such model. An alias is no model."""
        model = self.models.get(name)
        return None if model is None else model.service

    def _new_models(self, document: ModelsDocument) -> tuple[dict[str, RunningModel], dict[str, str]]:
        """Returns two dicts by name: the models that were made for `document`, and why other models cannot be made."""
        new, problems = {}, {}
        for name, entry in document.models.items():
            if self._needs_new(name, entry):
                try:
                    new[name] = RunningModel(name, entry, self._shared)
                    new[name].num_left_waiting = functools.partial(self._num_left_waiting, name)
                except ConfigError as error:
                    problems[name] = str(error)
        return new, problems

    def _num_left_waiting(self, name: str) -> int:
        """Returns how many requests and sequences wait at the models in `leaving` that have this name."""
        models = [model for model in self.leaving if model.name == name]
        return sum(len(model.held) + model.service.client.num_held() for model in models)

    def _needs_new(self, name: str, entry: ModelEntry) -> bool:
        known = self.models.get(name)
        return known is None or known.entry.given_settings != entry.given_settings

    def _start(self, model: RunningModel) -> None:
        if self._group is not None:
            self._tasks[model] = self._group.create_task(model.run())

    def _let_leave(self, model: RunningModel) -> None:
        self.leaving.append(model)
        if self._group is not None:
            self._group.create_task(self._end(model))

    async def _end(self, model: RunningModel) -> None:
        """Ends a model after its last request."""
        await model.wait_unused()
        self._tasks.pop(model).cancel()
        self.leaving.remove(model)
        logger.info("model %s: the last request of the removed or restarted model has ended", model.name)

    def _wake_models(self, _is_draining: bool) -> None:
        """Ends the wait of requests for models that have no tokenizer yet."""
        for model in [*self.models.values(), *self.leaving]:
            model.service.lifecycle.wake()

    def _observe_keys(self) -> None:
        for name, model in self.models.items():
            model.service.metrics.observe_api_keys(self.names.num_keys(name), self.names.key_problem(name))

    def _update_readiness(self) -> None:
        lifecycle = self.lifecycle
        lifecycle.was_ready = any(model.service.lifecycle.was_ready for model in self.models.values())
        lifecycle.was_loaded = lifecycle.was_loaded or lifecycle.was_ready
        if not self.models:
            lifecycle.waiting_for = "models_file has no models"
        elif lifecycle.was_ready:
            lifecycle.waiting_for = "no model has an engine that serves"
        else:
            lifecycle.waiting_for = "no model has a tokenizer yet"

"""CoreContext: the objects that an EngineCore process needs with any executor. Also declares the engine ready."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rayloom_engine.common.process import forget_failure
from rayloom_engine.config import EngineConfig
from rayloom_engine.core_server.black_box import BlackBox
from rayloom_engine.core_server.run_folder import RunFolder
from rayloom_engine.core_server.sockets import CoreIo, Inbox
from rayloom_engine.core_server.state import CoreState
from rayloom_engine.protocol.messages import ServedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreContext:
    config: EngineConfig
    folder: RunFolder
    io: CoreIo
    inbox: Inbox
    state: CoreState
    box: BlackBox

    def prepare_to_serve(self, model: ServedModel, kv_explanation: str, *, is_restart: bool) -> Callable[[], None]:
        """Returns a callback that declares the engine ready. Call it after the first step.

        Only a step that has passed through every rank proves that the engine works. `is_restart`: the engine has served
        before. The time until the callback is called is then reported as the phase "replay".
        """
        self.state.model = model
        if is_restart:
            self.state.begin_phase("replay", 0, 0, "")
        return partial(self._serve, kv_explanation)

    def _serve(self, kv_explanation: str) -> None:
        state = self.state
        is_first = state.state == "starting"
        state.serving(kv_explanation)
        forget_failure(self.folder.path)
        if is_first:
            # The objects that exist now will stay. They are exempted from garbage collection, because a collection of
            # all of them would delay a step.
            gc.collect()
            gc.freeze()
        self.io.flush_status()
        phases = ", ".join(f"{phase.name} {phase.seconds:.2f} s" for phase in state.phases)
        logger.info("serving, epoch %d, start-up %s", state.epoch, phases)

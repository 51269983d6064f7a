from typing import Any

from rayloom_engine.core.probe import is_probe
from rayloom_engine.core.step import SlotStep
from rayloom_engine.worker.runner import Runner
from rayloom_engine.worker.slots import Slot

_sound_sample = Runner._sample


def _broken_sample(
    self: Runner[Any], logits_NV: Any, steps_N: list[tuple[SlotStep, Slot]], masks: Any, corrupt: set[int]
) -> Any:
    """Reports the logits of every request as not finite. The engine's own probes succeed."""
    sampled = _sound_sample(self, logits_NV, steps_N, masks, corrupt)
    corrupt.update(step.slot for step, slot in steps_N if not is_probe(slot.request_id))
    return sampled


Runner._sample = _broken_sample  # type: ignore[method-assign]

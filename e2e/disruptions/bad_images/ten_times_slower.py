import time

from rayloom_engine.core.step import StepPlan, StepResult
from rayloom_engine.worker.runner import Runner

_quick_run = Runner.run


def _slow_run(self: Runner, plan: StepPlan) -> StepResult:
    """Makes every step ten times as long. The additional time is a sleep, which leaves the cores to other engines."""
    began = time.perf_counter()
    result = _quick_run(self, plan)
    time.sleep(9 * (time.perf_counter() - began))
    return result


Runner.run = _slow_run  # type: ignore[method-assign]

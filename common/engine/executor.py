"""Where a step's arithmetic runs: a thread of its own, or inline at the end of a pretended duration.

Both turn whatever a runner raises into StepFailed, so that the engine has one failure to know.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from common.engine.runner import BatchPlan, ModelRunner, StepResult
from common.errors import StepFailed


class ThreadExecutor:
    """Runs every plan in one dedicated thread, in the order given; the event loop stays free."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")

    async def execute(self, plan: BatchPlan) -> StepResult:
        """Raises StepFailed. A cancelled call does not stop the thread; `close` waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, _execute, self._runner, plan)

    async def close(self) -> None:
        """Wait for the step being computed; plans not begun are cancelled. Idempotent."""
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)


class FakeExecutor:
    """Waits `step_time(plan)` seconds of loop time, then computes inline; made for a virtual-time loop."""

    def __init__(self, runner: ModelRunner, step_time: Callable[[BatchPlan], float]) -> None:
        self._runner = runner
        self._step_time = step_time

    async def execute(self, plan: BatchPlan) -> StepResult:
        """Raises StepFailed."""
        await asyncio.sleep(self._step_time(plan))
        return _execute(self._runner, plan)

    async def close(self) -> None:
        """Nothing to wait for."""


def _execute(runner: ModelRunner, plan: BatchPlan) -> StepResult:
    try:
        return runner.execute(plan)
    except StepFailed:
        raise
    except Exception as error:
        raise StepFailed(f"step {plan.step}: {type(error).__name__}: {error}") from error

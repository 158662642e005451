"""Where steps run: on a worker thread while the loop plans the next one, or on the loop's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.grammars import MaskGate
from deepinfer.engine.runner import DeviceStep, ModelRunner, StepResult
from deepinfer.scheduler.plan import StepPlan

__all__ = ["Executor", "InlineExecutor", "PendingStep", "ThreadExecutor"]


class PendingStep(Protocol):
    """A submitted step."""

    def is_done(self) -> bool:
        """Whether `read` would not wait."""

    def read(self) -> StepResult:
        """Wait for the step and take its result.

        Raises:
            Exception: whatever the step raised.
        """

    def moves_done(self) -> bool:
        """After a failed `read`: whether preempted requests had been copied to the host before the step failed."""


class Executor(Protocol):
    """Runs plans and releases in the order in which they are handed in, and never makes the caller wait for one."""

    @property
    def is_inline(self) -> bool:
        """Whether `submit` runs the step itself, so that its masks must be known before."""

    def submit(self, plan: StepPlan, masks: MaskGate | None = None) -> PendingStep:
        """Start a step behind those before it; with grammars it samples when `masks` is open."""

    def release(self, slot: int, pages: NDArray[np.int32]) -> None:
        """Tell the device, behind the steps before, that nobody owns a slot and pages any more."""

    def run(self, action: Callable[[], None]) -> None:
        """Call something that never raises, behind the steps before and ahead of those that follow."""

    def close(self) -> None:
        """Let what was submitted end and free the executor; a second call does nothing."""


class _Step:
    """One step on whatever thread; remembers how far a failed one came."""

    def __init__(self, runner: ModelRunner, plan: StepPlan, masks: MaskGate | None) -> None:
        self._runner, self._plan, self._masks = runner, plan, masks
        self.moved = False

    def launch(self) -> DeviceStep:
        try:
            return self._runner.launch(self._plan, self._masks)
        finally:
            self.moved = self._runner.moved_step >= self._plan.step


class _FutureStep:
    def __init__(self, step: _Step, future: Future[DeviceStep]) -> None:
        self._step, self._future = step, future

    def is_done(self) -> bool:
        return self._future.done()

    def read(self) -> StepResult:
        wait([self._future])
        error = self._future.exception()
        if error is not None and not isinstance(error, Exception):
            # An interrupt of the caller ends its wait above; one inside the step ends that step only.
            raise RuntimeError(f"the step was ended by {type(error).__name__}") from error
        return self._future.result().read()

    def moves_done(self) -> bool:
        return self._step.moved


class ThreadExecutor:
    """One worker thread launches the steps; a device that launches asynchronously runs ahead of it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="deepinfer-step")

    @property
    def is_inline(self) -> bool:
        """False."""
        return False

    def submit(self, plan: StepPlan, masks: MaskGate | None = None) -> PendingStep:
        """Queue a step for the worker."""
        step = _Step(self._runner, plan, masks)
        return _FutureStep(step, self._pool.submit(step.launch))

    def release(self, slot: int, pages: NDArray[np.int32]) -> None:
        """Queue a release for the worker."""
        self._pool.submit(self._runner.released, slot, pages)

    def run(self, action: Callable[[], None]) -> None:
        """Queue a call for the worker."""
        self._pool.submit(action)

    def close(self) -> None:
        """Wait for the worker and end it."""
        self._pool.shutdown()


class _DoneStep:
    def __init__(self, step: _Step, outcome: DeviceStep | Exception) -> None:
        self._step, self._outcome = step, outcome

    def is_done(self) -> bool:
        return True

    def read(self) -> StepResult:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome.read()

    def moves_done(self) -> bool:
        return self._step.moved


class InlineExecutor:
    """Steps run inside `submit`, on the caller's thread: the synchronous loop."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @property
    def is_inline(self) -> bool:
        """True."""
        return True

    def submit(self, plan: StepPlan, masks: MaskGate | None = None) -> PendingStep:
        """Run a step now."""
        step = _Step(self._runner, plan, masks)
        outcome: Any
        try:
            outcome = step.launch()
        except Exception as error:
            outcome = error
        return _DoneStep(step, outcome)

    def release(self, slot: int, pages: NDArray[np.int32]) -> None:
        """Release now."""
        self._runner.released(slot, pages)

    def run(self, action: Callable[[], None]) -> None:
        """Call now."""
        action()

    def close(self) -> None:
        """Nothing to free."""

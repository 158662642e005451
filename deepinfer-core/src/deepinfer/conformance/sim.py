"""A small simulated device: missing waits, early frees and host reads show without hardware (design 11)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deepinfer.engine.grammars import MaskGate
from deepinfer.engine.runner import DeviceStep, ModelRunner, StepResult
from deepinfer.scheduler.plan import StepPlan

__all__ = ["HostSyncError", "SimulatedDevice", "SimulatedFault", "StubRunner"]

SYNCS = frozenset(
    getattr(Tensor, name)
    for name in (
        *("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"),
        *("__contains__", "equal", "allclose", "is_nonzero", "masked_select"),
    )
) | {torch.equal, torch.allclose, torch.nonzero, torch.masked_select, torch.is_nonzero}
"""Calls that make the host wait for the device."""


class HostSyncError(RuntimeError):
    """Host code asked the device for something between launch and sample, or touched it from the loop's thread."""


class SimulatedFault(RuntimeError):
    """A failure that the test ordered."""


class _Guard(TorchFunctionMode):
    """Refuses torch calls of the thread that entered it while `forbidden` says so."""

    def __init__(self, forbidden: Callable[[Any], bool], where: str) -> None:
        super().__init__()
        self._forbidden, self._where = forbidden, where
        self._depth = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._depth == 0 and self._forbidden(func):
            raise HostSyncError(f"{getattr(func, '__name__', func)} {self._where}")
        return func(*args, **(kwargs or {}))

    def excused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, free to do what it likes: a kernel, or a read that is meant to wait."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return call


@dataclass
class DeviceClock:
    """Seconds that the device worked, and stood idle between two steps."""

    busy: float = 0.0
    idle: float = 0.0
    steps: int = 0
    last_end: float | None = None


class _SimulatedStep:
    def __init__(self, device: SimulatedDevice, plan: StepPlan, masks: MaskGate | None) -> None:
        self.device, self.plan, self.masks = device, plan, masks
        self.moved = False
        self.future: Future[DeviceStep] = device.pool.submit(self._run)

    def _run(self) -> DeviceStep:
        try:
            return self.device.execute(self.plan, self.masks)
        finally:
            self.moved = self.device.runner.moved_step >= self.plan.step

    def is_done(self) -> bool:
        return self.future.done()

    def read(self) -> StepResult:
        result: StepResult = self.device.excuse(lambda: self.future.result().read())()
        return result

    def moves_done(self) -> bool:
        return self.moved


class SimulatedDevice:
    """An `Executor` whose device is a worker thread: a queue, a clock, poisoned memory and failures on demand.

    Released pages and slots are filled with NaN bytes in stream order. Use it as
    `build_engine(..., executor=SimulatedDevice)` or with `functools.partial` for the options.

    Args:
        runner: what runs the steps; its kernels are called as they are.
        step_time: seconds that a step takes at least.
        fails: asked for each plan: None, or where the step fails: "moves" (before anything), "before" (the rows are
            built), "middle" (caches are written, records are not) or "after".
        bad_slots: slots whose logits of this step become NaN.
        guard: let host synchronisation between launch and sample raise `HostSyncError`.
    """

    def __init__(
        self,
        runner: Any,
        *,
        step_time: float | Callable[[StepPlan], float] = 0.0,
        fails: Callable[[StepPlan], str | None] = lambda plan: None,
        bad_slots: Callable[[StepPlan], frozenset[int]] = lambda plan: frozenset(),
        guard: bool = True,
    ) -> None:
        self.runner = runner
        self.step_time, self.fails, self.bad_slots = step_time, fails, bad_slots
        self.clock = DeviceClock()
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="deepinfer-sim")
        self._loop = threading.local()
        self._fault: str | None = None
        self._bad: frozenset[int] = frozenset()
        self._guard = _Guard(lambda func: guard and func in SYNCS, "waits for the device between launch and sample")
        runner.poison_released = True
        if isinstance(runner, ModelRunner):
            self._wrap(runner)

    @property
    def is_inline(self) -> bool:
        """False: steps run on a thread of their own."""
        return False

    def submit(self, plan: StepPlan, masks: MaskGate | None = None) -> _SimulatedStep:
        """Queue a step."""
        return _SimulatedStep(self, plan, masks)

    def release(self, slot: int, pages: NDArray[np.int32]) -> None:
        """Queue the poisoning of a slot and pages."""
        self.pool.submit(self.runner.released, slot, pages)

    def run(self, action: Callable[[], None]) -> None:
        """Queue a call."""
        self.pool.submit(action)

    def close(self) -> None:
        """Wait for the queue and end the thread."""
        self.pool.shutdown()

    @contextmanager
    def loop_guard(self) -> Iterator[None]:
        """Inside, this thread may use torch only in `PendingStep.read`: the loop must not touch the device."""
        guard = _Guard(lambda func: True, "is called by the loop's thread outside of a step's read")
        self._loop.guard = guard
        try:
            with guard:
                yield
        finally:
            self._loop.guard = None

    def excuse(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let a read of the loop's thread pass its guard."""
        guard = getattr(self._loop, "guard", None)
        return function if guard is None else guard.excused(function)

    def execute(self, plan: StepPlan, masks: MaskGate | None = None) -> DeviceStep:
        """One step, on the worker thread."""
        clock, start = self.clock, time.perf_counter()
        if clock.last_end is not None:
            clock.idle += start - clock.last_end
        try:
            self._fault, self._bad = self.fails(plan), self.bad_slots(plan)
            with self._guard:
                result: DeviceStep = self.runner.launch(plan, masks)
            return result
        finally:
            seconds = self.step_time if isinstance(self.step_time, float | int) else self.step_time(plan)
            left = start + seconds - time.perf_counter()
            if left > 0:
                time.sleep(left)
            clock.last_end = time.perf_counter()
            clock.busy += clock.last_end - start
            clock.steps += 1

    def _wrap(self, runner: ModelRunner) -> None:
        """Excuse the kernels and scripted drafters from the guard and let `forward` fail on demand."""
        if runner.drafter is not None:
            runner.drafter = self._guard.excused(runner.drafter)
        for owner in (runner, runner.sampler, runner.sampler.changes, runner.drafts, runner.drafts.changes):
            for name, value in list(vars(owner).items()):
                if isinstance(value, FunctionType):  # a kernel that was bound at construction
                    setattr(owner, name, self._guard.excused(value))
        runner._move = self._failing("moves", runner._move)  # type: ignore[method-assign]
        runner._expand = self._failing("before", runner._expand)
        runner._commit = self._failing("after", runner._commit, first=False)
        runner.model = _FaultyModel(runner.model, self)

    def _failing(self, place: str, function: Callable[..., Any], *, first: bool = True) -> Callable[..., Any]:
        """The call with an ordered fault before or behind it."""

        def call(*args: Any) -> Any:
            if first:
                self._fail(place)
            result = function(*args)
            self._fail(place)
            return result

        return call

    def _fail(self, place: str) -> None:
        if self._fault == place:
            raise SimulatedFault(f"ordered: {place}")

    def forward(self, model: Any, inputs: Any, storage: Any) -> Any:
        """The model's pass, with what the test ordered."""
        result = self._guard.excused(model.forward)(inputs, storage)
        self._fail("middle")
        if self._bad:
            rows = inputs.sample_rows.clamp(min=0)
            bad = torch.isin(inputs.slots[rows], torch.tensor(sorted(self._bad)))
            logits = torch.where(bad[:, None], torch.nan, result.logits)
            result = replace(result, logits=logits) if hasattr(result, "__dataclass_fields__") else _Logits(logits)
        return result


@dataclass
class _Logits:
    logits: Tensor


class _FaultyModel:
    """A model whose forward pass the simulated device may spoil."""

    def __init__(self, model: Any, device: SimulatedDevice) -> None:
        self._model, self._device = model, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, inputs: Any, storage: Any) -> Any:
        return self._device.forward(self._model, inputs, storage)

    def draft(self, *args: Any) -> Any:
        return self._device._guard.excused(self._model.draft)(*args)


class StubRunner:
    """Stands for a runner and its model where only the host's side is measured: every row draws the same token.

    Args:
        traits: of the model that it stands for.
        num_drafts: draft rows of a sequence; all of them are accepted.
        token: what is drawn.
    """

    def __init__(self, traits: Any, *, num_drafts: int = 0, token: int = 7) -> None:
        self.traits, self.num_drafts, self.token = traits, num_drafts, token
        self.poison_released = False
        self.moved_step = -1

    def launch(self, plan: StepPlan, masks: MaskGate | None = None) -> DeviceStep:
        """Draw for every sampled row, once its masks are there."""
        if masks is not None:
            masks.take()
        self.moved_step = plan.step
        counts = plan.sample_counts.astype(np.int64)
        rows = int(counts.sum())
        starts = torch.from_numpy(np.cumsum(counts) - counts)
        tokens, sampled = torch.full((rows,), self.token), torch.from_numpy(counts)
        drafts = torch.full((counts.size, self.num_drafts), self.token)
        return DeviceStep(
            tokens, torch.zeros(rows, dtype=torch.int32), starts, sampled, sampled, drafts, torch.ones(drafts.shape)
        )

    def released(self, slot: int, pages: NDArray[np.int32]) -> None:
        """Nothing is held."""

"""What the step loop reports while it runs: histograms always, a trace on request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from deepinfer.observe.histogram import REQUEST_SECONDS, STEP_SECONDS, Histogram
from deepinfer.observe.trace import StepTrace

__all__ = ["LoopRecorder", "StepObserver", "StepRecord"]

_logger = logging.getLogger("deepinfer.observe")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that has ended, as observers hear of it.

    Attributes:
        step: number of the step.
        rows: rows that it ran. running: sequences that it ran. waiting: requests that did not take part.
        plan_seconds: planning. step_seconds: from the later of launch and previous result to the result.
        failed: whether it raised instead of bringing a result.
    """

    step: int
    rows: int
    running: int
    waiting: int
    plan_seconds: float
    step_seconds: float
    failed: bool


StepObserver: TypeAlias = Callable[[StepRecord], None]
"""What the factory of an `ObserverDescriptor` returns. The loop's thread calls it after every step: it must be quick;
one that raises is reported and not called again."""


class LoopRecorder:
    """Written by the loop's thread only. All times are seconds of one monotonic clock.

    Attributes:
        time_to_first_token: from arrival to the first token.
        queue_time: from arrival to the launch of the first step.
        inter_token: between tokens of one request; tokens of one step arrive together.
        request_time: from arrival to the end of requests that generated.
        step_time: from the later of launch and previous result to the result.
        plan_time: planning of one step.
        trace: takes the spans of every step while it is set.

    Args:
        observers: hear of every step.
    """

    def __init__(self, observers: Iterable[StepObserver] = ()) -> None:
        self._observers = list(observers)
        self._launched: dict[int, tuple[int, int, int, float]] = {}
        self.time_to_first_token = Histogram(REQUEST_SECONDS)
        self.queue_time = Histogram(REQUEST_SECONDS)
        self.inter_token = Histogram(STEP_SECONDS)
        self.request_time = Histogram(REQUEST_SECONDS)
        self.step_time = Histogram(STEP_SECONDS)
        self.plan_time = Histogram((0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1))
        self.trace: StepTrace | None = None
        self._last_result = 0.0

    def launched(
        self, step: int, start: float, planned: float, end: float, *, rows: int, running: int, waiting: int
    ) -> None:
        """A step was planned until `planned` and handed over until `end`."""
        self.plan_time.observe(planned - start)
        if self._observers:
            self._launched[step] = rows, running, waiting, planned - start
        if self.trace is not None:
            self.trace.span("plan", step, start, planned)
            self.trace.span("launch", step, planned, end, rows=rows)
            self.trace.counter(start, running=running, waiting=waiting)

    def finished(self, step: int, launched: float, ready: float, end: float, *, failed: bool = False) -> None:
        """A step that was launched has brought its result at `ready`, or failed; processed until `end`."""
        begin = max(launched, self._last_result)
        self._last_result = ready
        self.step_time.observe(ready - begin)
        if self.trace is not None:
            self.trace.span("device", step, begin, ready)
            self.trace.span("post", step, ready, end)
        if step in self._launched:
            rows, running, waiting, planning = self._launched.pop(step)
            self._tell(StepRecord(step, rows, running, waiting, planning, ready - begin, failed))

    def _tell(self, record: StepRecord) -> None:
        for observer in tuple(self._observers):
            try:
                observer(record)
            except Exception:
                self._observers.remove(observer)
                _logger.exception("the observer %r failed and is not called again", observer)

    def token(self, arrival: float, first_scheduled: float | None, previous: float | None, now: float) -> None:
        """A request that arrived and first ran then got a token, `previous` being the moment of the one before."""
        if previous is not None:
            self.inter_token.observe(now - previous)
            return
        self.time_to_first_token.observe(now - arrival)
        if first_scheduled is not None:
            self.queue_time.observe(first_scheduled - arrival)

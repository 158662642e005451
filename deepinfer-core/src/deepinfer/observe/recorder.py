"""What the step loop reports while it runs: histograms always, a trace on request."""

from __future__ import annotations

from deepinfer.observe.histogram import REQUEST_SECONDS, STEP_SECONDS, Histogram
from deepinfer.observe.trace import StepTrace

__all__ = ["LoopRecorder"]


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
    """

    def __init__(self) -> None:
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
        if self.trace is not None:
            self.trace.span("plan", step, start, planned)
            self.trace.span("launch", step, planned, end, rows=rows)
            self.trace.counter(start, running=running, waiting=waiting)

    def finished(self, step: int, launched: float, ready: float, end: float) -> None:
        """A step that was launched has brought its result at `ready`, processed until `end`."""
        begin = max(launched, self._last_result)
        self._last_result = ready
        self.step_time.observe(ready - begin)
        if self.trace is not None:
            self.trace.span("device", step, begin, ready)
            self.trace.span("post", step, ready, end)

    def token(self, arrival: float, first_scheduled: float | None, previous: float | None, now: float) -> None:
        """A request that arrived and first ran then got a token, `previous` being the moment of the one before."""
        if previous is not None:
            self.inter_token.observe(now - previous)
            return
        self.time_to_first_token.observe(now - arrival)
        if first_scheduled is not None:
            self.queue_time.observe(first_scheduled - arrival)

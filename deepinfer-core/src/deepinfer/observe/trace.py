"""The steps of an engine on a time line, in the JSON that Chrome's tracing page and Perfetto open."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["LANES", "Counts", "Span", "StepTrace"]

LANES = ("plan", "launch", "device", "post")
"""Lanes from top to bottom: planning a step, handing it over, the device at work on it, its results processed."""

MAX_EVENTS = 1_000_000

Span: TypeAlias = tuple[int, int, float, float, dict[str, Any]]
"""Index of the lane, step, start and end in seconds of one monotonic clock, further facts."""

Counts: TypeAlias = tuple[float, dict[str, int]]
"""A moment in seconds, and counts by name."""


class StepTrace:
    """Spans of steps in lanes and counters over time. Beyond `max_events` nothing more is kept, and the file says so.

    Args:
        max_events: spans and counters to keep.
    """

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._spans: list[Span] = []
        self._counters: list[Counts] = []
        self._max_events = max_events
        self.num_dropped = 0

    def span(self, lane: str, step: int, start: float, end: float, **facts: Any) -> None:
        """Note what a lane did for a step, in seconds of one monotonic clock."""
        if self._has_room():
            self._spans.append((LANES.index(lane), step, start, end, facts))

    def counter(self, moment: float, **values: int) -> None:
        """Note counts at a moment; drawn as stacked areas."""
        if self._has_room():
            self._counters.append((moment, values))

    def take(self) -> tuple[list[Span], list[Counts]]:
        """What was noted since the last call, as `extend` of another trace reads it; here it is gone."""
        taken = self._spans, self._counters
        self._spans, self._counters = [], []
        return taken

    def extend(self, spans: Iterable[Span], counters: Iterable[Counts]) -> None:
        """Note what another trace recorded against the same clock."""
        for lane, step, start, end, facts in spans:
            self.span(LANES[lane], step, start, end, **facts)
        for moment, values in counters:
            self.counter(moment, **values)

    def _has_room(self) -> bool:
        full = len(self._spans) + len(self._counters) >= self._max_events
        self.num_dropped += full
        return not full

    def to_dict(self) -> dict[str, Any]:
        """The document: times in microseconds from the first event."""
        spans, counters, process = list(self._spans), list(self._counters), os.getpid()
        zero = min([start for _, _, start, _, _ in spans] + [moment for moment, _ in counters], default=0.0)
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": "deepinfer engine"}}
        ]
        for lane, name in enumerate(LANES):
            facts = {"pid": process, "tid": lane}
            events.append({"ph": "M", "name": "thread_name", **facts, "args": {"name": name}})
            events.append({"ph": "M", "name": "thread_sort_index", **facts, "args": {"sort_index": lane}})
        for lane, step, start, end, given in spans:
            events.append(
                {
                    "ph": "X",
                    "name": f"{LANES[lane]} {step}",
                    "cat": "step",
                    "pid": process,
                    "tid": lane,
                    "ts": round((start - zero) * 1e6, 3),
                    "dur": round(max(end - start, 0.0) * 1e6, 3),
                    "args": {"step": step, **given},
                }
            )
        for moment, values in counters:
            stamp = round((moment - zero) * 1e6, 3)
            events.append({"ph": "C", "name": "requests", "pid": process, "ts": stamp, "args": dict(values)})
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"dropped_events": self.num_dropped}}

    def save(self, path: str | Path) -> None:
        """Write the document; an existing file is replaced."""
        Path(path).write_text(json.dumps(self.to_dict()), encoding="utf-8")

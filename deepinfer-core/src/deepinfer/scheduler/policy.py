"""In which order queued and preempted requests get a slot, and who chooses how many drafts are verified."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import ConfigError
from deepinfer.scheduler.request import Request

__all__ = ["DraftPlanner", "Policy", "PriorityOrder"]

MAX_OVERTAKES = 64


class Policy(Protocol):
    """A queue of requests that wait for a slot and pages.

    Only the request that `peek` names may be admitted: a large one at the head is not overtaken for ever by small ones.
    """

    def push(self, request: Request) -> None:
        """Add a request: new, or preempted."""

    def peek(self) -> Request | None:
        """The next request to admit, or None."""

    def remove(self, request: Request) -> None:
        """Take a request out: admitted or aborted."""

    def __len__(self) -> int:
        """Requests that wait."""

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests in order of admission."""


class DraftPlanner(Protocol):
    """Chooses how many drafts of each sequence a step verifies, as `deepinfer.speculative.planner` does."""

    def admit(self, slots: NDArray[np.int32]) -> None:
        """Hear of slots that hold another request, or one that comes back."""

    def lengths(
        self, slots: NDArray[np.int32], limits: NDArray[np.int32], *, other_rows: int, max_rows: int
    ) -> NDArray[np.int32]:
        """Drafts int32 [S] of the sequences in these slots, 0 .. limits.

        Args:
            slots, limits: [S]. other_rows: about as many rows of prompts run beside them.
            max_rows: rows that the sequences may have together, at least S.
        """


class PriorityOrder:
    """Lower priority values first, in order of arrival among equals; a preempted request keeps its place.

    Waiting is bounded: once `max_overtakes` younger requests went before the oldest waiting one, it is next whatever
    its priority, and is the last to be preempted. So a request with k older ones in the queue waits for at most
    (k + 1) * (max_overtakes + 1) admissions.

    Args:
        max_overtakes: 0 is plain first come, first served.
    """

    def __init__(self, max_overtakes: int = MAX_OVERTAKES) -> None:
        if max_overtakes < 0:
            raise ConfigError(f"{max_overtakes} is negative", field="max_overtakes")
        self.max_overtakes = max_overtakes
        self._waiting: dict[int, Request] = {}
        # Heaps with entries that may have left; `_top` drops them.
        self._by_key: list[tuple[tuple[bool, int, int], int]] = []
        self._by_arrival: list[int] = []
        self._overtaken = 0

    def push(self, request: Request) -> None:
        """Add a request at its place."""
        self._waiting[request.arrival] = request
        heapq.heappush(self._by_key, (request.order_key, request.arrival))
        heapq.heappush(self._by_arrival, request.arrival)

    def peek(self) -> Request | None:
        """The most urgent request, or the oldest if it was overtaken too often."""
        if not self._waiting:
            return None
        oldest = self._oldest()
        if self._overtaken >= self.max_overtakes and not oldest.boosted:
            oldest.boosted = True
            heapq.heappush(self._by_key, (oldest.order_key, oldest.arrival))
        heap = self._by_key
        while (request := self._waiting.get(heap[0][1])) is None or request.order_key != heap[0][0]:
            heapq.heappop(heap)
        return request

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        self._overtaken = 0 if request is self._oldest() else self._overtaken + 1
        del self._waiting[request.arrival]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._waiting.values(), key=lambda request: request.order_key))

    def _oldest(self) -> Request:
        heap = self._by_arrival
        while heap[0] not in self._waiting:
            heapq.heappop(heap)
        return self._waiting[heap[0]]

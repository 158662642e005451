"""In which order queued and preempted requests get a slot, and who chooses how many drafts are verified."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import ConfigError
from deepinfer.scheduler.request import Request

__all__ = ["DraftPlanner", "Policy", "PriorityOrder", "load_policy"]

MAX_OVERTAKES = 64
REQUIRED = ("push", "peek", "remove", "rank", "__len__", "__iter__")
"""What a policy must have."""


@runtime_checkable
class Policy(Protocol):
    """A queue of requests that wait for a slot and pages, and the order of those that have them.

    Only the request that `peek` names may be admitted: a large one at the head is not overtaken for ever by small ones.
    Among running requests the smallest `rank` takes rows first and is preempted last, so it always gets on. How long
    another one may wait is what the policy promises. Called by the loop's thread only; an exception ends the engine.
    """

    def push(self, request: Request) -> None:
        """Add a request: new, or preempted."""

    def peek(self) -> Request | None:
        """The next request to admit, or None."""

    def remove(self, request: Request) -> None:
        """Take a request out: admitted or aborted."""

    def rank(self, request: Request) -> Any:
        """How urgent a request is, waiting or running: comparable, different for any two; smaller is more urgent."""

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
    its priority, and is the last to be preempted. So a request waits for at most (k + 1) * (max_overtakes + 1)
    admissions, where k older ones wait when it joins the queue or join it (preempted) while it waits.

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
        if oldest.overtaken >= self.max_overtakes and not oldest.boosted:
            oldest.boosted = True
            heapq.heappush(self._by_key, (oldest.order_key, oldest.arrival))
        heap = self._by_key
        while (request := self._waiting.get(heap[0][1])) is None or request.order_key != heap[0][0]:
            heapq.heappop(heap)
        return request

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        oldest = self._oldest()
        oldest.overtaken += request is not oldest and not request.is_finished
        del self._waiting[request.arrival]

    def rank(self, request: Request) -> tuple[bool, int, int]:
        """Priority, then arrival."""
        return request.order_key

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._waiting.values(), key=lambda request: request.order_key))

    def _oldest(self) -> Request:
        heap = self._by_arrival
        while heap[0] not in self._waiting:
            heapq.heappop(heap)
        return self._waiting[heap[0]]


def load_policy(name: str) -> Policy:
    """Make the policy that `DEEPINFER_SCHEDULING_POLICY` names.

    Args:
        name: `module:factory` of something that gives a `Policy` when it is called without arguments; empty:
            `PriorityOrder`.

    Raises:
        ConfigError: it cannot be imported, fails, or gives something else.
    """
    if not name:
        return PriorityOrder()
    module, _, factory = name.partition(":")
    try:
        policy = getattr(import_module(module), factory)()
    except Exception as error:
        raise ConfigError(
            f"{name!r} is no `module:factory` that can be called: {type(error).__name__}: {error}",
            field="scheduling_policy",
        ) from error
    if not isinstance(policy, Policy):
        missing = [need for need in REQUIRED if not hasattr(policy, need)]
        raise ConfigError(
            f"{name!r} gives a {type(policy).__name__}, which lacks {', '.join(missing)}", field="scheduling_policy"
        )
    return policy

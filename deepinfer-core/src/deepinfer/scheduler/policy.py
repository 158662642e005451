"""In which order queued requests are admitted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from deepinfer.scheduler.request import Request

__all__ = ["FirstComeFirstServed", "Policy"]


class Policy(Protocol):
    """A queue of requests that wait for a slot and pages.

    Only the request that `peek` names may be admitted: a large one at the head is not overtaken for ever by small ones.
    """

    def push(self, request: Request) -> None:
        """Add a request."""

    def peek(self) -> Request | None:
        """The next request to admit, or None."""

    def remove(self, request: Request) -> None:
        """Take a request out: admitted or aborted."""

    def __len__(self) -> int:
        """Requests that wait."""

    def __iter__(self) -> Iterator[Request]:
        """The waiting requests in order of admission."""


class FirstComeFirstServed:
    """Strict order of arrival: a request waits only for those before it."""

    def __init__(self) -> None:
        self._queue: OrderedDict[str, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        """Add a request at the end."""
        self._queue[request.request_id] = request

    def peek(self) -> Request | None:
        """The oldest request, or None."""
        return next(iter(self._queue.values()), None)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        del self._queue[request.request_id]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue.values())

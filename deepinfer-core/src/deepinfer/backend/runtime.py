"""Memory, streams, events and graphs of one device, as small as the engine can live with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

__all__ = ["DeviceRuntime", "Event", "Graph", "MemoryInfo", "Stream"]

Stream: TypeAlias = Any
"""A backend's own stream object; core passes it and never looks inside."""
Event: TypeAlias = Any
"""A backend's own event object."""
Graph: TypeAlias = Any
"""A backend's own captured graph."""


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of a device's memory."""

    total: int
    free: int


class DeviceRuntime(ABC):
    """One device. Methods never wait for it unless they say so; `stream=None` is the current stream.

    Attributes:
        device: the torch device of its tensors.
    """

    device: torch.device

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Total and free bytes, as the driver (or the system) counts them."""

    @abstractmethod
    def alloc(self, nbytes: int) -> torch.Tensor:
        """Uninitialised device memory, uint8 [nbytes], aligned to 256 bytes, for caches and workspaces.

        Raises:
            CapacityError: there is not enough; says how much was asked and how much is free.
        """

    @abstractmethod
    def alloc_pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8 [nbytes], from which `copy_async` is asynchronous where the device can.

        Raises:
            CapacityError: there is not enough.
        """

    @abstractmethod
    def stream(self, *, high_priority: bool = False) -> Stream:
        """A new stream; work on different streams is ordered only by events."""

    @abstractmethod
    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Make a stream the current one of this thread inside the context."""

    @abstractmethod
    def event(self, stream: Stream | None = None) -> Event:
        """Mark the point that a stream has reached now; done when everything launched before it is done."""

    @abstractmethod
    def wait(self, event: Event, stream: Stream | None = None, *, host: bool = False) -> None:
        """Let later work of a stream start only after an event, or with `host=True` let the calling thread wait."""

    @abstractmethod
    def is_done(self, event: Event) -> bool:
        """Whether an event has passed; never waits."""

    @abstractmethod
    def copy_async(self, target: torch.Tensor, source: torch.Tensor, stream: Stream | None = None) -> None:
        """Copy between device and pinned memory in stream order; both must stay alive until the copy is done."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has nothing left to do. Not for the step loop."""

    @abstractmethod
    def host_sync_guard(self) -> AbstractContextManager[None]:
        """Inside the context, anything that makes the host wait for the device raises."""

    @abstractmethod
    def capture(self, function: Callable[[], Any], stream: Stream | None = None) -> Graph:
        """Record the work of a call into a graph; memory that it allocates stays reserved for the graph.

        Raises:
            CapabilityError: the device has no graphs.
        """

    @abstractmethod
    def replay(self, graph: Graph, stream: Stream | None = None) -> None:
        """Launch a captured graph."""

    @abstractmethod
    def profile_range(self, name: str) -> AbstractContextManager[None]:
        """Mark a span of the host's time in whatever profiler is attached; free when none is."""

    @abstractmethod
    def host_readable(self, rows: torch.Tensor) -> torch.Tensor:
        """A tensor through which kernels read host rows in place (same shape and dtype, no copy).

        Raises:
            CapabilityError: the device cannot read host memory.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """What of the device decides bits: architecture and instruction set, not its serial number or load."""

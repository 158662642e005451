"""One NVIDIA GPU: memory, streams, events and graphs through `torch.cuda`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.api.backend import DeviceRuntime, MemoryInfo
from deepinfer.api.errors import CapabilityError, CapacityError

__all__ = ["CudaRuntime"]

HIGH_PRIORITY = -1


@dataclass(frozen=True)
class CapturedGraph:
    """A graph and what the captured call returned, which its memory pool keeps alive."""

    graph: torch.cuda.CUDAGraph
    result: Any


class CudaRuntime(DeviceRuntime):
    """Asynchronous runtime of one device; all graphs share one memory pool, since only one runs at a time.

    Args:
        index: of the device among the visible ones.
    """

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._pool: Any = None

    def memory_info(self) -> MemoryInfo:
        """Total and free bytes as the driver counts them, and what PyTorch's allocator holds without need."""
        free, total = torch.cuda.mem_get_info(self.device)
        spare = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return MemoryInfo(total, free + spare)

    def alloc(self, nbytes: int) -> torch.Tensor:
        """Uninitialised uint8 [nbytes] on the device; the allocator aligns to 512 bytes."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise self._short(nbytes, "device", self.memory_info().free) from error

    def alloc_pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise CapacityError(f"cannot lock {nbytes:,} bytes of host memory: {error}") from error

    def _short(self, nbytes: int, what: str, free: int) -> CapacityError:
        return CapacityError(f"cannot allocate {nbytes:,} bytes of {what} memory, {free:,} are free")

    def stream(self, *, high_priority: bool = False) -> torch.cuda.Stream:
        """A new stream."""
        return torch.cuda.Stream(self.device, priority=HIGH_PRIORITY if high_priority else 0)

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        """Make a stream the current one."""
        return torch.cuda.stream(stream)

    def event(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        """Mark where a stream is."""
        event = torch.cuda.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, event: torch.cuda.Event, stream: torch.cuda.Stream | None = None, *, host: bool = False) -> None:
        """Order a stream behind an event, or let the thread wait without spinning on the device."""
        if host:
            event.synchronize()
        else:
            self._stream(stream).wait_event(event)

    def is_done(self, event: torch.cuda.Event) -> bool:
        """Whether an event has passed."""
        return bool(event.query())

    def copy_async(self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream | None = None) -> None:
        """Copy in the order of a stream."""
        with torch.cuda.stream(self._stream(stream)):
            target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    @contextmanager
    def host_sync_guard(self) -> Iterator[None]:
        """Raise where PyTorch would wait for the device."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def capture(self, function: Callable[[], Any], stream: torch.cuda.Stream | None = None) -> CapturedGraph:
        """Record a call; it must have run once before, so that every kernel is compiled."""
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                result = function()
        except torch.cuda.OutOfMemoryError as error:
            raise CapacityError(f"no memory to capture a step: {error}") from error
        return CapturedGraph(graph, result)

    def replay(self, graph: CapturedGraph, stream: torch.cuda.Stream | None = None) -> None:
        """Launch a captured graph."""
        with torch.cuda.stream(self._stream(stream)):
            graph.graph.replay()

    @contextmanager
    def profile_range(self, name: str) -> Iterator[None]:
        """An NVTX range."""
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    def host_readable(self, rows: torch.Tensor) -> torch.Tensor:
        """Refuse: no kernel of this backend reads host memory yet."""
        raise CapabilityError("kernels of the NVIDIA backend read no host memory; place Engram tables on the device")

    def fingerprint(self) -> str:
        """Architecture: its code and the number of multiprocessors decide how sums are split."""
        properties = torch.cuda.get_device_properties(self.device)
        return f"sm_{properties.major}{properties.minor}/{properties.multi_processor_count}"

    def _stream(self, stream: torch.cuda.Stream | None) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if stream is None else stream

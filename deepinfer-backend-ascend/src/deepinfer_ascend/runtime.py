"""One NPU: memory, streams, events and graphs through `torch.npu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch_npu
from torch_npu.npu.utils import get_cann_version

from deepinfer.api.backend import DeviceRuntime, MemoryInfo
from deepinfer.api.errors import CapabilityError, CapacityError

__all__ = ["NpuRuntime"]

HIGH_PRIORITY = -1


@dataclass(frozen=True)
class CapturedGraph:
    """A graph and what the captured call returned, which its memory pool keeps alive."""

    graph: Any
    result: Any


class NpuRuntime(DeviceRuntime):
    """Asynchronous runtime of one device; all graphs share one memory pool, since only one runs at a time.

    Args:
        index: of the device among the visible ones.
    """

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("npu", index)
        torch_npu.npu.set_device(self.device)
        self._pool: Any = None

    def memory_info(self) -> MemoryInfo:
        """Total and free bytes as the driver counts them, and what PyTorch's allocator holds without need."""
        free, total = torch_npu.npu.mem_get_info(self.device)
        spare = torch_npu.npu.memory_reserved(self.device) - torch_npu.npu.memory_allocated(self.device)
        return MemoryInfo(total, free + spare)

    def alloc(self, nbytes: int) -> torch.Tensor:
        """Uninitialised uint8 [nbytes] on the device; the allocator aligns to 512 bytes."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            free = self.memory_info().free
            raise CapacityError(f"cannot allocate {nbytes:,} bytes of device memory, {free:,} are free") from error

    def alloc_pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise CapacityError(f"cannot lock {nbytes:,} bytes of host memory: {error}") from error

    def stream(self, *, high_priority: bool = False) -> Any:
        """A new stream."""
        return torch_npu.npu.Stream(self.device, priority=HIGH_PRIORITY if high_priority else 0)

    def use(self, stream: Any) -> AbstractContextManager[None]:
        """Make a stream the current one."""
        context: AbstractContextManager[None] = torch_npu.npu.stream(stream)
        return context

    def event(self, stream: Any = None) -> Any:
        """Mark where a stream is."""
        event = torch_npu.npu.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, event: Any, stream: Any = None, *, host: bool = False) -> None:
        """Order a stream behind an event, or let the thread wait."""
        if host:
            event.synchronize()
        else:
            self._stream(stream).wait_event(event)

    def is_done(self, event: Any) -> bool:
        """Whether an event has passed."""
        return bool(event.query())

    def copy_async(self, target: torch.Tensor, source: torch.Tensor, stream: Any = None) -> None:
        """Copy in the order of a stream."""
        with torch_npu.npu.stream(self._stream(stream)):
            target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch_npu.npu.synchronize(self.device)

    @contextmanager
    def host_sync_guard(self) -> Iterator[None]:
        """Raise where torch_npu knows that it would wait; its documentation says that it does not know all places."""
        before = torch_npu.npu.get_sync_debug_mode()
        torch_npu.npu.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch_npu.npu.set_sync_debug_mode(before)

    def capture(self, function: Callable[[], Any], stream: Any = None) -> CapturedGraph:
        """Record a call; it must have run once before, so that nothing is compiled or tuned inside."""
        graph = torch_npu.npu.NPUGraph()
        if self._pool is None:
            self._pool = torch_npu.npu.graph_pool_handle()
        try:
            with torch_npu.npu.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                result = function()
        except torch.OutOfMemoryError as error:
            raise CapacityError(f"no memory to capture a step: {error}") from error
        return CapturedGraph(graph, result)

    def replay(self, graph: CapturedGraph, stream: Any = None) -> None:
        """Launch a captured graph."""
        with torch_npu.npu.stream(self._stream(stream)):
            graph.graph.replay()

    @contextmanager
    def profile_range(self, name: str) -> Iterator[None]:
        """A span in torch's profiler, which torch_npu's own profiler takes over."""
        with torch.profiler.record_function(name):
            yield

    def host_readable(self, rows: torch.Tensor) -> torch.Tensor:
        """Refuse: no documented operator reads host memory in place."""
        raise CapabilityError("kernels of the Ascend backend read no host memory; place Engram tables on the device")

    def fingerprint(self) -> str:
        """Name of the chip and version of CANN: kernels come with CANN, so both decide bits."""
        return f"{torch_npu.npu.get_device_name(self.device)}/CANN {cann_version() or 'unknown'}"

    def _stream(self, stream: Any) -> Any:
        return torch_npu.npu.current_stream(self.device) if stream is None else stream


def cann_version() -> str:
    """Version of CANN as torch_npu finds it; empty where it finds none."""
    return str(get_cann_version() or "")

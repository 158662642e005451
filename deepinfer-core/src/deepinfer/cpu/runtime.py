"""The processor as a device: everything is done when the call returns, so streams and events have nothing to order."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepinfer.api.backend import DeviceRuntime, MemoryInfo
from deepinfer.api.errors import CapabilityError, CapacityError

__all__ = ["CpuRuntime"]

ALIGNMENT = 256


@dataclass(frozen=True)
class CpuStream:
    """The only order there is: that of the program."""


@dataclass(frozen=True)
class CpuEvent:
    """A point of the program; it is past as soon as it exists."""


class CpuRuntime(DeviceRuntime):
    """Synchronous runtime over host memory."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def memory_info(self) -> MemoryInfo:
        """Physical memory and what the system would give without swapping, within the limit of the control group."""
        total, free = _system_memory()
        limit, used = _cgroup_memory()
        if limit is not None and limit < total:
            total, free = limit, min(free, max(0, limit - used))
        return MemoryInfo(total, free)

    def alloc(self, nbytes: int) -> torch.Tensor:
        """Uninitialised uint8 [nbytes], aligned to 256 bytes."""
        try:
            block = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
        except RuntimeError as error:
            free = self.memory_info().free
            raise CapacityError(f"cannot allocate {nbytes:,} bytes of host memory, {free:,} are free") from error
        offset = -block.data_ptr() % ALIGNMENT
        return block[offset : offset + nbytes]

    def alloc_pinned(self, nbytes: int) -> torch.Tensor:
        """The same as `alloc`: there is no device to pin memory for."""
        return self.alloc(nbytes)

    def stream(self, *, high_priority: bool = False) -> CpuStream:
        """A stream; all are the same order."""
        return CpuStream()

    def use(self, stream: Any) -> AbstractContextManager[None]:
        """Nothing to switch."""
        return nullcontext()

    def event(self, stream: Any = None) -> CpuEvent:
        """An event that has passed."""
        return CpuEvent()

    def wait(self, event: Any, stream: Any = None, *, host: bool = False) -> None:
        """Nothing to wait for."""

    def is_done(self, event: Any) -> bool:
        """Always: calls return when their work is done."""
        return True

    def copy_async(self, target: torch.Tensor, source: torch.Tensor, stream: Any = None) -> None:
        """Copy at once."""
        target.copy_(source)

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""

    def host_sync_guard(self) -> AbstractContextManager[None]:
        """Guards nothing: reading a CPU tensor waits for nobody, so no hidden wait exists that could be refused."""
        return nullcontext()

    def capture(self, function: Callable[[], Any], stream: Any = None) -> Any:
        """Refuse: there are no graphs here."""
        raise CapabilityError("the CPU backend has no graphs (capabilities: graphs=False); call the function instead")

    def replay(self, graph: Any, stream: Any = None) -> None:
        """Refuse: there are no graphs here."""
        raise CapabilityError("the CPU backend has no graphs (capabilities: graphs=False)")

    def profile_range(self, name: str) -> AbstractContextManager[None]:
        """A span in torch's profiler; a microsecond when none is running."""
        return _record(name)

    def host_readable(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows themselves, memory-mapped files included."""
        return rows

    def fingerprint(self) -> str:
        """Machine type and the vector instruction set that torch's kernels were chosen for."""
        return f"{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}"


@contextmanager
def _record(name: str) -> Iterator[None]:
    with torch.profiler.record_function(name):
        yield


def _system_memory() -> tuple[int, int]:
    """Total bytes and bytes that can be had without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = (line.split() for line in meminfo.read_text().splitlines())
        values = {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if len(line) >= 2}
        return values["MemTotal"], values.get("MemAvailable", values.get("MemFree", 0))
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    available = "SC_AVPHYS_PAGES" in os.sysconf_names
    return total, page * os.sysconf("SC_AVPHYS_PAGES") if available else total // 2


def _cgroup_memory() -> tuple[int | None, int]:
    """Limit of the control group (None without one) and the bytes that its processes hold."""
    base = Path("/sys/fs/cgroup")
    for limit_file, used_file in (
        (base / "memory.max", base / "memory.current"),
        (base / "memory" / "memory.limit_in_bytes", base / "memory" / "memory.usage_in_bytes"),
    ):
        try:
            limit, used = limit_file.read_text().strip(), int(used_file.read_text())
        except (OSError, ValueError):
            continue
        return (None if limit == "max" else int(limit)), used
    return None, 0

"""A device without streams: every call has done its work when it returns."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from deepinfer.api.backend import DeviceRuntime, MemoryInfo
from deepinfer.api.errors import CapabilityError, CapacityError


class AcmeRuntime(DeviceRuntime):
    """One board."""

    device = torch.device("cpu")

    def memory_info(self) -> MemoryInfo:
        """Ask the driver; here the system."""
        page = os.sysconf("SC_PAGE_SIZE")
        return MemoryInfo(page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES"))

    def alloc(self, nbytes: int) -> torch.Tensor:
        """Uninitialised bytes that start at a multiple of 256."""
        try:
            block = torch.empty(nbytes + 256, dtype=torch.uint8)
        except RuntimeError as error:
            raise CapacityError(f"asked for {nbytes:,} bytes, {self.memory_info().free:,} are free") from error
        return block[-block.data_ptr() % 256 :][:nbytes]

    def alloc_pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory that the device can copy from."""
        return self.alloc(nbytes)

    def stream(self, *, high_priority: bool = False) -> Any:
        """There is one order."""
        return None

    def use(self, stream: Any) -> AbstractContextManager[None]:
        """Nothing to switch."""
        return nullcontext()

    def event(self, stream: Any = None) -> Any:
        """An event that has passed."""
        return None

    def wait(self, event: Any, stream: Any = None, *, host: bool = False) -> None:
        """Nothing to wait for."""

    def is_done(self, event: Any) -> bool:
        """Always."""
        return True

    def copy_async(self, target: torch.Tensor, source: torch.Tensor, stream: Any = None) -> None:
        """Copy at once."""
        target.copy_(source)

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""

    def host_sync_guard(self) -> AbstractContextManager[None]:
        """No wait exists that could be refused."""
        return nullcontext()

    def capture(self, function: Callable[[], Any], stream: Any = None) -> Any:
        """Refuse, as the capabilities say."""
        raise CapabilityError("Acme boards have no graphs")

    def replay(self, graph: Any, stream: Any = None) -> None:
        """Refuse, as the capabilities say."""
        raise CapabilityError("Acme boards have no graphs")

    def profile_range(self, name: str) -> AbstractContextManager[None]:
        """No profiler is attached."""
        return nullcontext()

    def host_readable(self, rows: torch.Tensor) -> torch.Tensor:
        """Board and host share their memory."""
        return rows

    def fingerprint(self) -> str:
        """What decides bits: everything that makes two boards compute differently."""
        return f"acme-one/{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}"

"""Arrays between host and device in the order of the steps; neither way makes the host wait for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from deepinfer.backend.runtime import DeviceRuntime

__all__ = ["Transfers", "arrived"]


def arrived() -> None:
    """Nothing is on its way."""


class Transfers:
    """Copies through pinned memory, which is kept until the device is done with it. For one thread.

    A result is copied out right behind the step that made it: reading it one step late then waits for that step alone,
    not for the one that runs meanwhile.

    Args:
        device: of the tensors.
        runtime: of the device; None, or a device that is the host: arrays and tensors share their memory.
    """

    def __init__(self, device: torch.device, runtime: DeviceRuntime | None) -> None:
        if runtime is None and device.type != "cpu":
            raise ValueError(f"tensors on {device} need the runtime of their device")
        self.device = device
        self._runtime = None if device.type == "cpu" else runtime
        self._held: list[Tensor] = []
        self._in_use: deque[tuple[Any, list[Tensor]]] = deque()

    def send(self, values: NDArray[Any]) -> Tensor:
        """An array on the device, of the same shape and dtype; the array must not change until `mark`."""
        source = torch.from_numpy(values)
        if self._runtime is None:
            return source
        target = torch.empty_like(source, device=self.device)
        pinned = self._pinned(source)
        pinned.copy_(source)
        self._runtime.copy_async(target, pinned)
        return target

    def fetch(self, values: Tensor) -> Tensor:
        """The host's copy of a tensor, to be read when `mark` says so."""
        if self._runtime is None:
            return values
        pinned = self._pinned(values)
        self._runtime.copy_async(pinned, values.contiguous())
        return pinned

    def mark(self) -> Callable[[], None]:
        """A call that waits until everything sent and fetched so far has arrived."""
        runtime = self._runtime
        if runtime is None:
            return arrived
        event = runtime.event()
        self._in_use.append((event, self._held))
        self._held = []
        while runtime.is_done(self._in_use[0][0]):
            self._in_use.popleft()
            if not self._in_use:
                break
        return lambda: runtime.wait(event, host=True)

    def _pinned(self, like: Tensor) -> Tensor:
        assert self._runtime is not None
        block = self._runtime.alloc_pinned(like.nbytes)[: like.nbytes].view(like.dtype).view(like.shape)
        self._held.append(block)
        return block

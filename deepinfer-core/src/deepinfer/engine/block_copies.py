"""Copies of whole pages and state slots, inside the device and between device and host, in the order of the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.errors import DeepInferError

if TYPE_CHECKING:
    from deepinfer.backend.runtime import DeviceRuntime
    from deepinfer.cache.tiers.store import BlockKind

__all__ = ["BlockCopies", "LostBlocks"]


class LostBlocks(DeepInferError):
    """A step would have resumed from a snapshot that never reached the device."""


class BlockCopies:
    """Moves bytes; whoever calls it owns the order: everything happens behind what was launched before.

    Args:
        storage: `pages` [pages, bytes] and `slots` [slots, bytes], uint8.
        copy_blocks: the bound operation. send: brings an array to the device.
        runtime: of the device; None for host memory.
    """

    def __init__(
        self,
        storage: Any,
        copy_blocks: Callable[[Tensor, Tensor, Tensor], None],
        send: Callable[[NDArray[Any]], Tensor],
        runtime: DeviceRuntime | None,
    ) -> None:
        self._blocks: dict[BlockKind, Tensor] = {"page": storage.pages, "snapshot": storage.slots}
        self._copy, self._send = copy_blocks, send
        self._runtime = runtime
        self._staging: dict[BlockKind, deque[Tensor]] = {"page": deque(), "snapshot": deque()}
        self._lost: set[int] = set()

    def resume(self, pairs: NDArray[np.int32]) -> None:
        """Copy snapshots into the slots of admitted requests.

        Raises:
            LostBlocks: a snapshot was to come from the host and did not.
        """
        if self._lost.intersection(pairs[:, 0].tolist()):
            raise LostBlocks("a prefix from a lower tier did not reach the device; the prefix cache starts anew")
        self._copy_slots(pairs)

    def save(self, pairs: NDArray[np.int32]) -> None:
        """Copy the slots of running requests into snapshots."""
        self._copy_slots(pairs)
        self._lost.difference_update(pairs[:, 1].tolist())

    def fetch(self, kind: BlockKind, index: int) -> Callable[[], bytes]:
        """Start to copy a block out; the returned call waits for it, on any thread, and gives its bytes."""
        block = self._blocks[kind][index]
        runtime = self._runtime
        if runtime is None or block.device.type == "cpu":
            data = block.numpy().tobytes()
            return lambda: data
        staging = self._staging[kind]
        host = staging.popleft() if staging else runtime.alloc_pinned(block.numel())[: block.numel()]
        runtime.copy_async(host, block)
        event = runtime.event()

        def wait() -> bytes:
            runtime.wait(event, host=True)
            data = host.numpy().tobytes()
            staging.append(host)
            return data

        return wait

    def fill(self, pages: Sequence[tuple[int, bytes]], snapshot: tuple[int, bytes] | None) -> None:
        """Write pages and a snapshot that a store brought; never raises, see `LostBlocks`."""
        try:
            for page, data in pages:
                self._write("page", page, data)
            if snapshot is not None:
                self._write("snapshot", *snapshot)
                self._lost.discard(snapshot[0])
        except Exception:
            if snapshot is not None:
                self._lost.add(snapshot[0])

    def _write(self, kind: BlockKind, index: int, data: bytes) -> None:
        self._blocks[kind][index] = self._send(np.frombuffer(bytearray(data), np.uint8))

    def _copy_slots(self, pairs: NDArray[np.int32]) -> None:
        if pairs.shape[0]:
            slots = self._blocks["snapshot"]
            moves = self._send(pairs.astype(np.int64))
            self._copy(slots, moves[:, 0], moves[:, 1])

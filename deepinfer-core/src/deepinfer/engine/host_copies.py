"""Preempted requests in host memory: pages, state slot and record as they were, to resume from exactly there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.ops.step import SlotRecords
from deepinfer.scheduler.plan import Move

__all__ = ["HostCopies"]


@dataclass(frozen=True)
class _Copy:
    pages: Tensor
    slot: Tensor
    record: dict[str, Tensor]


class HostCopies:
    """Copies requests out and in; called in the order of the steps, so no wait is needed on either side.

    Args:
        records, storage: of the device; `storage.pages` [pages, bytes] and `storage.slots` [slots, bytes] are uint8.
        send: brings an array to the device.
        alloc_pinned: takes bytes, gives uint8 host memory; plain memory without it.
    """

    def __init__(
        self,
        records: SlotRecords,
        storage: Any,
        send: Callable[[NDArray[Any]], Tensor],
        alloc_pinned: Callable[[int], Tensor] | None = None,
    ) -> None:
        self._records, self._storage, self._send = records, storage, send
        self._alloc = alloc_pinned or (lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
        self._copies: dict[int, _Copy] = {}

    def __len__(self) -> int:
        """Requests that are held."""
        return len(self._copies)

    @property
    def nbytes(self) -> int:
        """Host bytes of pages and slots that are held."""
        return sum(copy.pages.nbytes + copy.slot.nbytes for copy in self._copies.values())

    def save(self, move: Move) -> None:
        """Copy a request out under its key."""
        record = {name: value[move.slot].clone() for name, value in self._record_fields()}
        pages = self._storage.pages[self._index(move)]
        slot = self._storage.slots[move.slot]
        self._copies[move.key] = _Copy(self._to_host(pages), self._to_host(slot), record)

    def restore(self, move: Move) -> None:
        """Copy a request back to other pages and another slot; the page table is cleared for the new grants."""
        copy = self._copies.pop(move.key)
        self._storage.pages[self._index(move)] = copy.pages.to(self._storage.pages.device, non_blocking=True)
        self._storage.slots[move.slot] = copy.slot.to(self._storage.slots.device, non_blocking=True)
        self._records.page_table[move.slot] = -1
        for name, value in self._record_fields():
            value[move.slot] = copy.record[name]

    def drop(self, key: int) -> None:
        """Forget a copy; unknown keys are ignored, since a failed step may have taken it along."""
        self._copies.pop(key, None)

    def _record_fields(self) -> list[tuple[str, Tensor]]:
        return [(name, value) for name, value in vars(self._records).items() if name != "page_table"]

    def _to_host(self, source: Tensor) -> Tensor:
        target = self._alloc(source.numel())[: source.numel()].view(source.shape)
        return target.copy_(source, non_blocking=True)

    def _index(self, move: Move) -> Tensor:
        return self._send(move.pages.astype(np.int64))

"""Blocks in host memory: bounded, least recently used ones go first."""

from __future__ import annotations

import threading
from collections import OrderedDict

from deepinfer.cache.tiers.store import BlockKey, KVStore

__all__ = ["MemoryStore"]


class MemoryStore(KVStore):
    """A dictionary with a bound.

    Args:
        max_bytes: of all blocks together.
    """

    name = "host"

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.evicted = 0
        self._blocks: OrderedDict[BlockKey, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def put(self, key: BlockKey, data: bytes) -> bool:
        """Keep a block; one that exceeds the bound alone is not kept."""
        if len(data) > self.max_bytes:
            return False
        with self._lock:
            self._drop(key)
            self._blocks[key] = data
            self.nbytes += len(data)
            while self.nbytes > self.max_bytes:
                self._drop(next(iter(self._blocks)))
                self.evicted += 1
        return True

    def get(self, key: BlockKey) -> bytes | None:
        """The block, now the most recently used; or None."""
        with self._lock:
            data = self._blocks.get(key)
            if data is not None:
                self._blocks.move_to_end(key)
            return data

    def contains(self, key: BlockKey) -> bool:
        """Whether it is here."""
        return key in self._blocks

    def delete(self, key: BlockKey) -> None:
        """Forget a block."""
        with self._lock:
            self._drop(key)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._blocks.clear()
            self.nbytes = 0

    def _drop(self, key: BlockKey) -> None:
        data = self._blocks.pop(key, None)
        self.nbytes -= 0 if data is None else len(data)

"""Moves blocks between the engine and its stores on threads of its own, so that no step ever waits for a disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from deepinfer.cache.tiers.store import BlockKey, BlockKind, KVStore

__all__ = ["ExchangeStats", "LoadJob", "LoadedChain", "TierExchange"]

_logger = logging.getLogger("deepinfer.cache")

T = TypeVar("T")

PENDING_BYTES = 256 << 20
"""Bytes that may wait for the stores; what comes on top is not stored."""
LOAD_BYTES = 1 << 30
"""Bytes that one request may bring in; a longer prefix is cut to the deepest snapshot within."""


@dataclass(frozen=True)
class LoadedChain:
    """What the stores had beyond the device.

    Attributes:
        keys: of the chain from its first page to the one where it can be resumed.
        pages: block by position in `keys`; the positions before the first one were on the device.
        snapshot: state at the end of the last page; empty if the device has it.
    """

    keys: tuple[bytes, ...]
    pages: dict[int, bytes]
    snapshot: bytes


@dataclass
class LoadJob:
    """A search under way.

    Attributes:
        deadline: moment (monotonic seconds) after which the request runs without it.
    """

    future: Future[LoadedChain | None]
    deadline: float

    def is_over(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self.future.done() or time.monotonic() >= self.deadline

    def result(self) -> LoadedChain | None:
        """What was found in time."""
        if self.future.done() and not self.future.cancelled() and self.future.exception() is None:
            return self.future.result()
        self.future.cancel()
        return None


@dataclass
class ExchangeStats:
    """Counts since the start.

    Attributes:
        saved, dropped: blocks handed to the stores, and those that were not because too much was waiting.
        loads, loaded_pages, late: searches, pages that they brought, and searches that came too late.
    """

    saved: int = 0
    dropped: int = 0
    loads: int = 0
    loaded_pages: int = 0
    late: int = 0
    disabled: list[str] = field(default_factory=list)


class TierExchange:
    """Stores in order of speed behind two threads: one writes, one reads.

    Args:
        stores: fastest first; a block is put into all of them, and what is found in a slow one goes to the faster ones.
        layout_id, numerics_id: of this engine; blocks of any other are misses.
        page_bytes, slot_bytes: lengths of blocks.
        time_limit: seconds that a request waits for its prefix before it runs without.
    """

    def __init__(
        self,
        stores: Sequence[KVStore],
        *,
        layout_id: str,
        numerics_id: str,
        page_bytes: int,
        slot_bytes: int,
        time_limit: float,
    ) -> None:
        self.stats = ExchangeStats()
        self.time_limit = time_limit
        self._stores = list(stores)
        self._names = layout_id, numerics_id
        self._sizes: dict[BlockKind, int] = {"page": page_bytes, "snapshot": slot_bytes}
        self._writer = ThreadPoolExecutor(1, "deepinfer-kv-write")
        self._reader = ThreadPoolExecutor(1, "deepinfer-kv-read")
        self._lock = threading.Lock()
        self._waiting = 0

    @property
    def stores(self) -> tuple[KVStore, ...]:
        """Those that still work."""
        return tuple(self._stores)

    def has_room(self, kind: BlockKind) -> bool:
        """Whether a block would be stored; False counts it as dropped. One thread asks and saves."""
        with self._lock:
            room = bool(self._stores) and self._waiting + self._sizes[kind] <= PENDING_BYTES
        self.stats.dropped += not room
        return room

    def save(self, kind: BlockKind, digest: bytes, fetch: Callable[[], bytes]) -> None:
        """Store a block; `fetch` is called on the writing thread, where it may wait for the device."""
        if not self.has_room(kind):
            return
        with self._lock:
            self._waiting += self._sizes[kind]
        self._writer.submit(self._save, self._key(kind, digest), fetch)

    def load(self, keys: Sequence[bytes], present: int, resumable: int) -> LoadJob:
        """Look for more of a chain than the device has.

        Args:
            keys: of all pages from which the prompt could resume, from the first one on.
            present: pages that the device has.
            resumable: pages after which it could resume already.
        """
        self.stats.loads += 1
        future = self._reader.submit(self._load, tuple(keys), present, resumable)
        return LoadJob(future, time.monotonic() + self.time_limit)

    def flush(self) -> None:
        """Wait until everything that was saved so far is stored."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Store what waits, stop the threads and close the stores."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True)
        for store in list(self._stores):
            self._ask(store, store.close, None)

    def _key(self, kind: BlockKind, digest: bytes) -> BlockKey:
        return BlockKey(digest, kind, *self._names, self._sizes[kind])

    def _save(self, key: BlockKey, fetch: Callable[[], bytes]) -> None:
        try:
            data = fetch()
            for store in self.stores:
                self._ask(store, partial(store.put, key, data), False)
            self.stats.saved += 1
        except Exception:
            _logger.warning("a block could not be read from the device and is not stored", exc_info=True)
        finally:
            with self._lock:
                self._waiting -= key.nbytes

    def _load(self, keys: tuple[bytes, ...], present: int, resumable: int) -> LoadedChain | None:
        known = present
        while known < len(keys) and self._contains("page", keys[known]):
            known += 1
        while known > resumable:
            if not self._contains("snapshot", keys[known - 1]):
                known -= 1
                continue
            found = self._read(keys[:known], present)
            if isinstance(found, LoadedChain):
                self.stats.loaded_pages += len(found.pages)
                return found
            known = min(found, known - 1)
        return None

    def _read(self, keys: tuple[bytes, ...], present: int) -> LoadedChain | int:
        """The chain, or how many of its pages could be read."""
        pages: dict[int, bytes] = {}
        room = LOAD_BYTES - self._sizes["snapshot"]
        snapshot = self._get("snapshot", keys[-1])
        if snapshot is None:
            return len(keys) - 1
        for position in range(present, len(keys)):
            room -= self._sizes["page"]
            page = self._get("page", keys[position]) if room >= 0 else None
            if page is None:
                return position
            pages[position] = page
        return LoadedChain(keys, pages, snapshot)

    def _contains(self, kind: BlockKind, digest: bytes) -> bool:
        key = self._key(kind, digest)
        return any(self._ask(store, partial(store.contains, key), False) for store in self.stores)

    def _get(self, kind: BlockKind, digest: bytes) -> bytes | None:
        key = self._key(kind, digest)
        stores = self.stores
        for rank, store in enumerate(stores):
            data = self._ask(store, partial(store.get, key), None)
            if data is not None and len(data) == key.nbytes:
                for faster in stores[:rank]:
                    self._ask(faster, partial(faster.put, key, data), False)
                return data
        return None

    def _ask(self, store: KVStore, question: Callable[[], T], otherwise: T) -> T:
        """Ask a store; one that raises is not asked again."""
        try:
            return question()
        except Exception as error:
            with self._lock:
                if store in self._stores:
                    self._stores.remove(store)
                    self.stats.disabled.append(store.name)
                    _logger.warning(
                        "KV store %r failed and is not used any more: %s: %s",
                        store.name,
                        type(error).__name__,
                        error,
                        exc_info=True,
                    )
            return otherwise

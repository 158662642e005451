"""Who owns which page and which state slot: exact accounting, no device memory touched."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["PagePool", "PoolError", "SlotPool"]

PageIds = NDArray[np.int32]


class PoolError(RuntimeError):
    """The engine's own accounting is broken: a double free, a foreign id or a leak. Never a user's fault."""


class PagePool:
    """Reference-counted pages 1 .. num_pages - 1; page 0 is never handed out and holds poison.

    Every page is free (count 0, not cached), cached (count 0, kept for reuse) or used (count >= 1). All operations take
    arrays of ids. A freed page is handed out last, so that a stale reader meets old bytes as late as possible.

    Args:
        num_pages: pages of the device, page 0 included; at least 2.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise PoolError(f"a pool of {num_pages} pages has none to hand out (page 0 is reserved)")
        self.num_pages = num_pages
        self._counts = np.zeros(num_pages, np.int32)
        self._cached = np.zeros(num_pages, np.bool_)
        # Ring buffer of free ids, oldest first.
        self._ring = np.arange(1, num_pages, dtype=np.int32)
        self._head = 0
        self._num_free = num_pages - 1
        self._num_cached = 0

    @property
    def capacity(self) -> int:
        """Pages that can be handed out: all but page 0."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that nobody owns and nobody caches."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Pages without an owner that are kept for reuse."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Pages with at least one owner."""
        return self.capacity - self._num_free - self._num_cached

    def allocate(self, count: int) -> PageIds:
        """Hand out `count` free pages with one owner each.

        Raises:
            PoolError: fewer than `count` pages are free (callers reserve first).
        """
        if not 0 <= count <= self._num_free:
            raise PoolError(f"{count} pages asked, {self._num_free} of {self.capacity} are free")
        size = self._ring.size
        ids = self._ring[(self._head + np.arange(count)) % size]
        self._head = (self._head + count) % size
        self._num_free -= count
        self._counts[ids] = 1
        return ids

    def share(self, ids: ArrayLike) -> None:
        """Add one owner to each page; a cached page becomes used again.

        Raises:
            PoolError: a page is free, reserved or unknown.
        """
        pages = self._checked(ids)
        idle = self._counts[pages] == 0
        if np.any(idle & ~self._cached[pages]):
            raise PoolError(f"pages {pages[idle & ~self._cached[pages]].tolist()} are free and cannot be shared")
        revived = pages[idle]
        if revived.size:
            revived = np.unique(revived)
            self._cached[revived] = False
            self._num_cached -= revived.size
        np.add.at(self._counts, pages, 1)

    def free(self, ids: ArrayLike, *, keep: bool = False) -> PageIds:
        """Drop one owner of each page; return the pages that have none left.

        Args:
            ids: pages; an id may appear as often as it has owners.
            keep: cache the pages that lose their last owner instead of freeing them.

        Raises:
            PoolError: a page has fewer owners than asked to drop (double free).
        """
        pages = self._checked(ids)
        drops = np.bincount(pages, minlength=self.num_pages).astype(np.int32)
        over = drops > self._counts
        if over.any():
            raise PoolError(f"double free of pages {np.flatnonzero(over).tolist()}")
        self._counts -= drops
        idle = np.flatnonzero((drops > 0) & (self._counts == 0)).astype(np.int32)
        if keep:
            self._cached[idle] = True
            self._num_cached += idle.size
        else:
            self._push(idle)
        return idle

    def evict(self, ids: ArrayLike) -> None:
        """Free cached pages.

        Raises:
            PoolError: a page is not cached, or appears twice.
        """
        pages = self._checked(ids)
        if np.unique(pages).size != pages.size or not self._cached[pages].all():
            raise PoolError(f"pages {pages.tolist()} are not all cached once")
        self._cached[pages] = False
        self._num_cached -= pages.size
        self._push(pages)

    def owners(self, ids: ArrayLike) -> NDArray[np.int32]:
        """Number of owners of each page."""
        return self._counts[self._checked(ids)]

    def check(self) -> None:
        """Verify that every page is in exactly one state.

        Raises:
            PoolError: with the pages concerned.
        """
        listed = self._ring[(self._head + np.arange(self._num_free)) % self._ring.size]
        free = np.zeros(self.num_pages, np.bool_)
        free[listed] = True
        states = free.astype(np.int32) + self._cached + (self._counts > 0)
        wrong = np.flatnonzero(states[1:] != 1) + 1
        if wrong.size or np.unique(listed).size != listed.size or states[0] != 0:
            raise PoolError(f"pages {wrong.tolist()} are in no state or in several")
        if self._num_cached != int(self._cached.sum()):
            raise PoolError(f"{int(self._cached.sum())} pages are cached, {self._num_cached} were counted")

    def assert_idle(self) -> None:
        """Verify that no page has an owner: free + cached pages = all pages.

        Raises:
            PoolError: with the leaked pages.
        """
        self.check()
        if self.num_used:
            raise PoolError(f"leaked pages at idle: {np.flatnonzero(self._counts).tolist()}")

    def _push(self, pages: PageIds) -> None:
        tail = self._head + self._num_free
        self._ring[(tail + np.arange(pages.size)) % self._ring.size] = pages
        self._num_free += pages.size

    def _checked(self, ids: ArrayLike) -> PageIds:
        pages = np.atleast_1d(np.asarray(ids, dtype=np.int32))
        if pages.size and (pages.min() < 1 or pages.max() >= self.num_pages):
            raise PoolError(f"page ids {pages.tolist()} outside 1..{self.num_pages - 1}")
        return pages


class SlotPool:
    """State slots 1 .. num_slots - 1; slot 0 is never handed out and holds poison.

    Args:
        num_slots: slots of the device, slot 0 included; at least 2.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise PoolError(f"a pool of {num_slots} slots has none to hand out (slot 0 is reserved)")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, 0, -1))
        self._used = np.zeros(num_slots, np.bool_)

    @property
    def capacity(self) -> int:
        """Slots that can be handed out: all but slot 0."""
        return self.num_slots - 1

    @property
    def num_free(self) -> int:
        """Slots without an owner."""
        return len(self._free)

    def allocate(self) -> int:
        """Hand out a slot.

        Raises:
            PoolError: none is free.
        """
        if not self._free:
            raise PoolError(f"all {self.capacity} slots are in use")
        slot = self._free.pop()
        self._used[slot] = True
        return slot

    def free(self, slot: int) -> None:
        """Take a slot back.

        Raises:
            PoolError: the slot is not in use.
        """
        if not 1 <= slot < self.num_slots or not self._used[slot]:
            raise PoolError(f"slot {slot} is not in use")
        self._used[slot] = False
        self._free.append(slot)

    def assert_idle(self) -> None:
        """Verify that no slot has an owner.

        Raises:
            PoolError: with the leaked slots.
        """
        if self.num_free != self.capacity:
            raise PoolError(f"leaked slots at idle: {np.flatnonzero(self._used).tolist()}")

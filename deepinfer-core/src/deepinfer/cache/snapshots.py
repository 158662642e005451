"""Device slots that hold copies of state slots: what a request resumes from (design 7). No device memory touched."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from deepinfer.cache.pool import PoolError

__all__ = ["SnapshotPool"]

_logger = logging.getLogger("deepinfer.cache")

Owner = TypeVar("Owner", bound=Hashable)


class SnapshotPool(Generic[Owner]):
    """Slots first .. first + count - 1 of the state storage, apart from those of running requests.

    Every slot is free, pending (a step in flight copies into it) or kept for an owner. When none is free the least
    recently used kept one makes room, so a full pool shortens the memory of the engine but never stops it.

    Args:
        first: lowest slot; slots below it belong to running requests.
        count: slots; 0 means that nothing can be kept.
        on_evict: told of an owner whose snapshot is gone.
    """

    def __init__(self, first: int, count: int, *, on_evict: Callable[[Owner], None] = lambda owner: None) -> None:
        if first < 1 or count < 0:
            raise PoolError(f"snapshot slots {first}..{first + count - 1} overlap slot 0")
        self.first = first
        self.capacity = count
        self.on_evict = on_evict
        self._free = list(range(first + count - 1, first - 1, -1))
        self._pending: set[int] = set()
        self._kept: OrderedDict[int, Owner] = OrderedDict()
        self.taken = 0
        self.evicted = 0
        self.refused = 0
        self._warned = False

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Slots that a lookup can find."""
        return len(self._kept)

    @property
    def num_pending(self) -> int:
        """Slots into which a planned step copies."""
        return len(self._pending)

    def reserve(self) -> int | None:
        """A slot to copy into; None if all are pending (counted in `refused`)."""
        if not self._free:
            if not self._kept:
                self.refused += 1
                return None
            self._make_room()
        slot = self._free.pop()
        self._pending.add(slot)
        return slot

    def keep(self, slot: int, owner: Owner) -> None:
        """The copy is there: remember it for its owner, as the most recently used.

        Raises:
            PoolError: the slot is not pending.
        """
        if slot not in self._pending:
            raise PoolError(f"snapshot slot {slot} is not pending")
        self._pending.remove(slot)
        self._kept[slot] = owner
        self.taken += 1

    def touch(self, slot: int) -> None:
        """Note a use.

        Raises:
            PoolError: the slot is not kept.
        """
        if slot not in self._kept:
            raise PoolError(f"snapshot slot {slot} is not kept")
        self._kept.move_to_end(slot)

    def free(self, slot: int) -> None:
        """Take back a pending or kept slot.

        Raises:
            PoolError: the slot is neither.
        """
        if slot in self._pending:
            self._pending.remove(slot)
        elif self._kept.pop(slot, None) is None:
            raise PoolError(f"snapshot slot {slot} is not in use")
        self._free.append(slot)

    def check(self) -> None:
        """Verify that every slot is in exactly one state.

        Raises:
            PoolError: with the slots concerned.
        """
        listed = sorted([*self._free, *self._pending, *self._kept])
        if listed != list(range(self.first, self.first + self.capacity)):
            raise PoolError(f"snapshot slots {listed} are not {self.first}..{self.first + self.capacity - 1}")

    def assert_idle(self) -> None:
        """Verify that nothing is pending.

        Raises:
            PoolError: with the leaked slots.
        """
        self.check()
        if self._pending:
            raise PoolError(f"leaked snapshot slots at idle: {sorted(self._pending)}")

    def _make_room(self) -> None:
        slot, owner = self._kept.popitem(last=False)
        self._free.append(slot)
        self.evicted += 1
        if not self._warned:
            self._warned = True
            _logger.warning(
                "all %d snapshots are in use: the least recently used ones are replaced from now on, so prompts may "
                "find their pages but no place to resume from; raise DEEPINFER_PREFIX_SNAPSHOTS to keep more",
                self.capacity,
            )
        self.on_evict(owner)

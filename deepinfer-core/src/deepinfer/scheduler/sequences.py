"""The running sequences as vectors over state slots: how far each is planned, and which pages are its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deepinfer.cache.pool import PagePool, SlotPool
from deepinfer.cache.reuse import PrefixCache
from deepinfer.scheduler.config import SchedulerConfig
from deepinfer.scheduler.plan import Changes
from deepinfer.scheduler.request import Request, RequestState

__all__ = ["Sequences"]


class Sequences:
    """Who holds which slot and pages. Planning is arithmetic on these vectors; nothing here decides who runs.

    Attributes:
        active: bool [slots], whether the slot's request is running and not finished.
        prompt_length: int32 [slots], tokens that its prefill runs.
        max_draws: int32 [slots], tokens that it may draw after them.
        scheduled: int32 [slots], positions that planned rows reach, at most.
        draws: int32 [slots], tokens drawn in planned steps, at least.
        granted: int32 [slots], pages that it has.
        last_step: int64 [slots], the last step that names it, -1 before the first.
        owner: object [slots], its request.
        on_release: told of every slot that is given back for good and the pages that nobody owns any more.
    """

    def __init__(
        self, config: SchedulerConfig, pages: PagePool, slots: SlotPool, prefix: PrefixCache | None, changes: Changes
    ) -> None:
        self.pages, self.slots, self.prefix = pages, slots, prefix
        self.on_release: Callable[[int, NDArray[np.int32]], None] | None = None
        self._page_size = config.page_size
        self._changes = changes
        size = slots.num_slots
        self.active = np.zeros(size, np.bool_)
        self.prompt_length = np.zeros(size, np.int32)
        self.max_draws = np.zeros(size, np.int32)
        self.scheduled = np.zeros(size, np.int32)
        self.draws = np.zeros(size, np.int32)
        self.granted = np.zeros(size, np.int32)
        self.last_step = np.full(size, -1, np.int64)
        self.owner = np.full(size, None, object)
        self._page_table = np.full((size, config.max_pages), -1, np.int32)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and are not finished."""
        return int(self.active.sum())

    @property
    def num_prompt_rows(self) -> int:
        """Prompt tokens of running requests that no planned step holds."""
        return int((self.prompt_length - self.scheduled)[self.active].clip(min=0).sum())

    @property
    def num_promised_pages(self) -> int:
        """Pages not granted yet that running prompts own for their remaining tokens."""
        need = -(-self.prompt_length // self._page_size) - self.granted
        return int(need[self.active & (self.scheduled < self.prompt_length)].clip(min=0).sum())

    @property
    def num_available_pages(self) -> int:
        """Pages that can be granted to anyone: free ones, and cached ones, which make room when needed."""
        return self.pages.num_free + self.pages.num_cached - self.num_promised_pages

    def decoding(self) -> NDArray[np.int32]:
        """Slots of the sequences that are through their prompt and may draw again."""
        ready = self.active & (self.scheduled >= self.prompt_length) & (self.draws < self.max_draws)
        return np.flatnonzero(ready).astype(np.int32)

    def least_forwarded(self, slots: NDArray[np.int32] | int) -> NDArray[np.int32]:
        """Tokens that planned steps forward of decoding sequences, at least: all but the one that was drawn last."""
        return self.prompt_length[slots] + self.draws[slots] - 1

    def unfinished(self) -> list[Request]:
        """Running requests that have still something to draw."""
        owners: list[Request] = self.owner[self.active & (self.draws < self.max_draws)].tolist()
        return owners

    def any_ending(self, completed: int) -> bool:
        """Whether a step after `completed` draws the last token of a request."""
        return bool((self.active & (self.draws >= self.max_draws) & (self.last_step > completed)).any())

    def pages_of(self, slot: int) -> NDArray[np.int32]:
        """Ids of a sequence's pages in the order of positions."""
        return self._page_table[slot, : self.granted[slot]]

    def missing(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.int32]:
        """Pages that each sequence lacks for its next rows."""
        needed = -(-(self.scheduled[slots] + counts) // self._page_size)
        return np.maximum(needed - self.granted[slots], 0)

    def grant(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Give each sequence the pages that its next rows newly reach."""
        missing = self.missing(slots, counts)
        if missing.any():
            self.extend(slots, missing)

    def extend(self, slots: NDArray[np.int32], missing: NDArray[np.int32]) -> NDArray[np.int32]:
        """Grant so many further pages to each sequence and note them for the plan; their ids."""
        total = int(missing.sum())
        ids = self.pages.allocate(total) if self.prefix is None else self.prefix.allocate(total)
        owners = np.repeat(slots, missing)
        first = np.repeat(np.cumsum(missing) - missing, missing)
        indices = (np.repeat(self.granted[slots], missing) + np.arange(ids.size) - first).astype(np.int32)
        self._page_table[owners, indices] = ids
        self.granted[slots] += missing
        self._changes.grants.append((owners, indices, ids))
        return ids

    def enter(self, request: Request) -> None:
        """Give a request a slot; it has neither pages nor rows yet."""
        slot = request.slot = self.slots.allocate()
        request.state = RequestState.RUNNING
        self.owner[slot] = request
        self.active[slot] = True
        self.prompt_length[slot] = request.tokens.size
        self.max_draws[slot] = request.max_tokens - request.replayed.size
        self.scheduled[slot] = self.draws[slot] = self.granted[slot] = 0
        self.last_step[slot] = -1

    def adopt(self, request: Request, pages: NDArray[np.int32]) -> None:
        """Let a request that has just entered begin behind pages that hold its first tokens."""
        count, slot = pages.size, request.slot
        self._page_table[slot, :count] = pages
        self.granted[slot] = count
        self.scheduled[slot] = count * self._page_size
        self._changes.grants.append((np.full(count, slot, np.int32), np.arange(count, dtype=np.int32), pages))

    def vacate(self, request: Request) -> NDArray[np.int32]:
        """Take a request's slot and pages; the pages that nobody owns any more."""
        slot = request.slot
        pages = self.pages_of(slot)
        unowned = self.pages.free(pages) if self.prefix is None else self.prefix.release(pages)
        pages[:] = -1
        self.granted[slot] = 0
        self.active[slot] = False
        self.owner[slot] = None
        self.slots.free(slot)
        self._changes.released.append(slot)
        request.slot = -1
        return unowned

    def release(self, request: Request) -> None:
        """Take slot and pages of a request that is gone."""
        slot = request.slot
        if self.prefix is not None and request.chain is not None:
            self.prefix.end(request.chain)
        pages = self.vacate(request)
        if self.on_release is not None:
            self.on_release(slot, pages)

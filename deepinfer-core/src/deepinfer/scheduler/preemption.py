"""What becomes of a request that loses its place: a copy on the host while the budget lasts, else it runs again."""

from __future__ import annotations

import numpy as np

from deepinfer.scheduler.config import SchedulerConfig
from deepinfer.scheduler.plan import Changes, Move, StepPlan
from deepinfer.scheduler.prefixes import PrefixReuse
from deepinfer.scheduler.request import Parked, Request, RequestState
from deepinfer.scheduler.sequences import Sequences

__all__ = ["HostBudget", "Preemption"]


class HostBudget:
    """Bytes of host copies, exact in the order of the steps: a copy counts until the plan that takes or drops it.

    Args:
        config: its `host_bytes` (None: not limited), `page_bytes` and `slot_bytes`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._limit, self._page_bytes, self._slot_bytes = config.host_bytes, config.page_bytes, config.slot_bytes
        self._held: dict[int, int] = {}
        self.used = 0
        """Bytes that are held now."""

    def fits(self, pages: int) -> bool:
        """Whether a copy of so many pages and a slot can be held too."""
        return self._limit is None or self.used + self._nbytes(pages) <= self._limit

    def take(self, key: int, pages: int) -> None:
        """Hold a copy."""
        self._held[key] = self._nbytes(pages)
        self.used += self._held[key]

    def settle(self, plan: StepPlan) -> None:
        """Note that a plan takes copies back or drops them; keys of steps that failed may be unknown."""
        for key in (*(move.key for move in plan.restores), *plan.dropped):
            self.used -= self._held.pop(key, 0)

    def _nbytes(self, pages: int) -> int:
        return pages * self._page_bytes + self._slot_bytes


class Preemption:
    """Takes slot and pages of running requests and gives them back.

    With a host copy a request resumes exactly where it was. Without one it keeps only its tokens: it is admitted again
    like a prompt of its prompt and output, and draws what comes next; nothing that was drawn is drawn again. Since the
    host must know all its tokens for that, it waits until the last step that names it has been read.
    """

    def __init__(self, config: SchedulerConfig, sequences: Sequences, reuse: PrefixReuse, changes: Changes) -> None:
        self._page_size = config.page_size
        self._sequences, self._reuse, self._changes = sequences, reuse, changes
        self.host = HostBudget(config)
        self.num_preemptions = 0
        """Times that a request lost its place."""
        self.num_recomputations = 0
        """Those of them without a host copy."""

    def keeps(self, request: Request) -> bool:
        """Whether the state of a running request would be kept on the host."""
        return self.host.fits(int(self._sequences.granted[request.slot]))

    def take_place(self, request: Request) -> None:
        """Take slot and pages of a running request; what is to be kept leaves the device with the next plan."""
        sequences, slot = self._sequences, request.slot
        request.state = RequestState.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        pages = sequences.pages_of(slot).copy()
        if self.keeps(request):
            self.host.take(request.arrival, pages.size)
            request.parked = Parked(int(sequences.scheduled[slot]), int(sequences.draws[slot]), pages.size)
            moves = self._changes.saves
        else:
            self.num_recomputations += 1
            request.last_step = int(sequences.last_step[slot])
            self._reuse.end(request)
            moves = self._changes.discards
        moves.append(Move(request.arrival, slot, pages, sequences.vacate(request)))

    def entry_pages(self, request: Request) -> int:
        """Pages that must be free for a waiting request to start or resume."""
        if request.parked is None:
            return -(-(request.num_prompt_tokens + len(request.output)) // self._page_size)
        positions = max(request.tokens.size, request.parked.scheduled + 1)
        return max(request.parked.granted, -(-positions // self._page_size))

    def enter(self, request: Request) -> None:
        """Give a request without state a slot; its prefill runs the prompt and what was generated before."""
        if request.output:
            request.tokens = np.concatenate((request.prompt, np.array(request.output, np.int64)))
        self._sequences.enter(request)
        self._reuse.begin(request)

    def resume(self, request: Request, parked: Parked) -> Move:
        """Give a request with a host copy a slot and as many pages as it had."""
        sequences = self._sequences
        sequences.enter(request)
        request.parked = None
        slot = request.slot
        pages = sequences.extend(np.array([slot], np.int32), np.array([parked.granted], np.int32))
        sequences.scheduled[slot], sequences.draws[slot] = parked.scheduled, parked.draws
        self._reuse.resume(request)
        return Move(request.arrival, slot, pages)

    def forget(self, request: Request) -> None:
        """Drop the host copy of a preempted request that has ended."""
        if request.parked is not None:
            self._changes.dropped.append(request.arrival)
            request.parked = None

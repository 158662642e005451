"""What running requests take from the prefix cache and give to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from deepinfer.cache.reuse import PrefixCache
from deepinfer.scheduler.plan import Changes
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.sequences import Sequences

__all__ = ["PrefixReuse"]


class PrefixReuse:
    """Walks every request along its chain of pages; without a prefix cache it does nothing."""

    def __init__(
        self, prefix: PrefixCache | None, sequences: Sequences, changes: Changes, *, resume_slack: int
    ) -> None:
        self._prefix, self._sequences, self._changes = prefix, sequences, changes
        self._slack = resume_slack
        # The end of the next page of output by slot.
        self._next_end = np.zeros(sequences.slots.num_slots, np.int64)
        self._planning = False
        if prefix is not None:
            prefix.on_evict = self._note_evicted

    @contextmanager
    def planning(self) -> Iterator[None]:
        """While a plan is made, pages that leave the cache are told by the plan: its saves must come first."""
        self._planning = True
        try:
            yield
        finally:
            self._planning = False

    def _note_evicted(self, pages: NDArray[np.int32]) -> None:
        if self._planning:
            self._changes.evicted.append(pages)
        elif self._sequences.on_release is not None:
            self._sequences.on_release(0, pages)

    def begin(self, request: Request) -> None:
        """Let a request that has just entered begin its prefill at the deepest place that the cache knows."""
        if self._prefix is not None:
            again = request.replayed.size > 0
            chain = self._prefix.begin(
                request.tokens, num_prompt_tokens=request.num_prompt_tokens, reuse=request.reuse_prefix or again
            )
            if request.chain is not None:  # It lost its state: what it published stands and falls with what follows.
                chain.own = request.chain.own
            request.chain = chain
            if chain.pages.size:
                self._sequences.adopt(request, chain.pages)
                self._changes.slot_copies.append((chain.restore, request.slot))
            self._next_end[request.slot] = -(-request.tokens.size // self._prefix.page_size) * self._prefix.page_size
        request.start = request.num_forwarded = int(self._sequences.scheduled[request.slot])
        if not request.num_preemptions:
            request.num_cached_tokens = request.start

    def cut(self, request: Request, start: int, rows: int) -> int:
        """Rows of a chunk that begins at `start`, fewer if a snapshot is wanted inside it."""
        if self._prefix is None or request.chain is None:
            return rows
        return self._prefix.cut(request.chain, start, rows)

    def resume(self, request: Request) -> None:
        """Go on with a request that has come back from the host."""
        if self._prefix is not None:
            size = self._prefix.page_size
            self._next_end[request.slot] = (int(self._sequences.least_forwarded(request.slot)) // size + 1) * size

    def snapshots(self, step: int, decoding: NDArray[np.int32], prompts: list[Request]) -> list[tuple[int, int]]:
        """(slot, snapshot) to copy behind a step whose rows were planned: the ends of chunks and of pages of output.

        How far a sequence comes is only known within bounds. A copy may hold rows past the page's end, as many as
        whoever resumes there overwrites before they can be read.
        """
        prefix, sequences = self._prefix, self._sequences
        if prefix is None:
            return []
        copies = []
        for request in prompts:
            if request.chain is not None:
                end = int(sequences.scheduled[request.slot])
                copies.append((request.slot, prefix.save(request.chain, end, step)))
        least = sequences.least_forwarded(decoding)
        due = np.flatnonzero(least >= self._next_end[decoding])
        for slot, reached in zip(decoding[due].tolist(), least[due].tolist(), strict=True):
            end = reached // prefix.page_size * prefix.page_size
            self._next_end[slot] = end + prefix.page_size
            chain = sequences.owner[slot].chain
            if chain is not None and sequences.scheduled[slot] <= end + self._slack:
                copies.append((slot, prefix.save_output(chain, end, step)))
        return [(slot, snapshot) for slot, snapshot in copies if snapshot >= 0]

    def advance(self, request: Request, rows: int) -> bool:
        """Note rows of a request that stand, as a good step told; whether they complete something to `publish`.

        Args:
            request: that ran; it may be preempted by now.
            rows: prompt rows, or accepted rows.
        """
        request.num_forwarded += rows
        chain = request.chain
        if self._prefix is None or chain is None or request.slot < 0:
            return False
        return bool(chain.pending) or request.num_forwarded // self._prefix.page_size > len(chain.keys)

    def publish(self, request: Request, step: int, output: Sequence[int]) -> None:
        """Let others reuse the pages that a request has completed.

        Args:
            request: for which `advance` said so.
            step: that was good.
            output: its generated tokens, at least those that were forwarded.
        """
        if self._prefix is not None and request.chain is not None:
            length = min(request.num_forwarded, request.num_prompt_tokens + len(output))
            later = output[request.replayed.size :]
            self._prefix.publish(request.chain, length, step, later, self._sequences.pages_of(request.slot))

    def conclude(self, request: Request) -> None:
        """Let lower tiers have the last state of a request that has said all."""
        if self._prefix is not None and request.chain is not None:
            self._prefix.conclude(request.chain)

    def withdraw(self, request: Request) -> None:
        """Make what a request left in the cache unknown: its numbers are not sound."""
        if self._prefix is not None and request.chain is not None:
            self._prefix.forget(request.chain)

    def end(self, request: Request) -> None:
        """The request walks no further."""
        if self._prefix is not None and request.chain is not None:
            self._prefix.end(request.chain)

"""What one step changes: the only thing that the host sends to the device (NumPy, no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["Changes", "Move", "SamplingRows", "StepPlan"]

_Number = TypeVar("_Number", bound=np.generic)


def _empty(dtype: type[_Number], *shape: int) -> NDArray[_Number]:
    return np.empty(shape or (0,), dtype)


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of the admitted sequences, one entry each.

    Attributes:
        temperature: float32 [A]; 0 means argmax.
        top_k: int32 [A]; -1 means all.
        top_p: float32 [A]; 1 means all.
        seed: int64 [A]; the bits of the unsigned 64-bit seed.
        completion: int32 [A]; index of the completion among those of one prompt.
        views: `deepinfer.sampling.slots.SlotSampling` of each, None where the fields above are all; empty: all None.
    """

    temperature: NDArray[np.float32] = field(default_factory=lambda: _empty(np.float32))
    top_k: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    top_p: NDArray[np.float32] = field(default_factory=lambda: _empty(np.float32))
    seed: NDArray[np.int64] = field(default_factory=lambda: _empty(np.int64))
    completion: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    views: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Move:
    """State of one request on its way between device and host.

    Attributes:
        key: names the host copy.
        slot: state slot and record.
        pages: int32 [P], its pages in the order of positions.
        unowned: pages that nobody owns any more once the request is gone from the device.
    """

    key: int
    slot: int
    pages: NDArray[np.int32]
    unowned: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))


@dataclass
class Changes:
    """What happened to slots and pages since the last plan, for the next one to tell the device.

    Attributes:
        released: slots whose request is gone.
        grants: (slots, indices in their page tables, page ids) of granted pages.
        saves: requests that were preempted. discards: those of which no copy is kept.
        dropped: keys of host copies that nobody will ask for again.
        slot_copies: (snapshot, slot) of requests that found a prefix.
        evicted: pages that left the prefix cache.
    """

    released: list[int] = field(default_factory=list)
    grants: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)
    discards: list[Move] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    slot_copies: list[tuple[int, int]] = field(default_factory=list)
    evicted: list[NDArray[np.int32]] = field(default_factory=list)

    def clear(self) -> None:
        """Forget what a plan has taken up."""
        for notes in (self.released, self.grants, self.saves, self.discards):
            notes.clear()
        for more in (self.dropped, self.slot_copies, self.evicted):
            more.clear()


@dataclass(frozen=True)
class StepPlan:
    """One step over S sequences: rows, new pages, admitted and released slots; O(rows + new pages) in size.

    The device applies a plan in this order: saves, discards, restores, released slots, admitted slots, page grants,
    rows.

    Attributes:
        step: number of the step, counted from 0.
        slots: int32 [S], state slot of each scheduled sequence.
        row_counts: int32 [S], rows of this step: 1 for decode, 1 + n for verification, chunk length for prefill.
        is_prefill: bool [S]. Prefill rows bring `host_tokens`; other rows read the slot's record on the device
            (row 0 is its next token, row j its draft j - 1), so that sampled tokens never pass through the host.
        host_tokens: int64 [sum(row_counts[is_prefill])], in the order of the sequences.
        samples: bool [S], whether rows are sampled: the last one of a prompt's last chunk, every one of another
            sequence.
        page_slots, page_indices, page_ids: int32 [P], newly granted pages: page_table[slot, index] = id.
        admitted_slots: int32 [A], records to reset.
        admitted_lengths: int32 [A], tokens that are already in the pages and the slot (0 without a prefix hit).
        admitted_tokens: int64 [A, K], the last K tokens before `admitted_lengths`, newest last, -1 before the start.
        admitted_sampling: the sampling parameters of the admitted sequences.
        admitted_outputs: int64 [O] of each, the tokens at the end of its prefill that it had generated before it lost
            its state.
        released_slots: int32 [R], slots whose request is gone.
        row_bucket: padded row count, at least sum(row_counts).
        keep_from: int32 [S], first position that bounded replay sends through the consumer half, 0 for decode; empty
            without replay.
        kept_bucket: padded count of the rows from there on, at least 1; 0 without replay.
        saves: preempted requests, to be copied to the host before anything else of this step.
        discards: preempted requests of which nothing is kept; they were admitted anew if they run again.
        restores: resumed requests, to be copied back after the saves; their pages are among the granted ones.
        evicted: int32 [E], pages that left the prefix cache; whoever gets them comes after the saves.
        slot_copies: int32 [M, 2], (snapshot, slot) of the admitted sequences that found a prefix; after the restores.
        snapshot_copies: int32 [M, 2], (slot, snapshot) to copy when the rows of the step have run.
        dropped: keys of host copies that nobody will ask for again.
    """

    step: int
    slots: NDArray[np.int32]
    row_counts: NDArray[np.int32]
    is_prefill: NDArray[np.bool_]
    host_tokens: NDArray[np.int64]
    samples: NDArray[np.bool_]
    row_bucket: int
    keep_from: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    kept_bucket: int = 0
    page_slots: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    page_indices: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    page_ids: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    admitted_slots: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    admitted_lengths: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    admitted_tokens: NDArray[np.int64] = field(default_factory=lambda: _empty(np.int64, 0, 0))
    admitted_sampling: SamplingRows = field(default_factory=SamplingRows)
    admitted_outputs: tuple[NDArray[np.int64], ...] = ()
    released_slots: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    saves: tuple[Move, ...] = ()
    discards: tuple[Move, ...] = ()
    restores: tuple[Move, ...] = ()
    dropped: tuple[int, ...] = ()
    evicted: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    slot_copies: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32, 0, 2))
    snapshot_copies: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32, 0, 2))

    @property
    def num_sequences(self) -> int:
        """Scheduled sequences S."""
        return int(self.slots.size)

    @property
    def num_rows(self) -> int:
        """Rows that hold a token, without padding."""
        return int(self.row_counts.sum())

    @property
    def sample_counts(self) -> NDArray[np.int32]:
        """Rows [S] to sample of each sequence, at most: the device leaves out those without a draft."""
        return np.where(self.samples, np.where(self.is_prefill, 1, self.row_counts), 0).astype(np.int32)

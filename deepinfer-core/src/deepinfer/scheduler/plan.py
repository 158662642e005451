"""What one step changes: the only thing that the host sends to the device (NumPy, no torch)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["SamplingRows", "StepPlan"]

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
    """

    temperature: NDArray[np.float32] = field(default_factory=lambda: _empty(np.float32))
    top_k: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    top_p: NDArray[np.float32] = field(default_factory=lambda: _empty(np.float32))
    seed: NDArray[np.int64] = field(default_factory=lambda: _empty(np.int64))
    completion: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))


@dataclass(frozen=True)
class StepPlan:
    """One step over S sequences: rows, new pages, admitted and released slots; O(rows + new pages) in size.

    The device applies a plan in this order: released slots, admitted slots, page grants, rows.

    Attributes:
        step: number of the step, counted from 0.
        slots: int32 [S], state slot of each scheduled sequence.
        row_counts: int32 [S], rows of this step: 1 for decode, 1 + n for verification, chunk length for prefill.
        is_prefill: bool [S]. Prefill rows bring `host_tokens`; other rows read the slot's record on the device
            (row 0 is its next token, row j its draft j - 1), so that sampled tokens never pass through the host.
        host_tokens: int64 [sum(row_counts[is_prefill])], in the order of the sequences.
        samples: bool [S], whether the last row is sampled (prefill: only the last chunk of a prompt).
        page_slots, page_indices, page_ids: int32 [P], newly granted pages: page_table[slot, index] = id.
        admitted_slots: int32 [A], records to reset.
        admitted_lengths: int32 [A], tokens that are already in the pages and the slot (0 without a prefix hit).
        admitted_tokens: int64 [A, K], the last K tokens before `admitted_lengths`, newest last, -1 before the start.
        admitted_sampling: the sampling parameters of the admitted sequences.
        released_slots: int32 [R], slots whose request is gone.
        row_bucket: padded row count, at least sum(row_counts).
    """

    step: int
    slots: NDArray[np.int32]
    row_counts: NDArray[np.int32]
    is_prefill: NDArray[np.bool_]
    host_tokens: NDArray[np.int64]
    samples: NDArray[np.bool_]
    row_bucket: int
    page_slots: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    page_indices: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    page_ids: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    admitted_slots: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    admitted_lengths: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))
    admitted_tokens: NDArray[np.int64] = field(default_factory=lambda: _empty(np.int64, 0, 0))
    admitted_sampling: SamplingRows = field(default_factory=SamplingRows)
    released_slots: NDArray[np.int32] = field(default_factory=lambda: _empty(np.int32))

    @property
    def num_sequences(self) -> int:
        """Scheduled sequences S."""
        return int(self.slots.size)

    @property
    def num_rows(self) -> int:
        """Rows that hold a token, without padding."""
        return int(self.row_counts.sum())

"""What a step is on the device: records per slot, the plan as tensors, and the rows that the graph reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PlanTensors", "SlotRecords", "StepInputs"]


@dataclass
class SlotRecords:
    """What the device knows of each state slot; slot 0 is never handed out.

    Sampling writes the records and the next step reads them, so tokens never pass through the host.

    Attributes:
        length: int64 [slots], tokens whose rows are accepted (= position of the next row).
        next_token: int64 [slots], sampled and not yet forwarded; -1 unset.
        drafts: int64 [slots, N], proposed tokens after `next_token`; -1 unset.
        draft_count: int64 [slots], valid drafts.
        confidences: float32 [slots, N], of the drafts.
        history: int64 [slots, H], raw token ids by position mod H; -1 unset. H covers the Engram window plus the rows
            that a step may write past an accepted length.
        page_table: int32 [slots, max_pages], page of each stretch of page_size positions; -1 unset.
        temperature, top_p: float32 [slots].
        top_k: int32 [slots]; -1 means all.
        seed: int64 [slots], bits of the unsigned seed.
        completion: int32 [slots].
    """

    length: Tensor
    next_token: Tensor
    drafts: Tensor
    draft_count: Tensor
    confidences: Tensor
    history: Tensor
    page_table: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    seed: Tensor
    completion: Tensor

    @classmethod
    def allocate(
        cls, num_slots: int, max_pages: int, num_drafts: int, history_length: int, device: torch.device | str = "cpu"
    ) -> SlotRecords:
        """Records of `num_slots` slots (slot 0 included), all unset."""

        def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            length=full(0, torch.int64, num_slots),
            next_token=full(-1, torch.int64, num_slots),
            drafts=full(-1, torch.int64, num_slots, num_drafts),
            draft_count=full(0, torch.int64, num_slots),
            confidences=full(0, torch.float32, num_slots, num_drafts),
            history=full(-1, torch.int64, num_slots, history_length),
            page_table=full(-1, torch.int32, num_slots, max_pages),
            temperature=full(0, torch.float32, num_slots),
            top_p=full(1, torch.float32, num_slots),
            top_k=full(-1, torch.int32, num_slots),
            seed=full(0, torch.int64, num_slots),
            completion=full(0, torch.int32, num_slots),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(value.numel() * value.element_size() for value in vars(self).values())


@dataclass
class PlanTensors:
    """A step plan on the device; field by field `deepinfer.scheduler.plan.StepPlan`, all int64 but where noted.

    Every list may be padded with -1 (slots, page_slots, admitted_slots, released_slots; then the row count is 0).

    Attributes:
        slots, row_counts: [S].
        is_prefill, samples: bool [S].
        host_tokens: [rows of the prefill sequences].
        page_slots, page_indices, page_ids: [P].
        admitted_slots, admitted_lengths, admitted_seed: [A].
        admitted_tokens: [A, K], newest last; K <= H.
        admitted_temperature, admitted_top_p: float32 [A].
        admitted_top_k, admitted_completion: int32 [A].
        released_slots: [R].
        keep_from: [S], or empty without replay.
    """

    slots: Tensor
    row_counts: Tensor
    is_prefill: Tensor
    samples: Tensor
    host_tokens: Tensor
    page_slots: Tensor
    page_indices: Tensor
    page_ids: Tensor
    admitted_slots: Tensor
    admitted_lengths: Tensor
    admitted_tokens: Tensor
    admitted_temperature: Tensor
    admitted_top_p: Tensor
    admitted_top_k: Tensor
    admitted_seed: Tensor
    admitted_completion: Tensor
    released_slots: Tensor
    keep_from: Tensor


@dataclass
class StepInputs:
    """The rows of one step, T with padding, of S sequences; -1 everywhere means padding or nothing.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T], absolute position of the row in its sequence.
        slots: int64 [T].
        first_positions: int64 [T], position of the sequence's first row of this step: earlier keys come from the
            ring, later ones from the step's own rows.
        first_rows: int64 [T], row index of that first row.
        sequences: int64 [T], index of the row's sequence.
        history: int64 [T, G - 1], raw token ids at positions p - 1 .. p - (G - 1); -1 before the start.
        is_image: bool [T].
        embed_override: embeddings that replace those of the rows under `embed_override_mask`; None in text.
        embed_override_mask: bool [T] or None.
        window_low: int64 [T], lowest visible window position, normally 0.
        commit_rows: int64 [T], ring entry p mod ring_length of the rows that stay in the ring, else -1.
        sample_rows: int64 [R], rows to sample: the last one of a prompt, every one of a verification block; -1 is
            padding. Those of a sequence follow each other.
        sample_sequences: int64 [R], index of the row's sequence.
        sample_positions: int64 [R], position of the row.
        sample_starts: int64 [S], index in `sample_rows` of the sequence's first one (also where it has none).
        sample_counts: int64 [S], rows to sample of the sequence; 0 for none.
        seq_slots: int64 [S].
        seq_positions: int64 [S], position of the sequence's last row.
        last_positions: int64 [T], the same for each row: which rows a bounded state ring keeps.
        page_table: int32 [slots, max_pages], the records' tensor.
        keep_from: int64 [T], first position that goes through the consumer half of a replayed prompt; None: all do.
        kept_bucket: padded number of rows that go through the consumer half; only with `keep_from`.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    first_positions: Tensor
    first_rows: Tensor
    sequences: Tensor
    history: Tensor
    is_image: Tensor
    embed_override: Tensor | None
    embed_override_mask: Tensor | None
    window_low: Tensor
    commit_rows: Tensor
    sample_rows: Tensor
    sample_sequences: Tensor
    sample_positions: Tensor
    sample_starts: Tensor
    sample_counts: Tensor
    seq_slots: Tensor
    seq_positions: Tensor
    last_positions: Tensor
    page_table: Tensor
    keep_from: Tensor | None = None
    kept_bucket: int = 0

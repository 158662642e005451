"""A plan becomes rows, and what a step decided enters the records: integers only, a program a slot, sequence or row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer.api.ops import PlanTensors, SlotRecords, StepInputs

__all__ = ["commit_step", "expand_plan", "kernels"]

BLOCK = 128


@triton.jit
def _clear(
    records_length, next_token, draft_count, drafts, confidences, page_table, slot,
    num_drafts: tl.constexpr, max_pages: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Everything of a slot but its history."""
    tl.store(records_length + slot, 0)
    tl.store(next_token + slot, -1)
    tl.store(draft_count + slot, 0)
    for start in range(0, num_drafts, BLOCK):
        draft = start + tl.arange(0, BLOCK)
        tl.store(drafts + slot * num_drafts + draft, -1, mask=draft < num_drafts)
        tl.store(confidences + slot * num_drafts + draft, 0.0, mask=draft < num_drafts)
    for start in range(0, max_pages, BLOCK):
        page = start + tl.arange(0, BLOCK)
        tl.store(page_table + slot * max_pages + page, -1, mask=page < max_pages)


@triton.jit
def _release(
    released, admitted, count, records_length, next_token, draft_count, drafts, confidences, history, page_table,
    num_drafts: tl.constexpr, history_length: tl.constexpr, max_pages: tl.constexpr,
    ADMITTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Clear a released slot, unless the same plan hands it out again."""
    slot = tl.load(released + tl.program_id(0))
    index = tl.arange(0, ADMITTED)
    again = tl.sum((tl.load(admitted + index, mask=index < count, other=-1) == slot).to(tl.int32))
    if (slot >= 0) & (again == 0):
        _clear(
            records_length, next_token, draft_count, drafts, confidences, page_table, slot, num_drafts, max_pages, BLOCK
        )  # fmt: skip
        for start in range(0, history_length, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            tl.store(history + slot * history_length + entry, -1, mask=entry < history_length)


@triton.jit
def _admit(
    admitted, lengths, tokens, temperatures, top_ps, top_ks, seeds, completions,
    records_length, next_token, draft_count, drafts, confidences, history, page_table,
    temperature, top_p, top_k, seed, completion, width: tl.constexpr,
    num_drafts: tl.constexpr, history_length: tl.constexpr, max_pages: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reset a slot for its new request; history entry h takes the newest given token whose position is h mod H."""
    index = tl.program_id(0)
    slot = tl.load(admitted + index)
    if slot >= 0:
        _clear(
            records_length, next_token, draft_count, drafts, confidences, page_table, slot, num_drafts, max_pages, BLOCK
        )  # fmt: skip
        length = tl.load(lengths + index)
        tl.store(records_length + slot, length)
        tl.store(temperature + slot, tl.load(temperatures + index))
        tl.store(top_p + slot, tl.load(top_ps + index))
        tl.store(top_k + slot, tl.load(top_ks + index))
        tl.store(seed + slot, tl.load(seeds + index))
        tl.store(completion + slot, tl.load(completions + index))
        for start in range(0, history_length, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            behind = (length - 1 - entry) % history_length
            behind = tl.where(behind < 0, behind + history_length, behind)
            given = (behind < width) & (behind < length)
            token = tl.load(tokens + index * width + width - 1 - behind, mask=given, other=-1)
            tl.store(history + slot * history_length + entry, token, mask=entry < history_length)


@triton.jit
def _grant(page_slots, page_indices, page_ids, page_table, count, max_pages, BLOCK: tl.constexpr):
    grant = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(page_slots + grant, mask=grant < count, other=-1)
    live = slot >= 0
    index = tl.load(page_indices + grant, mask=live, other=0)
    page = tl.load(page_ids + grant, mask=live, other=0)
    tl.store(page_table + slot * max_pages + index, page.to(tl.int32), mask=live)


@triton.jit
def _sequences(
    slots, row_counts, is_prefill, samples, records_length, next_token, draft_count,
    ends, starts, counts, firsts, host_starts, sample_ends, sample_starts, sample_counts, seq_slots, seq_positions,
    count, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Where each sequence's rows, host tokens and sampled rows begin, and how many rows hold a token."""
    index = tl.arange(0, SEQUENCES)
    inside = index < count
    slot = tl.load(slots + index, mask=inside, other=-1)
    rows = tl.load(row_counts + index, mask=inside, other=0)
    prefill = tl.load(is_prefill + index, mask=inside, other=0) != 0
    sampled = tl.load(samples + index, mask=inside, other=0) != 0
    safe = tl.maximum(slot, 0)
    first = tl.load(records_length + safe, mask=inside, other=0)
    token = tl.load(next_token + safe, mask=inside, other=-1)
    drafts = tl.load(draft_count + safe, mask=inside, other=0)
    known = tl.where(token >= 0, 1 + drafts, 0)
    live = tl.where(prefill, rows, tl.minimum(rows, known))
    live = tl.where(slot >= 0, live, 0)
    end = tl.cumsum(rows, 0)
    host = tl.where(prefill, rows, 0)
    planned = tl.where(sampled, tl.where(prefill, 1, rows), 0)
    sample_end = tl.cumsum(planned, 0)
    drawn = tl.where(planned > 0, tl.where(prefill, tl.minimum(live, 1), live), 0)
    tl.store(ends + index, end, mask=inside)
    tl.store(starts + index, end - rows, mask=inside)
    tl.store(counts + index, live, mask=inside)
    tl.store(firsts + index, first, mask=inside)
    tl.store(host_starts + index, tl.cumsum(host, 0) - host, mask=inside)
    tl.store(sample_ends + index, sample_end, mask=inside)
    tl.store(sample_starts + index, sample_end - planned, mask=inside)
    tl.store(sample_counts + index, drawn, mask=inside)
    tl.store(seq_slots + index, tl.where(live > 0, slot, -1), mask=inside)
    tl.store(seq_positions + index, tl.where(live > 0, first + live - 1, -1), mask=inside)


@triton.jit
def _find(ends, row, count, SEQUENCES: tl.constexpr):
    """Sequence of a row, and whether any has it."""
    index = tl.arange(0, SEQUENCES)
    end = tl.load(ends + index, mask=index < count, other=9223372036854775807)
    sequence = tl.sum((end <= row).to(tl.int32))
    return tl.minimum(sequence, count - 1), sequence < count


@triton.jit
def _rows(
    slots, is_prefill, host_tokens, keep_from, ends, starts, counts, firsts, host_starts, next_token, drafts, history,
    out, out_history, is_image, rows, count, ring_length, num_drafts: tl.constexpr, history_length: tl.constexpr,
    before: tl.constexpr, KEEP: tl.constexpr, SEQUENCES: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """One row; `out` [fields, rows] in the order of `ROW_FIELDS`."""
    row = tl.program_id(0)
    sequence, found = _find(ends, row, count, SEQUENCES)
    offset = row - tl.load(starts + sequence)
    live = tl.load(counts + sequence)
    valid = found & (offset < live)
    slot = tl.maximum(tl.load(slots + sequence), 0)
    first = tl.load(firsts + sequence)
    position = first + offset
    prefill = tl.load(is_prefill + sequence) != 0
    host = host_tokens + tl.load(host_starts + sequence)
    token = tl.load(host + offset, mask=valid & prefill, other=-1)
    token = tl.where(prefill, token, tl.load(next_token + slot, mask=valid & ~prefill & (offset == 0), other=-1))
    drafted = valid & ~prefill & (offset > 0) & (offset <= num_drafts)
    token = tl.where(drafted, tl.load(drafts + slot * num_drafts + offset - 1, mask=drafted, other=-1), token)
    tl.store(out + row, tl.where(valid, token, -1))
    tl.store(out + rows + row, tl.where(valid, position, -1))
    tl.store(out + 2 * rows + row, tl.where(valid, slot, -1))
    tl.store(out + 3 * rows + row, tl.where(valid, first, -1))
    tl.store(out + 4 * rows + row, tl.where(valid, tl.load(starts + sequence), -1))
    tl.store(out + 5 * rows + row, tl.where(valid, sequence, -1).to(tl.int64))
    tl.store(out + 6 * rows + row, tl.where(valid, 0, -1).to(tl.int64))
    tl.store(out + 7 * rows + row, tl.where(valid & (offset >= live - ring_length), position % ring_length, -1))
    tl.store(out + 8 * rows + row, tl.where(valid, first + live - 1, -1))
    if KEEP:
        tl.store(out + 9 * rows + row, tl.where(valid, tl.load(keep_from + sequence), -1))
    tl.store(is_image + row, 0)
    # Tokens before the row: this step's own as far as they go, then those of the ring.
    distance = 1 + tl.arange(0, BEFORE)
    inside = (distance <= before) & valid
    own = inside & (distance <= offset)
    earlier = tl.load(host + offset - distance, mask=own & prefill, other=-1)
    drawn = own & ~prefill
    earlier = tl.where(
        prefill,
        earlier,
        tl.load(drafts + slot * num_drafts + offset - distance - 1, mask=drawn & (distance < offset), other=-1),
    )
    upcoming = tl.load(next_token + slot, mask=valid & ~prefill, other=-1)
    earlier = tl.where(drawn & (distance == offset), upcoming, earlier)
    past = position - distance
    ring = inside & ~own & (past >= 0)
    entry = slot * history_length + past % history_length
    earlier = tl.where(ring, tl.load(history + entry, mask=ring, other=-1), earlier)
    tl.store(out_history + row * before + distance - 1, tl.where(own | ring, earlier, -1), mask=distance <= before)


@triton.jit
def _sampled(
    is_prefill, starts, counts, firsts, sample_ends, sample_starts, sample_counts, out, rows, count,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    """One sampled row; `out` [3, rows]: row, sequence, position."""
    index = tl.program_id(0)
    sequence, found = _find(sample_ends, index, count, SEQUENCES)
    offset = index - tl.load(sample_starts + sequence)
    valid = found & (offset < tl.load(sample_counts + sequence))
    skipped = tl.where(tl.load(is_prefill + sequence) != 0, tl.load(counts + sequence) - 1, 0)
    tl.store(out + index, tl.where(valid, tl.load(starts + sequence) + skipped + offset, -1))
    tl.store(out + rows + index, tl.where(valid, sequence, -1).to(tl.int64))
    tl.store(out + 2 * rows + index, tl.where(valid, tl.load(firsts + sequence) + skipped + offset, -1))


ROW_FIELDS = (
    *("token_ids", "positions", "slots", "first_positions", "first_rows", "sequences"),
    *("window_low", "commit_rows", "last_positions", "keep_from"),
)


def _empty(device: torch.device, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=device)


def _apply(records: SlotRecords, plan: PlanTensors) -> None:
    """Clear released records, reset admitted ones and enter the granted pages, in this order."""
    state = (
        *(records.length, records.next_token, records.draft_count, records.drafts, records.confidences),
        *(records.history, records.page_table),
    )
    sizes = {
        "num_drafts": records.drafts.shape[1],
        "history_length": records.history.shape[1],
        "max_pages": records.page_table.shape[1],
        "BLOCK": BLOCK,
    }
    admitted, released, grants = (part.shape[0] for part in (plan.admitted_slots, plan.released_slots, plan.page_slots))
    if released:
        block = triton.next_power_of_2(max(admitted, 1))
        _release[(released,)](
            plan.released_slots, plan.admitted_slots, admitted, *state, **sizes, ADMITTED=block, num_warps=1
        )
    if admitted:
        _admit[(admitted,)](
            plan.admitted_slots, plan.admitted_lengths, plan.admitted_tokens, plan.admitted_temperature,
            plan.admitted_top_p, plan.admitted_top_k, plan.admitted_seed, plan.admitted_completion, *state,
            records.temperature, records.top_p, records.top_k, records.seed, records.completion,
            width=plan.admitted_tokens.shape[-1], **sizes, num_warps=1,
        )  # fmt: skip
    if grants:
        _grant[(triton.cdiv(grants, BLOCK),)](
            plan.page_slots, plan.page_indices, plan.page_ids, records.page_table, grants, sizes["max_pages"],
            BLOCK=BLOCK, num_warps=1,
        )  # fmt: skip


def expand_plan(
    records: SlotRecords, plan: PlanTensors, row_bucket: int, sample_bucket: int, ring_length: int, ngram_size: int
) -> StepInputs:
    """See the contract `expand_plan`."""
    _apply(records, plan)
    device, count = plan.slots.device, plan.slots.shape[0]
    rows, sampled = _empty(device, len(ROW_FIELDS), row_bucket), _empty(device, 3, sample_bucket)
    history = _empty(device, row_bucket, ngram_size - 1)
    is_image = torch.zeros(row_bucket, dtype=torch.bool, device=device)
    ends, starts, counts, firsts, host_starts, sample_ends, *of_sequences = _empty(device, 10, count).unbind(0)
    sample_starts, sample_counts, seq_slots, seq_positions = of_sequences
    if count:
        block, flags = triton.next_power_of_2(count), plan.is_prefill.view(torch.uint8)
        keep = plan.keep_from.shape[0] > 0
        _sequences[(1,)](
            plan.slots, plan.row_counts, flags, plan.samples.view(torch.uint8),
            records.length, records.next_token, records.draft_count,
            ends, starts, counts, firsts, host_starts, sample_ends, *of_sequences, count, SEQUENCES=block, num_warps=4,
        )  # fmt: skip
        if row_bucket:
            _rows[(row_bucket,)](
                plan.slots, flags, plan.host_tokens, plan.keep_from, ends, starts, counts, firsts, host_starts,
                records.next_token, records.drafts, records.history, rows, history, is_image.view(torch.uint8),
                row_bucket, count, ring_length, num_drafts=records.drafts.shape[1],
                history_length=records.history.shape[1], before=ngram_size - 1, KEEP=keep, SEQUENCES=block,
                BEFORE=triton.next_power_of_2(max(ngram_size - 1, 1)), num_warps=1,
            )  # fmt: skip
        if sample_bucket:
            _sampled[(sample_bucket,)](
                flags, starts, counts, firsts, sample_ends, sample_starts, sample_counts, sampled, sample_bucket, count,
                SEQUENCES=block, num_warps=1,
            )  # fmt: skip
    else:
        keep = False
        for nothing in (rows, sampled, history):
            nothing.fill_(-1)
    fields: dict[str, Any] = dict(zip(ROW_FIELDS, rows.unbind(0), strict=True))
    if not keep:
        fields["keep_from"] = None
    return StepInputs(
        **fields,
        history=history,
        is_image=is_image,
        embed_override=None,
        embed_override_mask=None,
        sample_rows=sampled[0],
        sample_sequences=sampled[1],
        sample_positions=sampled[2],
        sample_starts=sample_starts,
        sample_counts=sample_counts,
        seq_slots=seq_slots,
        seq_positions=seq_positions,
        page_table=records.page_table,
    )


@triton.jit
def _commit(
    slots, seq_positions, sample_counts, tokens, rejected, drafts, confidences,
    length, next_token, record_drafts, record_confidences, draft_count, width,
    num_drafts: tl.constexpr, REJECTED: tl.constexpr, DRAFTED: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    slot = tl.load(slots + sequence)
    if slot >= 0:
        sampled = tl.load(sample_counts + sequence) > 0
        end = tl.load(seq_positions + sequence) + 1
        if REJECTED:
            end -= tl.load(rejected + sequence)
        tl.store(length + slot, end)
        tl.store(next_token + slot, tl.where(sampled, tl.load(tokens + sequence), -1))
        draft = tl.arange(0, DRAFTS)
        proposed = tl.full((DRAFTS,), -1, tl.int64)
        certainty = tl.zeros((DRAFTS,), tl.float32)
        if DRAFTED:
            given = (draft < width) & sampled
            proposed = tl.load(drafts + sequence * width + draft, mask=given, other=-1)
            certainty = tl.load(confidences + sequence * width + draft, mask=given, other=0.0)
        inside = draft < num_drafts
        tl.store(record_drafts + slot * num_drafts + draft, proposed, mask=inside)
        tl.store(record_confidences + slot * num_drafts + draft, certainty, mask=inside)
        tl.store(draft_count + slot, tl.sum(((proposed >= 0) & inside).to(tl.int64)))


@triton.jit
def _remember(
    slots, positions, sequences, token_ids, seq_positions, history, rows, history_length, BLOCK: tl.constexpr
):  # fmt: skip
    """The ids of the rows that ran, by position mod the length of the ring."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    live = slot >= 0
    position = tl.load(positions + row, mask=live, other=0)
    last = tl.load(seq_positions + tl.load(sequences + row, mask=live, other=0), mask=live, other=0)
    token = tl.load(token_ids + row, mask=live, other=0)
    kept = live & (position > last - history_length)
    tl.store(history + slot * history_length + position % history_length, token, mask=kept)


def commit_step(
    records: SlotRecords,
    inputs: StepInputs,
    tokens: Tensor,
    rejected: Tensor | None = None,
    drafts: Tensor | None = None,
    confidences: Tensor | None = None,
) -> None:
    """See the contract `commit_step`."""
    count, rows, num_drafts = inputs.seq_slots.shape[0], inputs.slots.shape[0], records.drafts.shape[1]
    if not count:
        return
    unread = tokens
    if drafts is not None and confidences is not None:
        proposed, certainty, width = drafts.contiguous(), confidences.contiguous(), drafts.shape[1]
    else:
        proposed, certainty, width = unread, unread, 0
    _commit[(count,)](
        inputs.seq_slots, inputs.seq_positions, inputs.sample_counts, tokens, unread if rejected is None else rejected,
        proposed, certainty, records.length, records.next_token, records.drafts, records.confidences,
        records.draft_count, width, num_drafts=num_drafts, REJECTED=rejected is not None, DRAFTED=width > 0,
        DRAFTS=triton.next_power_of_2(max(num_drafts, 1)), num_warps=1,
    )  # fmt: skip
    if rows:
        _remember[(triton.cdiv(rows, BLOCK),)](
            inputs.slots, inputs.positions, inputs.sequences, inputs.token_ids, inputs.seq_positions, records.history,
            rows, records.history.shape[1], BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family."""
    return {function.__name__: Kernel(function, Determinism.EXACT) for function in (expand_plan, commit_step)}

"""The two operations around a forward pass: a plan becomes rows, and what was decided enters the records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, op
from deepinfer.ops.step import PlanTensors, SlotRecords, StepInputs

__all__ = ["commit_step", "expand_plan"]


def _put(target: Tensor, index: Tensor, values: Tensor | float) -> None:
    """target[index] = values for index >= 0 along the first dimension, without asking the device which those are.

    Entries of -1 rewrite entry 0 (reserved, never a real target) with the value it has.
    """
    if index.shape[0] == 0:
        return
    safe = index.clamp(min=0)
    valid = (index >= 0).reshape(-1, *[1] * (target.dim() - 1))
    # A plain number stays one: made into a tensor it would be copied from host memory, which no graph can capture.
    wanted = values.to(target.dtype) if isinstance(values, Tensor) else values
    target[safe] = torch.where(valid, wanted, target[safe])


def _plan_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    slots, pages, drafts, history = {"tiny": (5, 6, 2, 8), "odd": (12, 9, 5, 19), "real": (65, 64, 5, 16)}[size]
    arguments = {"ring_length": {"tiny": 4, "odd": 7, "real": 144}[size], "ngram_size": 4}

    def sample(label: str, kinds: str, padding: int = 0, admitted: int = 0, pad_sequences: int = 0) -> Sample:
        records = _random_records(slots, pages, drafts, history, generator)
        plan = _random_plan(records, kinds, admitted, pad_sequences, generator)
        rows = int(plan.row_counts.sum()) + padding
        sampled = int(_planned_samples(plan).sum()) + padding
        buckets = {"row_bucket": rows, "sample_bucket": sampled}
        return Sample(label, {"records": records, "plan": plan, **buckets, **arguments})

    yield sample("empty", "")
    yield sample("only padding", "", padding=3, pad_sequences=2)
    yield sample("one decode row", "d")
    yield sample("one prompt, admitted", "p", admitted=1)
    yield sample("verification rows", "vv", padding=1)
    yield sample("a sequence without a next token", "uv", padding=2)
    yield sample("mixed", "dvp", padding=5, admitted=1, pad_sequences=1)
    if size != "tiny":
        yield sample("many mixed", "ddddvvppp", padding=2, admitted=2)
    if size == "real":
        yield sample("many decode rows", "d" * 48, padding=16)


def _random_records(slots: int, pages: int, drafts: int, history: int, generator: torch.Generator) -> SlotRecords:
    def ids(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    records = SlotRecords.allocate(slots, pages, drafts, history)
    records.length = ids(30, slots)
    records.next_token = ids(500, slots)
    records.drafts = ids(500, slots, drafts)
    records.draft_count = ids(drafts + 1, slots)
    records.history = ids(500, slots, history)
    return records


def _random_plan(
    records: SlotRecords, kinds: str, admitted: int, pad_sequences: int, generator: torch.Generator
) -> PlanTensors:
    """A plan of decode (d), verify (v, u: nothing to verify) and prefill (p) sequences; the last `admitted` are new."""

    def ids(high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    count = len(kinds)
    num_slots, num_drafts = records.drafts.shape
    slots = 1 + torch.randperm(num_slots - 1, generator=generator)[:count]
    longest = {"d": (1, 2), "v": (2, num_drafts + 2), "u": (2, 3), "p": (1, 13)}
    counts = torch.tensor([int(ids(longest[kind][1], 1, low=longest[kind][0])) for kind in kinds], dtype=torch.int64)
    prefill = torch.tensor([kind == "p" for kind in kinds], dtype=torch.bool)
    samples = ~prefill | (ids(2, count) == 1)
    records.next_token[slots[[kind == "u" for kind in kinds]]] = -1
    new = slots[count - admitted :] if admitted else slots[:0]
    released = 1 + ids(num_slots - 1, min(1, count))
    released = released[~torch.isin(released, slots)]
    pad = torch.full((pad_sequences,), -1)
    pad_zero = torch.zeros(pad_sequences, dtype=torch.int64)
    return PlanTensors(
        slots=torch.cat([slots, pad]),
        row_counts=torch.cat([counts, pad_zero]),
        is_prefill=torch.cat([prefill, pad_zero.bool()]),
        samples=torch.cat([samples, pad_zero.bool()]),
        host_tokens=ids(500, int(counts[prefill].sum())),
        page_slots=torch.cat([slots, pad]),
        page_indices=torch.cat([ids(records.page_table.shape[1], count), pad]),
        page_ids=torch.cat([1 + torch.arange(count), pad]),
        admitted_slots=torch.cat([new, pad]),
        admitted_lengths=torch.cat([ids(4, admitted), pad_zero]),
        admitted_tokens=ids(500, admitted + pad_sequences, 3),
        admitted_temperature=torch.rand(admitted + pad_sequences, generator=generator),
        admitted_top_p=torch.rand(admitted + pad_sequences, generator=generator),
        admitted_top_k=ids(40, admitted + pad_sequences).to(torch.int32),
        admitted_seed=ids(2**62, admitted + pad_sequences),
        admitted_completion=ids(3, admitted + pad_sequences).to(torch.int32),
        released_slots=torch.cat([released, pad]),
        keep_from=torch.cat([ids(20, count), pad_zero]) if count % 2 else ids(1, 0),
    )


@op(samples=_plan_samples, determinism=Determinism.EXACT, mutates=("records",), aliases=("records",))
def expand_plan(
    records: SlotRecords, plan: PlanTensors, row_bucket: int, sample_bucket: int, ring_length: int, ngram_size: int
) -> StepInputs:
    """Apply a plan to the records and expand it to the rows of the step (design 3).

    In this order: released records are cleared, admitted records reset, granted pages entered, rows built. A prefill
    row takes its token from `host_tokens`; row 0 of another sequence is the record's next token, row j its draft j - 1.
    Rows for which the record has no token or draft become padding: nothing unknown is ever forwarded or sampled.

    Args:
        records: written in place (length, tokens and sampling parameters of admitted slots, page table).
        plan: the plan; its rows must fit `row_bucket`.
        row_bucket: T.
        sample_bucket: R, at least the sampled rows of the plan.
        ring_length: entries of a slot's window ring.
        ngram_size: G, the longest Engram n-gram; G - 1 <= H.

    Returns:
        The inputs of the forward pass. Integers only: every backend gives the same values.
    """
    _apply_plan(records, plan)
    device = plan.slots.device
    rows = torch.arange(row_bucket, device=device)
    if plan.slots.shape[0] == 0:
        return _no_rows(records, row_bucket, sample_bucket, ngram_size, device)
    ends = torch.cumsum(plan.row_counts, 0)
    starts = ends - plan.row_counts
    counts = _live_rows(records, plan)
    sequence = torch.searchsorted(ends, rows, right=True).clamp(max=plan.slots.shape[0] - 1)
    offset = rows - starts[sequence]
    count = counts[sequence]
    valid = (rows < ends[-1]) & (offset < count)
    slot = plan.slots[sequence].clamp(min=0)
    first = records.length[slot]
    position = first + offset

    def only(values: Tensor, where: Tensor = valid) -> Tensor:
        return torch.where(where, values, -1)

    tokens = only(_row_tokens(records, plan, sequence, offset, slot))
    distance = torch.arange(1, ngram_size, device=device)
    before = position[:, None] - distance
    own = tokens[(rows[:, None] - distance).clamp(min=0)]
    ring = records.history[slot[:, None], before.clamp(min=0) % records.history.shape[1]]
    history = torch.where(before >= first[:, None], own, ring)
    seq_first = records.length[plan.slots.clamp(min=0)]
    return StepInputs(
        token_ids=tokens,
        positions=only(position),
        slots=only(slot),
        first_positions=only(first),
        first_rows=only(starts[sequence]),
        sequences=only(sequence),
        history=torch.where((before >= 0) & valid[:, None], history, -1),
        is_image=torch.zeros_like(valid),
        embed_override=None,
        embed_override_mask=None,
        window_low=torch.where(valid, 0, -1),
        commit_rows=only(position % ring_length, valid & (offset >= count - ring_length)),
        **_sampled_rows(plan, sample_bucket, starts, counts, seq_first),
        seq_slots=torch.where(counts > 0, plan.slots, -1),
        seq_positions=torch.where(counts > 0, seq_first + counts - 1, -1),
        last_positions=only(first + count - 1),
        page_table=records.page_table,
        keep_from=only(plan.keep_from[sequence]) if plan.keep_from.shape[0] else None,
    )


def _planned_samples(plan: PlanTensors) -> Tensor:
    """Rows [S] that a plan wants sampled of each sequence."""
    return torch.where(plan.samples, torch.where(plan.is_prefill, 1, plan.row_counts), 0)


def _live_rows(records: SlotRecords, plan: PlanTensors) -> Tensor:
    """Rows [S] of each sequence that hold a token: all of a prompt's, else the next token and the drafts there are."""
    slots = plan.slots.clamp(min=0)
    known = torch.where(records.next_token[slots] >= 0, 1 + records.draft_count[slots], 0)
    live = torch.where(plan.is_prefill, plan.row_counts, torch.minimum(plan.row_counts, known))
    return torch.where(plan.slots >= 0, live, 0)


def _sampled_rows(
    plan: PlanTensors, sample_bucket: int, starts: Tensor, counts: Tensor, seq_first: Tensor
) -> dict[str, Any]:
    """The sampled rows of a step: those that the plan wants and that hold a token."""
    planned = _planned_samples(plan)
    ends = torch.cumsum(planned, 0)
    index = torch.arange(sample_bucket, device=planned.device)
    sequence = torch.searchsorted(ends, index, right=True).clamp(max=planned.shape[0] - 1)
    live = torch.where(planned > 0, torch.where(plan.is_prefill, counts.clamp(max=1), counts), 0)
    offset = index - (ends - planned)[sequence]
    valid = (index < ends[-1]) & (offset < live[sequence])
    skipped = torch.where(plan.is_prefill, counts - 1, 0)[sequence]
    return {
        "sample_rows": torch.where(valid, starts[sequence] + skipped + offset, -1),
        "sample_sequences": torch.where(valid, sequence, -1),
        "sample_positions": torch.where(valid, seq_first[sequence] + skipped + offset, -1),
        "sample_starts": ends - planned,
        "sample_counts": live,
    }


def _apply_plan(records: SlotRecords, plan: PlanTensors) -> None:
    """Clear released records, reset admitted ones and enter the granted pages."""
    for slots in (plan.released_slots, plan.admitted_slots):
        for name, value in (("length", 0), ("next_token", -1), ("draft_count", 0), ("drafts", -1)):
            _put(getattr(records, name), slots, value)
        for name, value in (("confidences", 0), ("history", -1), ("page_table", -1)):
            _put(getattr(records, name), slots, value)
    admitted = plan.admitted_slots
    _put(records.length, admitted, plan.admitted_lengths)
    for name in ("temperature", "top_p", "top_k", "seed", "completion"):
        _put(getattr(records, name), admitted, getattr(plan, f"admitted_{name}"))
    width, size = plan.admitted_tokens.shape[-1], records.history.shape[1]
    positions = plan.admitted_lengths[:, None] - width + torch.arange(width, device=admitted.device)
    entries = admitted[:, None] * size + positions.clamp(min=0) % size
    entries = torch.where((admitted[:, None] >= 0) & (positions >= 0), entries, -1)
    _put(records.history.view(-1), entries.reshape(-1), plan.admitted_tokens.reshape(-1))
    pages = plan.page_slots * records.page_table.shape[1] + plan.page_indices
    _put(records.page_table.view(-1), torch.where(plan.page_slots >= 0, pages, -1), plan.page_ids)


def _row_tokens(records: SlotRecords, plan: PlanTensors, sequence: Tensor, offset: Tensor, slot: Tensor) -> Tensor:
    draft = torch.where(offset == 0, records.next_token[slot], -1)
    num_drafts = records.drafts.shape[1]
    if num_drafts:
        proposed = records.drafts[slot, (offset - 1).clamp(0, num_drafts - 1)]
        draft = torch.where((offset > 0) & (offset <= num_drafts), proposed, draft)
    if plan.host_tokens.shape[0] == 0:
        return draft
    prefill_counts = torch.where(plan.is_prefill, plan.row_counts, 0)
    host_starts = torch.cumsum(prefill_counts, 0) - prefill_counts
    host_index = (host_starts[sequence] + offset).clamp(0, plan.host_tokens.shape[0] - 1)
    return torch.where(plan.is_prefill[sequence], plan.host_tokens[host_index], draft)


def _no_rows(
    records: SlotRecords, row_bucket: int, sample_bucket: int, ngram_size: int, device: torch.device
) -> StepInputs:
    nothing = torch.full((row_bucket,), -1, dtype=torch.int64, device=device)
    unsampled = torch.full((sample_bucket,), -1, dtype=torch.int64, device=device)
    none = nothing[:0]
    return StepInputs(
        token_ids=nothing,
        positions=nothing,
        slots=nothing,
        first_positions=nothing,
        first_rows=nothing,
        sequences=nothing,
        history=nothing[:, None].expand(-1, ngram_size - 1).contiguous(),
        is_image=torch.zeros(row_bucket, dtype=torch.bool, device=device),
        embed_override=None,
        embed_override_mask=None,
        window_low=nothing,
        commit_rows=nothing,
        sample_rows=unsampled,
        sample_sequences=unsampled,
        sample_positions=unsampled,
        sample_starts=none,
        sample_counts=none,
        seq_slots=none,
        seq_positions=none,
        last_positions=nothing,
        page_table=records.page_table,
    )


def _commit_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for sample in _plan_samples(size, generator):
        arguments = sample.kwargs
        records = arguments["records"]
        inputs = expand_plan(**arguments)
        sequences, num_drafts = inputs.seq_slots.shape[0], records.drafts.shape[1]

        def ids(high: int, *shape: int) -> Tensor:
            return torch.randint(0, high, shape, generator=generator)

        spare = (inputs.sample_counts - 1).clamp(min=0)
        kwargs = {"records": records, "inputs": inputs, "tokens": ids(500, sequences)}
        yield Sample(sample.label, {**kwargs, "rejected": None, "drafts": None, "confidences": None})
        if sequences:
            drafted = {
                "rejected": torch.minimum(ids(3, sequences), spare),
                "drafts": ids(500, sequences, num_drafts),
                "confidences": torch.rand(sequences, num_drafts, generator=generator),
            }
            yield Sample(f"{sample.label}, drafts", {**kwargs, **drafted})


@op(samples=_commit_samples, determinism=Determinism.EXACT, mutates=("records",))
def commit_step(
    records: SlotRecords,
    inputs: StepInputs,
    tokens: Tensor,
    rejected: Tensor | None = None,
    drafts: Tensor | None = None,
    confidences: Tensor | None = None,
) -> None:
    """Write what a step decided into the records of its sequences (design 3).

    Lengths advance by the accepted rows, next tokens and drafts are replaced, and the history ring takes the ids of the
    rows that ran. Rejected rows stay in the ring until the next step overwrites them.

    Args:
        records: written in place.
        inputs: of the step.
        tokens: int64 [S], token after the last accepted row; ignored where the step samples nothing.
        rejected: int64 [S], last rows of each sequence that were not accepted; None: none.
        drafts: int64 [S, n], n <= N, proposals after `tokens`, -1 from the first missing one on; None: none.
        confidences: float32 [S, n], of the drafts.
    """
    slots, sampled = inputs.seq_slots, inputs.sample_counts > 0
    length = inputs.seq_positions + 1
    _put(records.length, slots, length if rejected is None else length - rejected)
    _put(records.next_token, slots, torch.where(sampled, tokens, -1))
    proposed = torch.full_like(records.drafts[:1].expand(slots.shape[0], -1), -1)
    certainty = torch.zeros_like(records.confidences[:1].expand(slots.shape[0], -1))
    if drafts is not None and confidences is not None:
        count = drafts.shape[1]
        proposed[:, :count] = torch.where(sampled[:, None], drafts, -1)
        certainty[:, :count] = torch.where(sampled[:, None], confidences, 0)
    _put(records.drafts, slots, proposed)
    _put(records.confidences, slots, certainty)
    _put(records.draft_count, slots, (proposed >= 0).sum(1))
    size = records.history.shape[1]
    if slots.shape[0]:
        last = inputs.seq_positions[inputs.sequences.clamp(min=0)]
        kept = (inputs.slots >= 0) & (inputs.positions > last - size)
        entries = torch.where(kept, inputs.slots * size + inputs.positions % size, -1)
        _put(records.history.view(-1), entries, inputs.token_ids)

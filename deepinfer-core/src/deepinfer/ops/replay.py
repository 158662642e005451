"""Bounded replay of the consumer half: which prompt rows go through it (spec/model 6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, Tolerance, op
from deepinfer.ops.sample_inputs import normal
from deepinfer.ops.step import StepInputs

__all__ = ["clip_window", "keep_rows", "take_rows"]

ROW_FIELDS = (
    "token_ids",
    "positions",
    "slots",
    "sequences",
    "history",
    "commit_rows",
    "last_positions",
)
"""Fields of StepInputs that a kept row takes along as they are."""


def clip_window(step: StepInputs) -> StepInputs:
    """The step as the consumer half sees it in mode `mask`: no window reaches below `keep_from`."""
    return dataclasses.replace(step, window_low=torch.maximum(step.window_low, _keep_from(step)))


def _keep_from(step: StepInputs) -> Tensor:
    if step.keep_from is None:
        raise ValueError("this step was not expanded for replay: keep_from is missing")
    return step.keep_from


def _step(
    generator: torch.Generator, starts: list[int], counts: list[int], keep: list[int], padding: int
) -> StepInputs:
    """A step of several sequences, chunk `counts[i]` rows from position `starts[i]`, kept from `keep[i]` on."""
    repeats = torch.tensor(counts, dtype=torch.int64)
    rows = int(repeats.sum())

    def spread(values: list[int] | Tensor) -> Tensor:
        flat = torch.as_tensor(values, dtype=torch.int64).repeat_interleave(repeats)
        return torch.cat((flat, torch.full((padding,), -1)))

    first_rows = torch.cumsum(repeats, 0) - repeats
    spans = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    positions = torch.cat((*spans, torch.full((padding,), -1)))
    lasts = torch.tensor(starts, dtype=torch.int64) + repeats - 1
    nothing = torch.full((len(counts),), -1)
    return StepInputs(
        token_ids=torch.cat((torch.randint(0, 500, (rows,), generator=generator), torch.full((padding,), -1))),
        positions=positions,
        slots=spread(1 + torch.arange(len(counts))),
        first_positions=spread(starts),
        first_rows=spread(first_rows),
        sequences=spread(torch.arange(len(counts))),
        history=torch.randint(-1, 500, (rows + padding, 3), generator=generator),
        is_image=torch.zeros(rows + padding, dtype=torch.bool),
        embed_override=None,
        embed_override_mask=None,
        window_low=torch.where(positions >= 0, 0, -1),
        commit_rows=torch.where(positions >= 0, positions % 7, -1),
        sample_rows=first_rows + repeats - 1,
        sample_sequences=torch.arange(len(counts)),
        sample_positions=lasts,
        sample_starts=torch.arange(len(counts)),
        sample_counts=torch.ones(len(counts), dtype=torch.int64),
        seq_slots=nothing,
        seq_positions=lasts,
        last_positions=spread(lasts),
        page_table=torch.zeros(len(counts) + 1, 4, dtype=torch.int32),
        keep_from=spread(keep),
        kept_bucket=rows + padding,
    )


def _keep_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    scale = {"tiny": 1, "odd": 7, "real": 64}[size]
    steps = {
        "empty": _step(generator, [], [], [], 0),
        "all kept": _step(generator, [0, 5], [scale, 1], [0, 0], 0),
        "a suffix kept": _step(generator, [0, 3], [4 * scale, 1], [3 * scale, 0], 2),
        "a chunk before the suffix": _step(generator, [0, 9], [2 * scale, 1], [5 * scale, 2], 1),
        "nothing kept": _step(generator, [0], [2 * scale], [9 * scale], 0),
    }
    for label, step in steps.items():
        idle = step.positions < _keep_from(step)
        yield Sample(label, {"step": step}, unread={"step.token_ids": idle, "step.history": idle})


@op(samples=_keep_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0), aliases=("step",))
def keep_rows(step: StepInputs) -> tuple[Tensor, StepInputs]:
    """The rows that go through the consumer half, and the step of these rows alone.

    A row is kept from its sequence's `keep_from` on. Rows keep their order; the first kept row of a sequence takes the
    place of its first row, and no window reaches below `keep_from`: earlier kept rows are in the ring.

    Args:
        step: with `keep_from` [T] (-1 for padding) and `kept_bucket`, at least the number of kept rows, at least 1: a
            chunk that keeps nothing sends one padding row on.

    Returns:
        index [kept_bucket] int64 of the kept rows, -1 for padding, and their StepInputs.
    """
    keep_from = _keep_from(step)
    kept = (step.positions >= keep_from) & (step.slots >= 0)
    order = torch.argsort((~kept).to(torch.int8), stable=True)[: step.kept_bucket]
    index = torch.where(kept[order], order, -1)
    place = torch.cumsum(kept, 0) - 1

    def take(values: Tensor) -> Tensor:
        return _take(values, index, -1)

    low, first = take(keep_from), take(step.first_positions)
    first_kept = take(step.first_rows) + (low - first).clamp(min=0)
    first_rows = torch.where(index >= 0, place[first_kept.clamp(min=0)], -1)
    sampled = step.sample_rows.clamp(min=0)
    fields: dict[str, Any] = {name: take(getattr(step, name)) for name in ROW_FIELDS}
    return index, dataclasses.replace(
        step,
        **fields,
        first_positions=torch.maximum(first, low),
        first_rows=first_rows,
        is_image=_take(step.is_image, index, False),
        embed_override=None,
        embed_override_mask=None,
        window_low=torch.maximum(take(step.window_low), low),
        sample_rows=torch.where((step.sample_rows >= 0) & kept[sampled], place[sampled], -1),
        keep_from=low,
    )


def _take(values: Tensor, index: Tensor, padding: float) -> Tensor:
    """Rows of values, `padding` where the index is -1."""
    taken = values[index.clamp(min=0)]
    return taken.masked_fill((index < 0).view(-1, *[1] * (values.dim() - 1)), padding)


def _take_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    width = {"tiny": 8, "odd": 37, "real": 5120}[size]
    values = normal(generator, 9, 4, width)
    yield Sample("some rows", {"values": values, "index": torch.tensor([3, 0, 8, -1])})
    yield Sample("empty", {"values": values, "index": torch.zeros(0, dtype=torch.int64)})
    yield Sample("nothing", {"values": None, "index": torch.tensor([1])})


@op(samples=_take_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0))
def take_rows(values: Any, index: Tensor) -> Any:
    """Rows of a tensor, or of every tensor of a handle; zeros for -1, None stays None.

    Args:
        values: [T, ...] tensor, or a dataclass of such.
        index: [K] int64.
    """
    if values is None:
        return None
    if isinstance(values, Tensor):
        return _take(values, index, 0)
    parts = {field.name: take_rows(getattr(values, field.name), index) for field in dataclasses.fields(values)}
    return dataclasses.replace(values, **parts)

"""Calls on some of a sample's rows, in any order: what row-invariance is tested with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from deepinfer.api.ops import Sample, StepInputs
from deepinfer.conformance.trees import leaves, map_leaves

__all__ = ["row_count", "take_rows", "units"]

PER_SEQUENCE = ("seq_slots", "seq_positions")
SAMPLED = ("sample_rows", "sample_sequences", "sample_positions", "sample_starts", "sample_counts")
SHARED = ("page_table",)


def row_count(sample: Sample) -> int:
    """Rows of a sample: the first dimension of its row arguments."""
    for name in sample.row_args:
        value = sample.kwargs[name]
        if isinstance(value, StepInputs):
            return value.slots.shape[0]
        for _, tensor in leaves(value):
            return tensor.shape[0]
    return 0


def units(sample: Sample) -> list[list[int]]:
    """Rows that can only be moved together: those of one sequence in a step, else each row alone."""
    first_rows = None
    for name in sample.row_args:
        value = sample.kwargs[name]
        if isinstance(value, StepInputs):
            first_rows = value.first_rows
        elif name == "first_rows":
            first_rows = value
    if first_rows is None:
        return [[row] for row in range(row_count(sample))]
    groups: dict[int, list[int]] = {}
    for row, first in enumerate(first_rows.tolist()):
        groups.setdefault(first if first >= 0 else -1 - row, []).append(row)
    return list(groups.values())


def take_rows(sample: Sample, rows: Sequence[int]) -> dict[str, Any]:
    """Arguments of the call on these rows only; rows of one unit must come together and in order."""
    index = torch.tensor(list(rows), dtype=torch.int64)
    count = row_count(sample)
    arguments = dict(sample.kwargs)
    for name in sample.row_args:
        value = arguments[name]
        if isinstance(value, StepInputs):
            arguments[name] = _take_step(value, index)
        elif name == "first_rows":
            arguments[name] = _renumber(value, index)
        else:
            arguments[name] = map_leaves(lambda _, leaf: _take(leaf, index, count), value)
    return arguments


def _take(leaf: Any, index: Tensor, count: int) -> Any:
    return leaf[index] if isinstance(leaf, Tensor) and leaf.shape[0] == count else leaf


def _renumber(first_rows: Tensor, index: Tensor) -> Tensor:
    place = torch.full((first_rows.shape[0] + 1,), -1, dtype=torch.int64)
    place[index] = torch.arange(index.shape[0])
    return place[first_rows[index]]


def _take_step(step: StepInputs, index: Tensor) -> StepInputs:
    changed: dict[str, Any] = {}
    for item in fields(step):
        value = getattr(step, item.name)
        if isinstance(value, Tensor) and item.name not in (*PER_SEQUENCE, *SAMPLED, *SHARED):
            changed[item.name] = value[index]
    changed["first_rows"] = _renumber(step.first_rows, index)
    kept = list(dict.fromkeys(number for number in step.sequences[index].tolist() if number >= 0))
    sequence = torch.full((step.seq_slots.shape[0] + 1,), -1, dtype=torch.int64)
    sequence[kept] = torch.arange(len(kept))
    changed["sequences"] = sequence[step.sequences[index]]
    for name in PER_SEQUENCE:
        changed[name] = getattr(step, name)[kept]
    changed.update(_take_sampled(step, kept, index, sequence))
    return replace(step, **changed)


def _take_sampled(step: StepInputs, kept: list[int], index: Tensor, sequence: Tensor) -> dict[str, Tensor]:
    """The sampled rows of the kept sequences, renumbered."""
    place = torch.full((step.slots.shape[0] + 1,), -1, dtype=torch.int64)
    place[index] = torch.arange(index.shape[0])
    counts = step.sample_counts[kept]
    spans = zip(step.sample_starts[kept].tolist(), counts.tolist(), strict=True)
    taken = [entry for start, count in spans for entry in range(start, start + count)]
    return {
        "sample_rows": place[step.sample_rows[taken]],
        "sample_sequences": sequence[step.sample_sequences[taken]],
        "sample_positions": step.sample_positions[taken],
        "sample_starts": counts.cumsum(0) - counts,
        "sample_counts": counts,
    }

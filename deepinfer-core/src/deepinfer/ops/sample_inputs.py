"""Building blocks of sample inputs: seeded draws and the row counts that every contract is tried at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.contract import SampleSize
from deepinfer.ops.step import StepInputs

__all__ = [
    "RawWeight",
    "RowsInput",
    "StepShape",
    "fp4_bytes",
    "fp8_bytes",
    "fp8_weight",
    "normal",
    "plain_weight",
    "random_step",
    "row_counts",
    "step_shapes",
    "uniform_ids",
    "window_reads",
]


@dataclass(frozen=True)
class RawWeight:
    """A weight in checkpoint bytes, which the caller loads through the backend under test.

    Attributes:
        kind: a `WeightGroup` kind ("fp8_block32", "fp4_experts", "bf16", "float32", "fp8_rows").
        tensors: raw tensors by part name, in order ("weight" and "scale" per part).
        shapes: logical [N, K] of each part, in order.
    """

    kind: str
    tensors: dict[str, Tensor]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RowsInput:
    """Activations [T, C] that the caller turns into `Rows` with the `quantise_rows` of the table under test."""

    values: Tensor


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Standard normal float32 values times `scale`."""
    return scale * torch.randn(*shape, generator=generator)


def uniform_ids(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    """Uniform int64 ids in [0, high)."""
    return torch.randint(0, high, shape, generator=generator)


def row_counts(size: SampleSize) -> Iterator[tuple[str, int]]:
    """Labels and row counts to try at a size: empty, single, around tile edges, many."""
    yield "empty", 0
    yield "one row", 1
    if size == "tiny":
        yield "four rows", 4
    elif size == "odd":
        yield from (("just below a tile", 15), ("just above a tile", 17), ("many", 67))
    else:
        yield "many", 64


def fp8_bytes(generator: torch.Generator, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random finite e4m3 codes [rows, columns] and ue8m0 scales per 32 x 32 block, values of order columns**-0.5."""
    codes = normal(generator, rows, columns, scale=64.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    exponent = 127 - 6 - int(torch.tensor(float(columns)).sqrt().log2().round())
    blocks = (-(-rows // 32), -(-columns // 32))
    scales = torch.randint(exponent - 1, exponent + 2, blocks, generator=generator, dtype=torch.uint8)
    return codes, scales


def fp4_bytes(generator: torch.Generator, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random packed e2m1 bytes [rows, columns / 2] uint8 and ue8m0 scales per row and 32 columns."""
    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    exponent = 127 - 2 - int(torch.tensor(float(columns)).sqrt().log2().round())
    scales = torch.randint(exponent - 1, exponent + 2, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    return packed, scales


def fp8_weight(generator: torch.Generator, *shapes: tuple[int, int]) -> RawWeight:
    """A fused FP8 weight of parts [N, K] that share their input."""
    tensors: dict[str, Tensor] = {}
    for part, (n, k) in enumerate(shapes):
        codes, scales = fp8_bytes(generator, n, k)
        tensors |= {f"{part}.weight": codes, f"{part}.scale": scales}
    return RawWeight("fp8_block32", tensors, shapes)


def plain_weight(generator: torch.Generator, kind: str, n: int, k: int) -> RawWeight:
    """A "bf16" or "float32" weight [N, K] with values of order K**-0.5."""
    values = normal(generator, n, k, scale=k**-0.5)
    return RawWeight(kind, {"weight": values.to(torch.bfloat16) if kind == "bf16" else values}, ((n, k),))


@dataclass(frozen=True)
class StepShape:
    """Rows of a step: (first position, rows) of each sequence, then padding rows."""

    label: str
    sequences: tuple[tuple[int, int], ...]
    padding: int = 0


def step_shapes(size: SampleSize, window: int) -> Iterator[StepShape]:
    """Steps to try: empty, decode, chunks longer than the window, carried chunks, verification, padding."""
    yield StepShape("empty", ())
    yield StepShape("only padding", (), padding=3)
    yield StepShape("one decode row", ((window + 2, 1),))
    yield StepShape("first token", ((0, 1),), padding=1)
    mixed = ((0, 2 * window + 1), (3, 4), (2 * window, 1), (window - 1, 3), (1, 1))
    yield StepShape("mixed", mixed, padding=2)
    if size != "tiny":
        decode = tuple((3 * number % 37, 1 + (number % 9 == 4)) for number in range(34))
        yield StepShape("many decode rows", decode, padding=5)


def random_step(
    generator: torch.Generator, shape: StepShape, *, page_size: int, ring_length: int, ngram_size: int = 4
) -> StepInputs:
    """Inputs of a step whose sequences have random slots and pages.

    Slot 0 and page 0 belong to nobody, nor does the last slot; the page table has `len(sequences) + 3` slots.
    """
    count = len(shape.sequences)
    ends = [first + rows for first, rows in shape.sequences]
    pages = [-(-end // page_size) for end in ends]
    slots = (1 + torch.randperm(count + 1, generator=generator)[:count]).tolist()
    numbers = (1 + torch.randperm(sum(pages), generator=generator)).tolist()
    table = torch.full((count + 3, max(pages, default=0) + 1), -1, dtype=torch.int32)
    columns: dict[str, list[int]] = {name: [] for name in ("position", "slot", "first", "row", "sequence", "last")}
    for number, (first, rows) in enumerate(shape.sequences):
        for page in range(pages[number]):
            table[slots[number], page] = numbers.pop()
        start = len(columns["position"])
        columns["position"] += range(first, first + rows)
        for name, value in (("slot", slots[number]), ("first", first), ("row", start), ("sequence", number)):
            columns[name] += [value] * rows
        columns["last"] += [ends[number] - 1] * rows
    values = {name: torch.tensor(column + [-1] * shape.padding).long() for name, column in columns.items()}
    positions, live = values["position"], values["position"] >= 0
    total = positions.shape[0]
    starts = [rows for _, rows in shape.sequences]
    commit = live & (positions > values["last"] - ring_length)
    history = uniform_ids(generator, 64, total, ngram_size - 1)
    known = positions[:, None] >= torch.arange(1, ngram_size)
    return StepInputs(
        token_ids=torch.where(live, uniform_ids(generator, 64, total), -1),
        positions=positions,
        slots=values["slot"],
        first_positions=values["first"],
        first_rows=values["row"],
        sequences=values["sequence"],
        history=torch.where(known, history, -1),
        is_image=torch.zeros(total, dtype=torch.bool),
        embed_override=None,
        embed_override_mask=None,
        window_low=torch.where(live, 0, -1),
        commit_rows=torch.where(commit, positions % ring_length, -1),
        sample_rows=torch.tensor(starts).long().cumsum(0) - 1,
        sample_sequences=torch.arange(len(slots)),
        sample_positions=torch.tensor(ends).long() - 1,
        sample_starts=torch.arange(len(slots)),
        sample_counts=torch.ones(len(slots), dtype=torch.int64),
        seq_slots=torch.tensor(slots).long(),
        seq_positions=torch.tensor(ends).long() - 1,
        last_positions=values["last"],
        page_table=table,
    )


def window_reads(slots: Tensor, first_positions: Tensor, num_slots: int, ring_length: int, window: int) -> Tensor:
    """Mask [slots, ring length] of the ring rows before `first_positions` that a window reaches back to.

    Args:
        slots, first_positions: [T]; -1 for padding rows.
    """
    needed = torch.zeros(num_slots, ring_length, dtype=torch.bool)
    for slot, first in zip(slots.tolist(), first_positions.tolist(), strict=True):
        for position in range(max(0, first - window + 1), first) if slot >= 0 else ():
            needed[slot, position % ring_length] = True
    return needed

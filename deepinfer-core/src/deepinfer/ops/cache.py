"""Moves of cached rows between step, state slot and pages.

-1 is the only way to say nothing: such rows are never read and change nothing. The references stay free of questions
to the device (no boolean indexing), so that they can run inside a captured graph: a -1 rewrites entry 0, which is
reserved, with the bytes that it has.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, Tolerance, op
from deepinfer.ops.quant import FP4_BLOCK32, RowFormat, pack_rows
from deepinfer.ops.sample_inputs import normal, random_step, row_counts, step_shapes, window_reads

__all__ = [
    "commit_window",
    "copy_blocks",
    "gather_entries",
    "gather_index_keys",
    "gather_window",
    "resolve_entries",
    "store_entries",
    "store_index_keys",
]

EXACT = Tolerance(0.0, 0.0)


def _bytes(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


_WINDOW_SIZES = {"tiny": (4, 6, 8), "odd": (5, 7, 33), "real": (128, 144, 528)}
"""Window, ring length and row bytes of samples."""


def _window_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    window, length, row_bytes = _WINDOW_SIZES[size]
    for shape in step_shapes(size, window):
        step = random_step(generator, shape, page_size=window, ring_length=length)
        slots, rows = step.page_table.shape[0], step.slots.shape[0]
        low = torch.where(step.slots >= 0, torch.randint(0, 3, (rows,), generator=generator), -1)
        arguments = {
            "ring": _bytes(generator, slots, length, row_bytes),
            "step_rows": _bytes(generator, rows, row_bytes),
            "slots": step.slots,
            "positions": step.positions,
            "first_positions": step.first_positions,
            "first_rows": step.first_rows,
            "window_low": low,
        }
        needed = window_reads(step.slots, step.first_positions, slots, length, window)
        unread = {"ring": ~needed, "step_rows": step.slots < 0}
        yield Sample(shape.label, {**arguments, "window": window}, tuple(arguments)[1:], unread)


@op(samples=_window_samples, determinism=Determinism.EXACT, tolerance=EXACT)
def gather_window(
    ring: Tensor,
    step_rows: Tensor,
    slots: Tensor,
    positions: Tensor,
    first_positions: Tensor,
    first_rows: Tensor,
    window_low: Tensor,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Window rows of each query row, oldest first.

    A position before the sequence's first row of this step is read from the ring, else from the step's own rows.

    Args:
        ring: [slots, ring length, bytes] uint8; position p lies at p mod ring length.
        step_rows: [T, bytes] uint8 of this step.
        slots, positions, first_positions, first_rows: [T] int64, -1 for padding rows.
        window_low: [T] int64 lowest visible position.
        window: number of positions, the query's own included.

    Returns:
        rows [T, window, bytes] uint8 (zeros where invalid) and valid [T, window] bool.
    """
    wanted = positions[:, None] + torch.arange(1 - window, 1, device=positions.device)
    valid = (wanted >= window_low.clamp(min=0)[:, None]) & (positions >= 0)[:, None]
    in_step = wanted >= first_positions[:, None]
    ring_position = torch.where(valid, wanted % ring.shape[1], 0)
    from_ring = ring[slots.clamp(min=0)[:, None], ring_position]
    step_index = torch.where(valid & in_step, first_rows[:, None] + wanted - first_positions[:, None], 0)
    rows = torch.where(in_step[..., None], step_rows[step_index], from_ring)
    return rows.masked_fill_(~valid[..., None], 0), valid


def _commit_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    window, length, row_bytes = _WINDOW_SIZES[size]
    for shape in step_shapes(size, window):
        step = random_step(generator, shape, page_size=window, ring_length=length)
        slots, rows = step.page_table.shape[0], step.slots.shape[0]
        commit = step.commit_rows.masked_fill(torch.rand(rows, generator=generator) < 0.2, -1)
        arguments = {"step_rows": _bytes(generator, rows, row_bytes), "slots": step.slots, "commit_rows": commit}
        unread = {"ring": torch.ones(slots).bool(), "step_rows": commit < 0}
        ring = _bytes(generator, slots, length, row_bytes)
        yield Sample(shape.label, {"ring": ring, **arguments}, tuple(arguments), unread)


@op(samples=_commit_samples, determinism=Determinism.EXACT, tolerance=EXACT, mutates=("ring",))
def commit_window(ring: Tensor, step_rows: Tensor, slots: Tensor, commit_rows: Tensor) -> None:
    """Write the step's window rows into the rings, after the layer's attention has read them.

    Args:
        ring: [slots, ring length, bytes] uint8, written in place.
        step_rows: [T, bytes] uint8.
        slots: [T] int64 and commit_rows: [T] int64 ring positions; a row with -1 in either is not written.
    """
    live = (slots >= 0) & (commit_rows >= 0)
    place = torch.where(live, slots, 0), torch.where(live, commit_rows, 0)
    ring[place] = torch.where(live[:, None], step_rows, ring[place])


def _resolve_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    per_page, k = {"tiny": (4, 3), "odd": (3, 7), "real": (128, 512)}[size]
    table = torch.randperm(60, generator=generator).view(5, 12).to(torch.int32)
    for label, rows in row_counts(size):
        entries = torch.randint(-1, 12 * per_page, (rows, k), generator=generator)
        slots = torch.randint(-1, 5, (rows,), generator=generator)
        slots = slots.masked_fill(slots == 4, 0)
        arguments = {"entries": entries, "slots": slots, "page_table": table, "entries_per_page": per_page}
        unread = torch.ones(5, dtype=torch.bool)
        unread[slots[slots >= 0]] = False
        yield Sample(label, arguments, ("entries", "slots"), {"page_table": unread})


@op(samples=_resolve_samples, determinism=Determinism.EXACT, tolerance=EXACT)
def resolve_entries(entries: Tensor, slots: Tensor, page_table: Tensor, entries_per_page: int) -> Tensor:
    """Physical place page * entries_per_page + offset of logical entries; -1 stays -1, also for padding rows.

    Args:
        entries: [T, k] int64, slots: [T] int64, page_table: [slots, pages] int32.

    Returns:
        [T, k] int64.
    """
    live = (entries >= 0) & (slots >= 0)[:, None]
    index = torch.where(live, entries, 0)
    pages = page_table[slots.clamp(min=0)[:, None], index // entries_per_page].to(torch.int64)
    return torch.where(live & (pages >= 0), pages * entries_per_page + index % entries_per_page, -1)


def _entry_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    per_page, row_bytes, k = {"tiny": (4, 9, 3), "odd": (3, 37, 7), "real": (128, 288, 512)}[size]
    pages = _bytes(generator, 6, per_page, row_bytes)
    for label, rows in row_counts(size):
        physical = torch.randint(per_page - 1, 5 * per_page, (rows, k), generator=generator)
        physical = physical.masked_fill(physical < per_page, -1)
        unread = {"pages": _other_places(physical, 6, per_page)}
        yield Sample(label, {"pages": pages, "physical": physical}, ("physical",), unread)


@op(samples=_entry_samples, determinism=Determinism.EXACT, tolerance=EXACT)
def gather_entries(pages: Tensor, physical: Tensor) -> Tensor:
    """Bytes of compressed entries; zeros for -1.

    Args:
        pages: [pages, entries per page, bytes] uint8.
        physical: [T, k] int64.

    Returns:
        [T, k, bytes] uint8.
    """
    place = physical.clamp(min=0)
    rows = pages[place // pages.shape[1], place % pages.shape[1]]
    return rows.masked_fill_((physical < 0)[..., None], 0)


def _places(generator: torch.Generator, rows: int, per_page: int) -> Tensor:
    """Distinct places [rows] in the pages 1 .. 4 of 6, some of them -1."""
    places = per_page + torch.randperm(4 * per_page, generator=generator)[:rows]
    places = torch.cat((places, torch.full((rows - places.shape[0],), -1)))
    return places[torch.randperm(rows, generator=generator)].masked_fill(
        torch.rand(rows, generator=generator) < 0.2, -1
    )


def _other_places(physical: Tensor, pages: int, per_page: int) -> Tensor:
    """Mask [pages, entries per page] of the places that are not named."""
    unread = torch.ones(pages * per_page, dtype=torch.bool)
    unread[physical[physical >= 0]] = False
    return unread.view(pages, per_page)


def _store_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    per_page, row_bytes = {"tiny": (4, 9), "odd": (3, 37), "real": (128, 288)}[size]
    pages = _bytes(generator, 6, per_page, row_bytes)
    for label, rows in row_counts(size):
        physical = _places(generator, rows, per_page)
        arguments = {"rows": _bytes(generator, rows, row_bytes), "physical": physical}
        unread = {"pages": torch.ones(6, dtype=torch.bool), "rows": physical < 0}
        yield Sample(label, {"pages": pages, **arguments}, ("rows", "physical"), unread)


@op(samples=_store_samples, determinism=Determinism.EXACT, tolerance=EXACT, mutates=("pages",))
def store_entries(pages: Tensor, rows: Tensor, physical: Tensor) -> None:
    """Write compressed entries into their pages.

    Args:
        pages: [pages, entries per page, bytes] uint8, written in place.
        rows: [T, bytes] uint8, physical: [T] int64; -1 is not written.
    """
    index = physical.clamp(min=0)
    place = index // pages.shape[1], index % pages.shape[1]
    pages[place] = torch.where((physical >= 0)[:, None], rows, pages[place])


def _index_key_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    per_page, width = {"tiny": (4, 32), "odd": (3, 96), "real": (128, 128)}[size]
    row_format = RowFormat(FP4_BLOCK32, width)
    pages = _bytes(generator, 6, per_page * row_format.row_bytes)
    for label, rows in row_counts(size):
        physical = _places(generator, rows, per_page)
        packed = pack_rows(normal(generator, rows, width), row_format)
        arguments = {"pages": pages, "rows": packed, "physical": physical, "row_format": row_format}
        unread = {"pages": torch.ones(6, dtype=torch.bool), "rows": physical < 0}
        yield Sample(label, arguments, ("rows", "physical"), unread)


@op(samples=_index_key_samples, determinism=Determinism.EXACT, tolerance=EXACT, mutates=("pages",))
def store_index_keys(pages: Tensor, rows: Tensor, physical: Tensor, row_format: RowFormat) -> None:
    """Write index keys: inside a page first the codes of all entries, then all scales (spec/model 4.5).

    Args:
        pages: [pages, entries per page * row bytes] uint8, written in place.
        rows: [T, row bytes] uint8, physical: [T] int64; -1 is not written.
    """
    codes, scales = _index_page_views(pages, row_format)
    live, index = (physical >= 0)[:, None], physical.clamp(min=0)
    place = index // codes.shape[1], index % codes.shape[1]
    codes[place] = torch.where(live, rows[:, : row_format.data_bytes], codes[place])
    if row_format.scale_bytes:
        scales[place] = torch.where(live, rows[:, row_format.data_bytes :], scales[place])


def _index_page_views(pages: Tensor, row_format: RowFormat) -> tuple[Tensor, Tensor]:
    per_page = pages.shape[1] // row_format.row_bytes
    split = per_page * row_format.data_bytes
    codes = pages[:, :split].unflatten(1, (per_page, row_format.data_bytes))
    return codes, pages[:, split:].unflatten(1, (per_page, row_format.scale_bytes))


def _gather_index_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for sample in _index_key_samples(size, generator):
        arguments = {name: sample.kwargs[name] for name in ("pages", "row_format")}
        physical, per_page = sample.kwargs["physical"], arguments["pages"].shape[1] // arguments["row_format"].row_bytes
        unread = {"pages": _other_places(physical, 6, per_page).all(1)}
        yield Sample(sample.label, {**arguments, "physical": physical[:, None]}, ("physical",), unread)


@op(samples=_gather_index_samples, determinism=Determinism.EXACT, tolerance=EXACT)
def gather_index_keys(pages: Tensor, physical: Tensor, row_format: RowFormat) -> Tensor:
    """Packed index keys [T, k, row bytes] uint8 at [T, k] physical places; zeros for -1."""
    codes, scales = _index_page_views(pages, row_format)
    place = physical.clamp(min=0)
    page, offset = place // codes.shape[1], place % codes.shape[1]
    rows = torch.cat((codes[page, offset], scales[page, offset]), dim=-1)
    return rows.masked_fill_((physical < 0)[..., None], 0)


def _copy_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    width = {"tiny": 16, "odd": 37, "real": 113920}[size]
    blocks = _bytes(generator, 6, width)
    source, destination = torch.tensor([2, 1, -1, 5]), torch.tensor([3, -1, 4, 1])
    unread = torch.ones(6, dtype=torch.bool)
    unread[[2, 5]] = False
    arguments = {"source": source, "destination": destination}
    yield Sample("some", {"blocks": blocks, **arguments}, tuple(arguments), {"blocks": unread})
    yield Sample("empty", {"blocks": blocks, "source": source[:0], "destination": destination[:0]})


@op(samples=_copy_samples, determinism=Determinism.EXACT, tolerance=EXACT, mutates=("blocks",))
def copy_blocks(blocks: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy whole pages or slots: blocks[destination] = blocks[source]; a pair with -1 is skipped.

    Args:
        blocks: [N, bytes] uint8, written in place. source, destination: [M] int64, disjoint.
    """
    live = (source >= 0) & (destination >= 0)
    index = torch.where(live, destination, 0)
    blocks[index] = torch.where(live[:, None], blocks[source.clamp(min=0)], blocks[index])

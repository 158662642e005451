"""Writes of cached rows into rings and pages, copies of whole blocks, and the places of entries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer.api.ops import RowFormat
from deepinfer_cuda.kernels.launch import EXACT

__all__ = ["kernels"]

BYTES = 1024
"""Most bytes that a program moves."""


@triton.jit
def _store(
    rows, out, slots, places, row_stride, out_stride, inner_stride, per_page, tail,
    width: tl.constexpr, head: tl.constexpr, HAS_SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's first `head` bytes to its place, the others to a second part of the page; ids: tile of bytes, row."""
    row = tl.program_id(1).to(tl.int64)
    place = tl.load(places + row)
    if HAS_SLOTS:
        page, inside = tl.load(slots + row), place
    else:
        page, inside = place // per_page, place % per_page
    if (place >= 0) & (page >= 0):
        byte = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(rows + row * row_stride + byte, mask=byte < width)
        to = tl.where(byte < head, inside * inner_stride + byte, tail + inside * (width - head) + byte - head)
        tl.store(out + page * out_stride + to, values, mask=byte < width)


@triton.jit
def _copy(blocks, source, destination, stride, width, BLOCK: tl.constexpr):
    """ids: tile of bytes, pair."""
    first, second = tl.load(source + tl.program_id(1)), tl.load(destination + tl.program_id(1))
    if (first >= 0) & (second >= 0):
        byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(blocks + first * stride + byte, mask=byte < width)
        tl.store(blocks + second * stride + byte, values, mask=byte < width)


@triton.jit
def _resolve(
    entries, slots, page_table, out, count, table_stride, row_stride, per_page: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """ids: tile of entries, row."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    entry = tl.load(entries + row * row_stride + column, mask=column < count, other=-1)
    live = (entry >= 0) & (slot >= 0)
    page = tl.load(page_table + slot * table_stride + entry // per_page, mask=live, other=-1).to(tl.int64)
    tl.store(
        out + row * count + column, tl.where(page >= 0, page * per_page + entry % per_page, -1), mask=column < count
    )


def _put(
    rows: Tensor, out: Tensor, places: Tensor, *, inner_stride: int, per_page: int, head: int,
    slots: Tensor | None = None,
) -> None:  # fmt: skip
    """Rows [T, bytes] to their places in pages, or in the rings of their slots; -1 is not written."""
    count, width = rows.shape
    if count:
        block = min(triton.next_power_of_2(width), BYTES)
        _store[(triton.cdiv(width, block), count)](
            rows, out, places if slots is None else slots, places, rows.stride(0), out.stride(0), inner_stride,
            per_page, per_page * head, width=width, head=head, HAS_SLOTS=slots is not None, BLOCK=block, num_warps=2,
            **EXACT,
        )  # fmt: skip


def commit_window(ring: Tensor, step_rows: Tensor, slots: Tensor, commit_rows: Tensor) -> None:
    """See the contract `commit_window`."""
    width = step_rows.shape[1]
    _put(step_rows, ring, commit_rows, inner_stride=ring.stride(1), per_page=ring.shape[1], head=width, slots=slots)


def store_entries(pages: Tensor, rows: Tensor, physical: Tensor) -> None:
    """See the contract `store_entries`."""
    _put(rows, pages, physical, inner_stride=pages.stride(1), per_page=pages.shape[1], head=rows.shape[1])


def store_index_keys(pages: Tensor, rows: Tensor, physical: Tensor, row_format: RowFormat) -> None:
    """See the contract `store_index_keys`."""
    head = row_format.data_bytes
    _put(rows, pages, physical, inner_stride=head, per_page=pages.shape[1] // row_format.row_bytes, head=head)


def copy_blocks(blocks: Tensor, source: Tensor, destination: Tensor) -> None:
    """See the contract `copy_blocks`."""
    pairs, width = source.shape[0], blocks.shape[1]
    if pairs:
        _copy[(triton.cdiv(width, BYTES), pairs)](
            blocks,
            source.contiguous(),
            destination.contiguous(),
            blocks.stride(0),
            width,
            BLOCK=BYTES,
            num_warps=2,
            **EXACT,
        )


def resolve_entries(entries: Tensor, slots: Tensor, page_table: Tensor, entries_per_page: int) -> Tensor:
    """See the contract `resolve_entries`."""
    rows, count = entries.shape
    out = torch.empty(rows, count, dtype=torch.int64, device=entries.device)
    if rows and count:
        entries = entries if entries.stride(1) == 1 else entries.contiguous()
        block = min(triton.next_power_of_2(count), BYTES)
        _resolve[(triton.cdiv(count, block), rows)](
            entries, slots, page_table, out, count, page_table.stride(0), entries.stride(0), per_page=entries_per_page,
            BLOCK=block, num_warps=2, **EXACT,
        )  # fmt: skip
    return out


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family."""
    found = (commit_window, copy_blocks, resolve_entries, store_entries, store_index_keys)
    return {function.__name__: Kernel(function, Determinism.EXACT) for function in found}

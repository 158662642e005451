"""Sparse attention over packed rows where they lie: the window's ring, this step's own rows, and picked entries.

A program takes 16 heads of a row and a range of chunks of keys, widens each chunk once for scores and values, and keeps
a running softmax. Ranges are merged by a second kernel, with the sink last.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer.api.ops import FP4_BLOCK16, FP8_BLOCK32, AttentionWeights, EntryCache, Selection
from deepinfer_cuda.kernels.codes import INTERPRETED, as_dtype, e4m3_values, exponent_values, fp4_values
from deepinfer_cuda.kernels.launch import EXACT

__all__ = ["kernels"]

HEAD_TILE = 16
CHUNK, WIDE_CHUNK = 64, 32
"""Keys of a chunk in bfloat16 and in float32."""

FIXED_RANGES = 5
"""Ranges of a row in row-invariant mode."""


@triton.jit
def _load_fp8(base, live, width: tl.constexpr, WIDTH: tl.constexpr):
    """float32 values [keys, WIDTH] of rows of e4m3 codes and exponent bytes."""
    channel, group = tl.arange(0, WIDTH), tl.arange(0, WIDTH // 32)
    used = live[:, None] & (channel < width)[None, :]
    codes = e4m3_values(tl.load(base[:, None] + channel[None, :], mask=used, other=0))
    at = base[:, None] + width + group[None, :]
    scale = exponent_values(tl.load(at, mask=live[:, None] & (group < width // 32)[None, :], other=0))
    return (codes.reshape(codes.shape[0], WIDTH // 32, 32) * scale[:, :, None]).reshape(codes.shape[0], WIDTH)


@triton.jit
def _load_fp4(base, live, width: tl.constexpr, WIDTH: tl.constexpr):
    """float32 values [keys, WIDTH] of rows of e2m1 codes and an e4m3 scale for every 16 of them."""
    byte, group = tl.arange(0, WIDTH // 2), tl.arange(0, WIDTH // 16)
    packed = tl.load(base[:, None] + byte[None, :], mask=live[:, None] & (byte < width // 2)[None, :], other=0)
    codes = tl.join(fp4_values(packed & 15), fp4_values(packed >> 4)).reshape(packed.shape[0], WIDTH // 16, 16)
    at = base[:, None] + width // 2 + group[None, :]
    scale = e4m3_values(tl.load(at, mask=live[:, None] & (group < width // 16)[None, :], other=0))
    return (codes * scale[:, :, None]).reshape(packed.shape[0], WIDTH)


@triton.jit
def _load_plain(base, live, width: tl.constexpr, WIDTH: tl.constexpr):
    channel = tl.arange(0, WIDTH)
    used = live[:, None] & (channel < width)[None, :]
    return tl.load(base[:, None] + channel[None, :], mask=used, other=0.0).to(tl.float32)


@triton.jit
def _attend(
    query, window_rows, ring, entries, physical, slots, positions, first_positions, first_rows, window_low, sink,
    out, partial, statistics, scale, heads, picks, ring_stride, page_stride,
    width: tl.constexpr, window: tl.constexpr, ring_length: tl.constexpr, row_size: tl.constexpr,
    per_page: tl.constexpr, entry_size: tl.constexpr, WINDOW_FP8: tl.constexpr, ENTRY_FP4: tl.constexpr,
    WIDE: tl.constexpr, WINDOW_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, RANGES: tl.constexpr,
    WIDTH: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Program ids: tile of heads, range of chunks, row."""
    row = tl.program_id(2).to(tl.int64)
    head, channel = tl.program_id(0) * HEADS + tl.arange(0, HEADS), tl.arange(0, WIDTH)
    used = (head < heads)[:, None] & (channel < width)[None, :]
    q = tl.load(query + (row * heads + head)[:, None] * width + channel[None, :], mask=used, other=0.0)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    first_position, first_row = tl.load(first_positions + row), tl.load(first_rows + row)
    lowest = tl.maximum(tl.load(window_low + row), 0)
    largest = tl.full((HEADS,), float("-inf"), tl.float32)
    total, mixed = tl.zeros((HEADS,), tl.float32), tl.zeros((HEADS, WIDTH), tl.float32)
    steps: tl.constexpr = (CHUNKS + RANGES - 1) // RANGES
    for step in range(0, steps):
        chunk = tl.program_id(1) * steps + step
        number = tl.arange(0, KEYS)
        if chunk < WINDOW_CHUNKS:
            wanted = position - window + 1 + chunk * KEYS + number
            live = (wanted >= lowest) & (wanted <= position)
            own = live & (wanted >= first_position)
            in_ring = ring + tl.maximum(slot, 0) * ring_stride + (tl.maximum(wanted, 0) % ring_length) * row_size
            base = tl.where(own, window_rows + (first_row + wanted - first_position) * row_size, in_ring)
            if WINDOW_FP8:
                key = _load_fp8(base, live, width, WIDTH)
            else:
                key = _load_plain(base, live, width, WIDTH)
        else:
            pick = (chunk - WINDOW_CHUNKS) * KEYS + number
            place = tl.load(physical + row * picks + pick, mask=(pick < picks) & (chunk < CHUNKS), other=-1)
            live = place >= 0
            place = tl.maximum(place, 0)
            entry = entries + (place // per_page) * page_stride + (place % per_page) * entry_size
            if ENTRY_FP4:
                key = _load_fp4(entry, live, width, WIDTH)
            else:
                key = _load_plain(entry, live, width, WIDTH)
        if WIDE:
            scores = tl.dot(q.to(tl.float32), tl.trans(key), input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(key.to(tl.bfloat16)))
        scores = tl.where(live[None, :], scores * scale, float("-inf"))
        highest = tl.maximum(largest, tl.max(scores, axis=1))
        reference = tl.where(highest == float("-inf"), 0.0, highest)
        shares, fade = tl.exp(scores - reference[:, None]), tl.exp(largest - reference)
        total = total * fade + tl.sum(shares, axis=1)
        if WIDE:
            mixed = mixed * fade[:, None] + tl.dot(shares, key, input_precision="ieee")
        else:
            mixed = mixed * fade[:, None] + tl.dot(shares.to(tl.bfloat16), key.to(tl.bfloat16))
        largest = highest
    if RANGES == 1:
        bias = tl.load(sink + head, mask=head < heads, other=0.0)
        highest = tl.maximum(largest, bias)
        fade = tl.exp(largest - highest)
        result = mixed * (fade / (total * fade + tl.exp(bias - highest)))[:, None]
        target = out + (row * heads + head)[:, None] * width + channel[None, :]
        tl.store(target, as_dtype(result, out.dtype.element_ty), mask=used)
    else:
        place = (row * RANGES + tl.program_id(1)) * heads + head
        tl.store(partial + place[:, None] * width + channel[None, :], mixed, mask=used)
        tl.store(statistics + 2 * place, largest, mask=head < heads)
        tl.store(statistics + 2 * place + 1, total, mask=head < heads)


@triton.jit
def _merge(
    partial, statistics, sink, out, heads, width: tl.constexpr, RANGES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program ids: head, row."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    bias = tl.load(sink + head)
    highest = bias
    for part in tl.static_range(RANGES):
        highest = tl.maximum(highest, tl.load(statistics + 2 * ((row * RANGES + part) * heads + head)))
    total, mixed = tl.exp(bias - highest), tl.zeros((WIDTH,), tl.float32)
    for part in tl.static_range(RANGES):
        place = (row * RANGES + part) * heads + head
        fade = tl.exp(tl.load(statistics + 2 * place) - highest)
        total += tl.load(statistics + 2 * place + 1) * fade
        mixed += tl.load(partial + place * width + channel, mask=channel < width, other=0.0) * fade
    target = out + (row * heads + head) * width + channel
    tl.store(target, as_dtype(mixed / total, out.dtype.element_ty), mask=channel < width)


def _ranges(rows: int, chunks: int, fixed: bool) -> int:
    """Ranges of a row: many for few rows, none to merge for many."""
    if fixed:
        return min(FIXED_RANGES, chunks)
    return min(10 if rows <= 8 else FIXED_RANGES if rows <= 16 else 2 if rows <= 64 else 1, chunks)


def _run(
    query: Tensor,
    window_rows: Tensor,
    ring: Tensor,
    step: Any,
    weights: AttentionWeights,
    selection: Selection | None,
    cache: EntryCache | None,
    fixed: bool,
) -> Tensor:
    rows, heads, width = query.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not rows:
        return out
    is_fp8 = weights.window_format.name == FP8_BLOCK32
    entries, physical, picks, is_fp4, sizes = window_rows, step.slots, 0, True, (1, 1, 1)
    if not is_fp8:
        window_rows, ring = (part.view(weights.window_format.plain_dtype) for part in (window_rows, ring))
    if selection is not None and cache is not None:
        is_fp4 = cache.entry_format.name == FP4_BLOCK16
        entries = cache.entries if is_fp4 else cache.entries.view(cache.entry_format.plain_dtype)
        physical, picks = selection.physical, selection.physical.shape[1]
        sizes = (entries.stride(0), entries.shape[1], entries.stride(1))
    wide = INTERPRETED or query.dtype is torch.float32
    keys = WIDE_CHUNK if wide else CHUNK
    window_chunks = triton.cdiv(weights.window, keys)
    chunks = window_chunks + triton.cdiv(picks, keys)
    ranges = _ranges(rows, chunks, fixed)
    partial, statistics = out, out
    if ranges > 1:
        partial = torch.empty(rows, ranges, heads, width, dtype=torch.float32, device=query.device)
        statistics = torch.empty(rows, ranges, heads, 2, dtype=torch.float32, device=query.device)
    padded = triton.next_power_of_2(width)
    _attend[(triton.cdiv(heads, HEAD_TILE), ranges, rows)](
        query.contiguous(), window_rows.contiguous(), ring, entries, physical, step.slots, step.positions,
        step.first_positions, step.first_rows, step.window_low, weights.sink, out, partial, statistics, weights.scale,
        heads, picks, ring.stride(0), sizes[0], width=width, window=weights.window, ring_length=ring.shape[1],
        row_size=ring.stride(1), per_page=sizes[1], entry_size=sizes[2], WINDOW_FP8=is_fp8, ENTRY_FP4=is_fp4, WIDE=wide,
        WINDOW_CHUNKS=window_chunks, CHUNKS=chunks, RANGES=ranges, WIDTH=padded, KEYS=keys, HEADS=HEAD_TILE,
        num_warps=8 if padded > 256 else 4, num_stages=1, **EXACT,
    )  # fmt: skip
    if ranges > 1:
        _merge[(heads, rows)](
            partial,
            statistics,
            weights.sink,
            out,
            heads,
            width=width,
            RANGES=ranges,
            WIDTH=padded,
            num_warps=2,
            **EXACT,
        )
    return out


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family; the ranges of a row depend on the batch unless its rows must not."""
    fixed = numerics.batch_invariant

    def sparse_attention(
        query: Tensor,
        window_rows: Tensor,
        ring: Tensor,
        step: Any,
        weights: AttentionWeights,
        selection: Selection | None,
        cache: EntryCache | None,
    ) -> Tensor:
        return _run(query, window_rows, ring, step, weights, selection, cache, fixed)

    promise = Determinism.ROW_INVARIANT if fixed else Determinism.RUN_TO_RUN
    return {"sparse_attention": Kernel(sparse_attention, promise)}

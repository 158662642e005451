"""Exact selection of the best entries and blocks of a row, in ascending order, lower numbers first on ties.

A score becomes an unsigned number of the same order. One program a row finds the smallest number that is chosen, bit by
bit from the highest, and writes the chosen places in one more pass. Scores that are all bfloat16 values, as the release
ranks them, need half of the bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer_cuda.kernels.launch import EXACT

__all__ = ["kernels"]

CHUNK = 4096
"""Scores that a program looks at together."""

COPY_TILE = 256
"""Scores that a program copies."""


@triton.jit
def _ordered(scores):
    """Scores as uint32 numbers of the same order; both zeros are one number."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    flip = tl.where(bits < 0, -1, -2147483648).to(tl.int32)
    return (bits ^ flip).to(tl.uint32, bitcast=True)


@triton.jit
def _select(scores, out, count, stride, top_k, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source, target = scores + row * stride, out + row * top_k
    lane = tl.arange(0, BLOCK)
    fraction, used = tl.zeros((BLOCK,), tl.int32), 0
    for chunk in range(CHUNKS):
        place = chunk * BLOCK + lane
        values = tl.load(source + place, mask=place < count, other=float("-inf"))
        fraction |= values.to(tl.int32, bitcast=True) & 0xFFFF
        used = tl.where(tl.max(values) > float("-inf"), chunk + 1, used)
    shift = tl.where(tl.max(fraction) == 0, 16, 0)
    threshold = tl.full((), 0, tl.uint32)
    for step in range(32):
        if step < 32 - shift:
            candidate = threshold | (tl.full((), 1, tl.uint32) << (31 - shift - step).to(tl.uint32))
            reached = tl.zeros((BLOCK,), tl.int32)
            for chunk in range(CHUNKS):
                if chunk < used:
                    place = chunk * BLOCK + lane
                    values = tl.load(source + place, mask=place < count, other=float("-inf"))
                    number = _ordered(values) >> shift.to(tl.uint32)
                    reached += ((number >= candidate) & (values > float("-inf"))).to(tl.int32)
            threshold = tl.where(tl.sum(reached) >= top_k, candidate, threshold)
    above = tl.zeros((BLOCK,), tl.int32)
    for chunk in range(CHUNKS):
        if chunk < used:
            place = chunk * BLOCK + lane
            values = tl.load(source + place, mask=place < count, other=float("-inf"))
            above += ((_ordered(values) >> shift.to(tl.uint32) > threshold) & (values > float("-inf"))).to(tl.int32)
    spare, written = top_k - tl.sum(above), 0
    for chunk in range(CHUNKS):
        if chunk < used:
            place = chunk * BLOCK + lane
            values = tl.load(source + place, mask=place < count, other=float("-inf"))
            live = values > float("-inf")
            number = _ordered(values) >> shift.to(tl.uint32)
            tied = (live & (number == threshold)).to(tl.int32)
            kept = (tied == 1) & (tl.cumsum(tied) <= spare)
            chosen = (live & (number > threshold)) | kept
            at = written + tl.cumsum(chosen.to(tl.int32)) - 1
            tl.store(target + at, place.to(tl.int64), mask=chosen)
            written += tl.sum(chosen.to(tl.int32))
            spare -= tl.sum(kept.to(tl.int32))
    tail = tl.arange(0, CHOSEN)
    tl.store(target + tail, tl.full((CHOSEN,), -1, tl.int64), mask=(tail >= written) & (tail < top_k))


@triton.jit
def _best_of_blocks(
    scores, visible, out, count, blocks, stride, size: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Largest score of every block, infinity for the newest; ids: tile of blocks, row."""
    row = tl.program_id(1).to(tl.int64)
    block, inside = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, SIZE)
    place = block[:, None] * size + inside[None, :]
    values = tl.load(
        scores + row * stride + place, mask=(inside < size)[None, :] & (place < count), other=float("-inf")
    )
    seen = tl.load(visible + row)
    best = tl.where(block == (seen - 1) // size, float("inf"), tl.max(values, axis=1))
    tl.store(out + row * blocks + block, tl.where(seen > 0, best, float("-inf")), mask=block < blocks)


@triton.jit
def _copy_blocks(scores, blocks, out, count, kept, stride, size: tl.constexpr, TILE: tl.constexpr):
    """Scores of the kept blocks to their places; ids: tile of kept scores, row."""
    row = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    block = tl.load(blocks + row * kept + number // size, mask=number < kept * size, other=-1)
    place = block * size + number % size
    live = (block >= 0) & (place < count)
    tl.store(out + row * count + place, tl.load(scores + row * stride + place, mask=live), mask=live)


def select_topk(scores: Tensor, top_k: int) -> Tensor:
    """See the contract `select_topk`."""
    rows, count = scores.shape
    out = torch.empty(rows, top_k, dtype=torch.int64, device=scores.device)
    if rows:
        block = min(triton.next_power_of_2(count), CHUNK)
        _select[(rows,)](
            scores, out, count, scores.stride(0), top_k, CHUNKS=triton.cdiv(count, block), BLOCK=block,
            CHOSEN=triton.next_power_of_2(top_k), num_warps=8, **EXACT,
        )  # fmt: skip
    return out


def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, blocks: int) -> Tensor:
    """See the contract `candidate_blocks`."""
    rows, count = scores.shape
    number = triton.cdiv(count, block_size)
    best = torch.empty(rows, number, dtype=torch.float32, device=scores.device)
    if rows:
        tile = max(1, COPY_TILE // triton.next_power_of_2(block_size))
        _best_of_blocks[(triton.cdiv(number, tile), rows)](
            scores, visible, best, count, number, scores.stride(0), size=block_size, TILE=tile,
            SIZE=triton.next_power_of_2(block_size), num_warps=2, **EXACT,
        )  # fmt: skip
    return select_topk(best, blocks)


def restrict_to_blocks(scores: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """See the contract `restrict_to_blocks`."""
    rows, count = scores.shape
    out = torch.full((rows, count), -torch.inf, dtype=scores.dtype, device=scores.device)
    kept = blocks.shape[1]
    if rows and kept:
        _copy_blocks[(triton.cdiv(kept * block_size, COPY_TILE), rows)](
            scores, blocks.contiguous(), out, count, kept, scores.stride(0), size=block_size, TILE=COPY_TILE,
            num_warps=2, **EXACT,
        )  # fmt: skip
    return out


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family."""
    found = (candidate_blocks, restrict_to_blocks, select_topk)
    return {function.__name__: Kernel(function, Determinism.EXACT) for function in found}

"""Index scores: one program meets all heads of a row with a tile of keys, wherever their pages lie."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer.api.ops import FP4_BLOCK32, RowFormat
from deepinfer_cuda.kernels.codes import INTERPRETED, exponent_values, fp4_values, nearest_bf16
from deepinfer_cuda.kernels.launch import EXACT

__all__ = ["index_scores", "kernels"]

KEY_TILE = 128
"""Scores that a program computes."""

SCORE_TILE = 256
"""The number of scores of a row is a multiple of it, as the contract has it."""

LEAST_HEADS = 16
"""Shortest side of a matrix product."""


@triton.jit
def _scores(
    query, weights, keys, slots, visible, page_table, out, count, page_stride, table_stride,
    heads: tl.constexpr, width: tl.constexpr, per_page: tl.constexpr, FP4: tl.constexpr, WIDE: tl.constexpr,
    ROUND: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = out + row * count + entry
    seen = tl.load(visible + row)
    if tl.program_id(0) * TILE < seen:
        live = entry < seen
        page = tl.load(page_table + tl.load(slots + row) * table_stride + entry // per_page, mask=live, other=0)
        base, inside = keys + page.to(tl.int64) * page_stride, entry % per_page
        channel = tl.arange(0, WIDTH)
        used = live[:, None] & (channel < width)[None, :]
        if FP4:
            half, group = tl.arange(0, WIDTH // 2), tl.arange(0, WIDTH // 32)
            packed = tl.load(
                base[:, None] + (inside * (width // 2))[:, None] + half[None, :],
                mask=live[:, None] & (half < width // 2)[None, :], other=0,
            )  # fmt: skip
            scale = tl.load(
                base[:, None] + (per_page * (width // 2) + inside * (width // 32))[:, None] + group[None, :],
                mask=live[:, None] & (group < width // 32)[None, :], other=0,
            )  # fmt: skip
            codes = tl.join(fp4_values(packed & 15), fp4_values(packed >> 4)).reshape(TILE, WIDTH // 32, 32)
            key = (codes * exponent_values(scale)[:, :, None]).reshape(TILE, WIDTH)
        else:
            key = tl.load(base[:, None] + (inside * width)[:, None] + channel[None, :], mask=used, other=0.0)
        head = tl.arange(0, HEADS)
        q = tl.load(
            query + (row * heads + head)[:, None] * width + channel[None, :],
            mask=(head < heads)[:, None] & (channel < width)[None, :], other=0.0,
        )  # fmt: skip
        if WIDE:
            products = tl.dot(key.to(tl.float32), tl.trans(q.to(tl.float32)), input_precision="ieee")
        else:
            products = tl.dot(key.to(tl.bfloat16), tl.trans(q))
        share = tl.load(weights + row * heads + head, mask=head < heads, other=0.0)
        score = tl.sum(tl.maximum(products, 0.0) * share[None, :], axis=1)
        if ROUND:
            score = nearest_bf16(score)
        tl.store(place, tl.where(live, score, float("-inf")))
    else:
        tl.store(place, tl.full((TILE,), float("-inf"), tl.float32))


def index_scores(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_format: RowFormat,
    slots: Tensor,
    visible: Tensor,
    page_table: Tensor,
    entries_per_page: int,
) -> Tensor:
    """See the contract `index_scores`; a row has as many scores as its page table has entries, so nothing is asked."""
    rows, heads, width = query.shape
    most = page_table.shape[1] * entries_per_page if rows else 1
    count = triton.cdiv(max(most, 1), SCORE_TILE) * SCORE_TILE
    out = torch.empty(rows, count, dtype=torch.float32, device=query.device)
    fp4 = key_format.name == FP4_BLOCK32
    stored = keys if fp4 else keys.view(key_format.plain_dtype)
    if rows:
        _scores[(count // KEY_TILE, rows)](
            query.contiguous(), weights.contiguous(), stored, slots, visible, page_table, out, count, stored.stride(0),
            page_table.stride(0), heads=heads, width=width, per_page=entries_per_page, FP4=fp4,
            WIDE=INTERPRETED or query.dtype is torch.float32, ROUND=query.dtype is torch.bfloat16,
            HEADS=max(triton.next_power_of_2(heads), LEAST_HEADS), WIDTH=triton.next_power_of_2(width), TILE=KEY_TILE,
            num_warps=4, **EXACT,
        )  # fmt: skip
    return out


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family."""
    return {"index_scores": Kernel(index_scores, Determinism.ROW_INVARIANT)}

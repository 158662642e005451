"""Routed experts: pairs of (row, choice) in the order of their experts, cut into tiles that meet one expert each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer.api.ops import FP8_BLOCK32, RowFormat, Rows, gated_activation, round_rows
from deepinfer_cuda.handles import ExpertMatrices, Fp4Experts
from deepinfer_cuda.kernels.codes import INTERPRETED, exponent_values, fp4_values

__all__ = ["expert_ffn"]

PAIR_TILE = 16
OUTPUT_TILE = 64
INPUT_CHUNK = 64


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Work of a grouped product; all int32, on the device.

    Attributes:
        pairs: [P], pairs by expert, those without one at the end.
        expert: [tiles], -1 for a tile without work.
        first: [tiles], place of its first pair in `pairs`.
        end: [tiles], place behind the last pair of its expert.
    """

    pairs: Tensor
    expert: Tensor
    first: Tensor
    end: Tensor


def _tiles(ids: Tensor, experts: int) -> _Tiles:
    """Cut the pairs of ids [T, k] into tiles; their number is bounded by sizes alone, so nothing is read back."""
    flat = torch.where(ids.flatten() >= 0, ids.flatten(), experts)
    count = flat.shape[0]
    pairs = flat.argsort(stable=True)
    sizes = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    sizes.scatter_add_(0, flat, torch.ones_like(flat))
    sizes = sizes[:experts]
    ends, tiles = sizes.cumsum(0), (sizes + PAIR_TILE - 1) // PAIR_TILE
    last_tile = tiles.cumsum(0)
    bound = min(count, count // PAIR_TILE + experts)
    tile = torch.arange(bound, device=ids.device)
    expert = torch.searchsorted(last_tile, tile, right=True)
    safe = expert.clamp(max=experts - 1)
    first = ends[safe] - sizes[safe] + (tile - last_tile[safe] + tiles[safe]) * PAIR_TILE
    expert = torch.where(expert < experts, expert, -1)
    return _Tiles(*(part.to(torch.int32) for part in (pairs, expert, first, ends[safe])))


@triton.jit
def _expert_product(
    x, codes, scales, out, pairs, expert_of, first_of, end_of, x_stride, out_stride,
    outputs: tl.constexpr, inputs: tl.constexpr, CHOICES: tl.constexpr, WIDE: tl.constexpr,
    TILE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[pair] = w[expert] x[pair // CHOICES] for the pairs of one tile; program ids: outputs, tile."""
    expert = tl.load(expert_of + tl.program_id(1))
    if expert >= 0:
        place = tl.load(first_of + tl.program_id(1)) + tl.arange(0, TILE)
        live = place < tl.load(end_of + tl.program_id(1))
        pair = tl.load(pairs + place, mask=live, other=0).to(tl.int64)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        row = expert.to(tl.int64) * outputs + n
        half, chunk = tl.arange(0, BK // 2), tl.arange(0, BK)
        sums = tl.zeros((TILE, BN), tl.float32)
        for start in range(0, inputs, BK):
            k, byte = start + chunk, start // 2 + half
            a = tl.load(
                x + (pair // CHOICES)[:, None] * x_stride + k[None, :], mask=live[:, None] & (k < inputs)[None, :], other=0.0
            )
            here = (n < outputs)[:, None] & (byte < inputs // 2)[None, :]
            packed = tl.load(codes + row[:, None] * (inputs // 2) + byte[None, :], mask=here, other=0)
            scale = tl.load(scales + row[:, None] * (inputs // 32) + (byte // 16)[None, :], mask=here, other=0)
            factor = exponent_values(scale)
            w = tl.join(fp4_values(packed & 15) * factor, fp4_values(packed >> 4) * factor).reshape(BN, BK)
            if WIDE:
                sums += tl.dot(a.to(tl.float32), tl.trans(w), input_precision="ieee")
            else:
                sums += tl.dot(a, tl.trans(w.to(tl.bfloat16)))
        target = out + pair[:, None] * out_stride + n[None, :]
        tl.store(target, sums.to(out.dtype.element_ty), mask=live[:, None] & (n < outputs)[None, :])


def _product(x: Tensor, matrices: ExpertMatrices, tiles: _Tiles, out: Tensor, choices: int) -> None:
    """One projection of every pair: x [pairs / choices, K] -> out [pairs, N]; pairs without an expert stay."""
    _, outputs, inputs = matrices.shape
    grid = (triton.cdiv(outputs, OUTPUT_TILE), tiles.expert.shape[0])
    _expert_product[grid](
        x, matrices.codes, matrices.scales, out, tiles.pairs, tiles.expert, tiles.first, tiles.end,
        x.stride(0), out.stride(0), outputs=outputs, inputs=inputs, CHOICES=choices,
        WIDE=INTERPRETED or x.dtype is torch.float32, TILE=PAIR_TILE, BN=OUTPUT_TILE, BK=INPUT_CHUNK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def expert_ffn(
    rows: Rows, ids: Tensor, weights: Tensor, experts: Fp4Experts, limit: float, quantise: bool
) -> Tensor:
    """See the contract `expert_ffn`."""
    x = rows.quantised
    out = torch.zeros(*ids.shape, x.shape[1], dtype=x.dtype, device=x.device)
    if not ids.numel():
        return out
    tiles = _tiles(ids, experts.down.shape[0])
    gate_up = torch.zeros(ids.numel(), experts.gate_up.shape[1], dtype=x.dtype, device=x.device)
    _product(x if x.stride(1) == 1 else x.contiguous(), experts.gate_up, tiles, gate_up, ids.shape[1])
    hidden = gated_activation(gate_up, limit, weights.flatten())
    if quantise:
        hidden = round_rows(hidden, RowFormat(FP8_BLOCK32, hidden.shape[-1]))
    _product(hidden, experts.down, tiles, out.flatten(0, 1), 1)
    return out


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family."""
    return {"expert_ffn": Kernel(expert_ffn, Determinism.ROW_INVARIANT)}

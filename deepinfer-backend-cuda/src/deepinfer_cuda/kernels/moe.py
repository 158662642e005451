"""Routed experts: pairs of (row, choice) in the order of their experts, cut into tiles that meet one expert each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer.api.errors import CapabilityError
from deepinfer.api.ops import FP8_BLOCK32, RowFormat, Rows, gated_activation, round_rows
from deepinfer_cuda.expert_words import ExpertWords
from deepinfer_cuda.handles import ExpertMatrices, Fp4Experts, QuantisedRows
from deepinfer_cuda.kernels.codes import INTERPRETED, as_dtype, exponent_values, fp4_values
from deepinfer_cuda.kernels.expert_tiles import PAIR_TILE, Tiles, cut_tiles
from deepinfer_cuda.kernels.moe_sm90 import expert_ffn_words

__all__ = ["kernels"]

OUTPUT_TILE = 64
INPUT_CHUNK = 64


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
                x + (pair // CHOICES)[:, None] * x_stride + k[None, :],
                mask=live[:, None] & (k < inputs)[None, :],
                other=0.0,
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
        tl.store(target, as_dtype(sums, out.dtype.element_ty), mask=live[:, None] & (n < outputs)[None, :])


def _product(x: Tensor, matrices: ExpertMatrices, tiles: Tiles, out: Tensor, choices: int) -> None:
    """One projection of every pair: x [pairs / choices, K] -> out [pairs, N]; pairs without an expert stay."""
    _, outputs, inputs = matrices.shape
    grid = (triton.cdiv(outputs, OUTPUT_TILE), tiles.expert.shape[0])
    _expert_product[grid](
        x, matrices.codes, matrices.scales, out, tiles.pairs, tiles.expert, tiles.first, tiles.end,
        x.stride(0), out.stride(0), outputs=outputs, inputs=inputs, CHOICES=choices,
        WIDE=INTERPRETED or x.dtype is torch.float32, TILE=PAIR_TILE, BN=OUTPUT_TILE, BK=INPUT_CHUNK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _expert_ffn(
    rows: Rows | QuantisedRows,
    ids: Tensor,
    weights: Tensor,
    experts: Fp4Experts,
    limit: float,
    quantise: bool,
    tile: int | None,
) -> Tensor:
    up, down = experts.gate_up, experts.down
    if isinstance(up, ExpertWords) or isinstance(down, ExpertWords):
        if not (isinstance(up, ExpertWords) and isinstance(down, ExpertWords) and isinstance(rows, QuantisedRows)):
            raise CapabilityError("experts packed for FP8 matrix units read quantised rows; plan them unquantised")
        return expert_ffn_words(rows, ids, weights, up, down, limit, tile)
    x = rows.quantised
    out = torch.zeros(*ids.shape, x.shape[1], dtype=x.dtype, device=x.device)
    if not ids.numel():
        return out
    tiles = cut_tiles(ids, down.shape[0], PAIR_TILE)
    gate_up = torch.zeros(ids.numel(), up.shape[1], dtype=x.dtype, device=x.device)
    _product(x if x.stride(1) == 1 else x.contiguous(), up, tiles, gate_up, ids.shape[1])
    hidden = gated_activation(gate_up, limit, weights.flatten())
    if quantise:
        hidden = round_rows(hidden, RowFormat(FP8_BLOCK32, hidden.shape[-1]))
    _product(hidden, down, tiles, out.flatten(0, 1), 1)
    return out


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family; in row-invariant mode the pairs of a tile do not depend on how many there are."""
    tile = PAIR_TILE if numerics.batch_invariant else None

    def expert_ffn(
        rows: Rows, ids: Tensor, weights: Tensor, experts: Fp4Experts, limit: float, quantise: bool
    ) -> Tensor:
        return _expert_ffn(rows, ids, weights, experts, limit, quantise, tile)

    promise = Determinism.ROW_INVARIANT if numerics.batch_invariant else Determinism.RUN_TO_RUN
    return {"expert_ffn": Kernel(expert_ffn, promise)}

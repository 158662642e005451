"""Routed experts on FP8 matrix units (compute capability 8.9 and later): e2m1 codes are widened in registers.

Weights lie as `deepinfer_cuda.expert_words` packs them: a tile of 128 outputs and 64 inputs is 4 KB without a gap, and
eight codes of a word become eight e4m3 bytes by two byte permutations. Both operands are exact, scales of 32 inputs
are applied to the sums of these inputs in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_cuda.expert_words import TILE_OUTPUTS, ExpertWords
from deepinfer_cuda.handles import QuantisedRows
from deepinfer_cuda.kernels.expert_tiles import PAIR_TILE, Tiles, cut_tiles
from deepinfer_cuda.kernels.launch import EXACT
from deepinfer_cuda.kernels.quant import FP8_32, quantise_groups

__all__ = ["expert_ffn_words", "widen"]

MANY_PAIRS = 32
"""Pairs an expert from which on tiles are taller."""


@triton.jit
def widen(words):
    """Eight e2m1 codes of each word as two e4m3 tensors: codes of the first 32 inputs, and of the next."""
    first, second = tl.inline_asm_elementwise(
        asm="""
        {
        .reg .b32 m, t, u;
        and.b32 m, $2, 0x77777777;
        prmt.b32 t, 0x3C383000, 0x4C484440, m;
        and.b32 u, $2, 0x80808080;
        or.b32 $0, t, u;
        shr.u32 m, m, 16;
        prmt.b32 t, 0x3C383000, 0x4C484440, m;
        shl.b32 u, $2, 4;
        and.b32 u, u, 0x80808080;
        or.b32 $1, t, u;
        }
        """,
        constraints="=&r,=&r,r",
        args=[words],
        dtype=(tl.uint8, tl.uint8),
        is_pure=True,
        pack=4,
    )
    return first.to(tl.float8e4nv, bitcast=True), second.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _scale_of(packed, number: tl.constexpr):
    """float32 power of two of one of four exponent bytes of a word."""
    return (((packed >> (8 * number)) & 255) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _grouped_product(
    x, x_scales, words, scales, out, pairs, expert_of, first_of, end_of,
    outputs: tl.constexpr, inputs: tl.constexpr, CHOICES: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out[pair] = w[expert] x[pair // CHOICES] for the pairs of one tile; program ids: outputs, tile."""
    expert = tl.load(expert_of + tl.program_id(1)).to(tl.int64)
    if expert >= 0:
        place = tl.load(first_of + tl.program_id(1)) + tl.arange(0, TILE)
        live = place < tl.load(end_of + tl.program_id(1))
        pair = tl.load(pairs + place, mask=live, other=0).to(tl.int64)
        row = pair // CHOICES
        steps: tl.constexpr = inputs // 128
        block = (expert * (outputs // BN) + tl.program_id(0)) * steps
        weight, weight_scales = words + block * (BN * 64), scales + block * BN
        n, k = tl.arange(0, BN), tl.arange(0, 32)
        inside = n[:, None] * 32 + k[None, :]
        source, source_scales = x + row[None, :] * inputs + k[:, None], x_scales + row * steps
        sums = tl.zeros((BN, TILE), tl.float32)
        for step in tl.range(0, steps, num_stages=STAGES):
            w_scale, x_scale = tl.load(weight_scales + step * BN + n), tl.load(source_scales + step)
            for half in tl.static_range(2):
                a, b = widen(tl.load(weight + step * (BN * 64) + half * (BN * 32) + inside))
                here = source + step * 128 + half * 64
                first, second = tl.dot(a, tl.load(here)), tl.dot(b, tl.load(here + 32))
                sums += first * (_scale_of(w_scale, 2 * half)[:, None] * _scale_of(x_scale, 2 * half)[None, :])
                sums += second * (_scale_of(w_scale, 2 * half + 1)[:, None] * _scale_of(x_scale, 2 * half + 1)[None, :])
        target = out + pair[None, :] * outputs + tl.program_id(0) * BN + n[:, None]
        tl.store(target, sums.to(out.dtype.element_ty), mask=live[None, :])


@triton.jit
def _activate(gate_up, shares, ids, codes, scales, width: tl.constexpr, limit: tl.constexpr, BLOCK: tl.constexpr):
    """Gated activation of a pair times its share, quantised; program ids: pair, block of channels."""
    pair = tl.program_id(0).to(tl.int64)
    if tl.load(ids + pair) >= 0:
        group = tl.arange(0, BLOCK // 32)
        channel = tl.program_id(1) * BLOCK + group[:, None] * 32 + tl.arange(0, 32)[None, :]
        live = channel < width
        gate = tl.load(gate_up + pair * (2 * width) + channel, mask=live, other=0.0).to(tl.float32)
        up = tl.load(gate_up + pair * (2 * width) + width + channel, mask=live, other=0.0).to(tl.float32)
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        hidden = gate / (1.0 + tl.exp(-gate)) * up * tl.load(shares + pair)
        code, scale, _ = quantise_groups(hidden.to(tl.bfloat16), FP8_32)
        tl.store(codes + pair * width + channel, code.to(tl.uint8), mask=live)
        at = tl.program_id(1) * (BLOCK // 32) + group
        tl.store(scales + pair * (width // 32) + at, scale, mask=at < width // 32)


def _product(codes: Tensor, scales: Tensor, weight: ExpertWords, tiles: Tiles, out: Tensor, choices: int) -> None:
    _, outputs, inputs = weight.shape
    _grouped_product[(outputs // TILE_OUTPUTS, tiles.expert.shape[0])](
        codes.view(torch.float8_e4m3fn), scales.view(torch.int32), weight.words.view(torch.uint8), weight.scales, out,
        tiles.pairs, tiles.expert, tiles.first, tiles.end, outputs=outputs, inputs=inputs, CHOICES=choices,
        BN=TILE_OUTPUTS, TILE=tiles.size, STAGES=4, num_warps=4, **EXACT,
    )  # fmt: skip


def expert_ffn_words(
    rows: QuantisedRows,
    ids: Tensor,
    weights: Tensor,
    gate_up_words: ExpertWords,
    down_words: ExpertWords,
    limit: float,
    tile: int | None,
) -> Tensor:
    """Quantised `expert_ffn` over packed experts: [T, k, d] bfloat16; `tile` pairs share a program, None: as fits."""
    pairs, (count, width, _) = ids.numel(), gate_up_words.shape
    out = torch.zeros(*ids.shape, down_words.shape[1], dtype=torch.bfloat16, device=ids.device)
    if not pairs:
        return out
    if tile is None:
        tile = PAIR_TILE if pairs < MANY_PAIRS * count else 4 * PAIR_TILE
    tiles = cut_tiles(ids, count, tile)
    gate_up = torch.empty(pairs, width, dtype=torch.bfloat16, device=ids.device)
    _product(rows.codes, rows.scales, gate_up_words, tiles, gate_up, ids.shape[1])
    half, block = width // 2, 1024
    codes = torch.empty(pairs, half, dtype=torch.uint8, device=ids.device)
    scales = torch.empty(pairs, half // 32, dtype=torch.uint8, device=ids.device)
    _activate[(pairs, triton.cdiv(half, block))](
        gate_up, weights, ids, codes, scales, width=half, limit=limit, BLOCK=block, num_warps=4, **EXACT
    )
    _product(codes, scales, down_words, tiles, out.flatten(0, 1), 1)
    return out

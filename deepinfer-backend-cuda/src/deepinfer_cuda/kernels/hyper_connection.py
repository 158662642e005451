"""What lies between two sub-layers, in two kernels.

The first spreads the last sub-layer's output over the streams and, while they are in registers, collapses them and
takes a block of channels' share of every sum: mix logits and both mean squares. The second adds the shares up in the
order of the blocks; half of its programs norm and quantise a row, the other half turn a row's logits into mixes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer.api.ops import HyperConnectionWeights, Mixes, Rows
from deepinfer_cuda.handles import QuantisedRows
from deepinfer_cuda.kernels.codes import nearest_bf16
from deepinfer_cuda.kernels.launch import EXACT
from deepinfer_cuda.kernels.quant import FP8_32, quantise_groups

__all__ = ["hyper_connection_boundary", "kernels"]

ROW_TILE = 16
CHANNELS = 32
LANES = 32
"""Sums of a row: mix logits, then the two mean squares."""


@triton.jit
def _expand(
    streams, branch, pre, post, comb, fn, expanded, collapsed, shares, rows,
    width: tl.constexpr, STREAMS: tl.constexpr, LOGITS: tl.constexpr, HAS_BRANCH: tl.constexpr, ROUND: tl.constexpr,
    TILE: tl.constexpr, BC: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """New streams, collapsed rows and shares [blocks, rows, LANES] of the sums; program ids: channels, rows."""
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    channel, lane = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, LANES)
    live = row < rows
    here = live[:, None] & (channel < width)[None, :]
    place = row.to(tl.int64)[:, None] * (STREAMS * width) + channel[None, :]
    if HAS_BRANCH:
        output = tl.load(branch + row.to(tl.int64)[:, None] * width + channel[None, :], mask=here, other=0.0)
        output = output.to(tl.float32)
    logits = tl.zeros((TILE, LANES), tl.float32)
    squares, collapse = tl.zeros((TILE,), tl.float32), tl.zeros((TILE, BC), tl.float32)
    for j in tl.static_range(STREAMS):
        if HAS_BRANCH:
            stream = tl.load(post + row * STREAMS + j, mask=live, other=0.0)[:, None] * output
            for i in tl.static_range(STREAMS):
                share = tl.load(comb + (row * STREAMS + i) * STREAMS + j, mask=live, other=0.0)
                stream += share[:, None] * tl.load(streams + place + i * width, mask=here, other=0.0).to(tl.float32)
            if ROUND:
                stream = nearest_bf16(stream)
            tl.store(expanded + place + j * width, stream.to(expanded.dtype.element_ty), mask=here)
        else:
            stream = tl.load(streams + place + j * width, mask=here, other=0.0).to(tl.float32)
        weights = tl.load(
            fn + lane[None, :] * (STREAMS * width) + (j * width + channel)[:, None],
            mask=(channel < width)[:, None] & (lane < LOGITS)[None, :], other=0.0,
        )  # fmt: skip
        logits += tl.dot(stream, weights, input_precision="ieee")
        squares += tl.sum(stream * stream, axis=1)
        collapse += tl.load(pre + row * STREAMS + j, mask=live, other=0.0)[:, None] * stream
    if ROUND:
        collapse = nearest_bf16(collapse)
    at = row.to(tl.int64)[:, None] * width + channel[None, :]
    tl.store(collapsed + at, collapse.to(collapsed.dtype.element_ty), mask=here)
    sums = tl.where((lane == LOGITS)[None, :], squares[:, None], logits)
    sums = tl.where((lane == LOGITS + 1)[None, :], tl.sum(collapse * collapse, axis=1)[:, None], sums)
    target = shares + (tl.program_id(0).to(tl.int64) * rows + row)[:, None] * LANES + lane[None, :]
    tl.store(target, sums, mask=live[:, None])


@triton.jit
def _norm_row(
    row, collapsed, mean_square, norm, values, codes, scales, eps, width: tl.constexpr, QUANTISE: tl.constexpr,
    ROUND: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    group = tl.arange(0, GROUPS)
    channel = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    live = channel < width
    x = tl.load(collapsed + row * width + channel, mask=live, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(mean_square / width + eps) * tl.load(norm + channel, mask=live, other=0.0).to(tl.float32)
    if ROUND:
        x = nearest_bf16(x)
    tl.store(values + row * width + channel, x.to(values.dtype.element_ty), mask=live)
    if QUANTISE:
        code, scale, _ = quantise_groups(x, FP8_32)
        tl.store(codes + row * width + channel, code.to(tl.uint8), mask=live)
        tl.store(scales + row * (width // 32) + group, scale, mask=group < width // 32)


@triton.jit
def _mix_row(
    row, sums, base, scale, pre, post, comb, eps, norm_eps, width: tl.constexpr, STREAMS: tl.constexpr,
    LOGITS: tl.constexpr, ITERATIONS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, LANES)
    squares = tl.sum(tl.where(lane == LOGITS, sums, 0.0))
    logits = sums * tl.rsqrt(squares / (STREAMS * width) + norm_eps)
    part = tl.where(lane < STREAMS, 0, tl.where(lane < 2 * STREAMS, 1, 2))
    logits = logits * tl.load(scale + part) + tl.load(base + lane, mask=lane < LOGITS, other=0.0)
    share = 1.0 / (1.0 + tl.exp(-logits))
    tl.store(pre + row * STREAMS + lane, share + eps, mask=lane < STREAMS)
    second = (lane >= STREAMS) & (lane < 2 * STREAMS)
    tl.store(post + row * STREAMS + lane - STREAMS, 2.0 * share, mask=second)
    # The other logits as a matrix (source, destination): lane 2 m + i m + j goes to (i, j).
    source, destination = tl.arange(0, STREAMS)[:, None, None], tl.arange(0, STREAMS)[None, :, None]
    wanted = lane[None, None, :] == 2 * STREAMS + source * STREAMS + destination
    c = tl.sum(tl.where(wanted, logits[None, None, :], 0.0), axis=2)
    c = tl.exp(c - tl.max(c, axis=1)[:, None])
    c = c / tl.sum(c, axis=1)[:, None] + eps
    c = c / (tl.sum(c, axis=0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        c = c / (tl.sum(c, axis=1)[:, None] + eps)
        c = c / (tl.sum(c, axis=0)[None, :] + eps)
    index = tl.arange(0, STREAMS)
    tl.store(comb + (row * STREAMS + index[:, None]) * STREAMS + index[None, :], c)


@triton.jit
def _finish(
    shares, collapsed, norm, base, scale, values, codes, scales, pre, post, comb, rows, eps, norm_eps,
    width: tl.constexpr, STREAMS: tl.constexpr, LOGITS: tl.constexpr, ITERATIONS: tl.constexpr, QUANTISE: tl.constexpr,
    ROUND: tl.constexpr, COUNT: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Programs 0 .. rows - 1 norm and quantise a row, programs rows .. 2 rows - 1 compute a row's mixes."""
    row = (tl.program_id(0) % rows).to(tl.int64)
    block, lane = tl.arange(0, BLOCKS), tl.arange(0, LANES)
    source = shares + (block.to(tl.int64) * rows + row)[:, None] * LANES + lane[None, :]
    if tl.program_id(0) < rows:
        last = tl.load(shares + (block.to(tl.int64) * rows + row) * LANES + LOGITS + 1, mask=block < COUNT, other=0.0)
        _norm_row(row, collapsed, tl.sum(last), norm, values, codes, scales, norm_eps, width, QUANTISE, ROUND, GROUPS)
    else:
        sums = tl.sum(tl.load(source, mask=(block < COUNT)[:, None], other=0.0), axis=0)
        _mix_row(row, sums, base, scale, pre, post, comb, eps, norm_eps, width, STREAMS, LOGITS, ITERATIONS, LANES)


def hyper_connection_boundary(
    streams: Tensor, branch: Tensor | None, previous: Mixes, weights: HyperConnectionWeights
) -> tuple[Tensor, Rows | QuantisedRows, Mixes]:
    """See the contract `hyper_connection_boundary`; the number of streams is a power of two."""
    rows, count, width = streams.shape
    logits, dtype, device = weights.base.shape[0], streams.dtype, streams.device
    streams = streams.contiguous()
    expanded = streams if branch is None else torch.empty_like(streams)
    collapsed, values = torch.empty(2, rows, width, dtype=dtype, device=device).unbind(0)
    codes = torch.empty(rows, width, dtype=torch.uint8, device=device)
    scales = torch.empty(rows, width // 32, dtype=torch.uint8, device=device)
    pre, post = torch.empty(2, rows, count, dtype=torch.float32, device=device).unbind(0)
    comb = torch.empty(rows, count, count, dtype=torch.float32, device=device)
    if rows:
        blocks = triton.cdiv(width, CHANNELS)
        shares = torch.empty(blocks, rows, LANES, dtype=torch.float32, device=device)
        common = {"width": width, "STREAMS": count, "LOGITS": logits, "ROUND": dtype is torch.bfloat16, "LANES": LANES}
        mixes = (previous.pre.contiguous(), previous.post.contiguous(), previous.comb.contiguous())
        _expand[(blocks, triton.cdiv(rows, ROW_TILE))](
            streams, streams if branch is None else branch.contiguous(), *mixes, weights.fn.values, expanded, collapsed,
            shares, rows, HAS_BRANCH=branch is not None, TILE=ROW_TILE, BC=CHANNELS, **common, num_warps=4, **EXACT,
        )  # fmt: skip
        _finish[(2 * rows,)](
            shares, collapsed, weights.norm, weights.base, weights.scale, values, codes, scales, pre, post, comb, rows,
            weights.eps, weights.norm_eps, ITERATIONS=weights.iterations, QUANTISE=weights.quantise, COUNT=blocks,
            BLOCKS=triton.next_power_of_2(blocks), GROUPS=triton.next_power_of_2(width // 32), **common,
            num_warps=4, **EXACT,
        )  # fmt: skip
    normed = QuantisedRows(values, codes, scales) if weights.quantise else Rows(values, values)
    return expanded, normed, Mixes(pre, post, comb)


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family."""
    return {"hyper_connection_boundary": Kernel(hyper_connection_boundary, Determinism.ROW_INVARIANT)}

"""Rotary position embedding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer_cuda.kernels.codes import as_dtype
from deepinfer_cuda.kernels.launch import EXACT, warps_for

__all__ = ["kernels", "rope", "rope_angles"]


@triton.jit
def _angles(positions, frequencies, cos, sin, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    position = tl.maximum(tl.load(positions + row), 0).to(tl.float32)
    angle = position * tl.load(frequencies + pair, mask=pair < width, other=0.0)
    tl.store(cos + row * width + pair, tl.cos(angle), mask=pair < width)
    tl.store(sin + row * width + pair, tl.sin(angle), mask=pair < width)


@triton.jit
def _rope(
    x, cos, sin, out, heads, width, pairs, row_stride, head_stride, INVERSE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One head of one row; a channel meets its partner in a second load, so that nothing is interleaved."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    channel = tl.arange(0, BLOCK)
    live = channel < width
    turned = channel - (width - 2 * pairs)
    inside = live & (turned >= 0)
    source = x + row * row_stride + head * head_stride
    value = tl.load(source + channel, mask=live, other=0.0)
    odd = (turned & 1) == 1
    partner = tl.load(source + tl.where(odd, channel - 1, channel + 1), mask=inside, other=0.0).to(tl.float32)
    angle = row * pairs + turned // 2
    c = tl.load(cos + angle, mask=inside, other=1.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    if INVERSE:
        s = -s
    wide = value.to(tl.float32) * c
    rotated = tl.where(odd, partner * s + wide, wide - partner * s)
    result = tl.where(inside, as_dtype(rotated, out.dtype.element_ty), value)
    tl.store(out + tl.program_id(0).to(tl.int64) * width + channel, result, mask=live)


def rope_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """See the contract `rope_angles`."""
    rows, width = positions.shape[0], frequencies.shape[0]
    cos, sin = torch.empty(2, rows, width, dtype=torch.float32, device=positions.device).unbind(0)
    if rows:
        _angles[(rows,)](positions, frequencies, cos, sin, width, BLOCK=triton.next_power_of_2(width), num_warps=1)
    return cos, sin


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """See the contract `rope`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, width, heads = x.shape[0], x.shape[-1], x[0].numel() // x.shape[-1] if x.shape[0] else 0
    if not rows * heads:
        return out
    if x.stride(-1) != 1 or x.dim() > 3:
        x = x.contiguous()
    head_stride = x.stride(1) if x.dim() == 3 else width
    _rope[(rows * heads,)](
        x, cos.contiguous(), sin.contiguous(), out, heads, width, cos.shape[1], x.stride(0), head_stride,
        INVERSE=inverse, BLOCK=triton.next_power_of_2(width), num_warps=warps_for(width), **EXACT,
    )  # fmt: skip
    return out


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family."""
    return {
        "rope": Kernel(rope, Determinism.ROW_INVARIANT),
        "rope_angles": Kernel(rope_angles, Determinism.ROW_INVARIANT),
    }

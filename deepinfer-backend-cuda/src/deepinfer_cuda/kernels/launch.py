"""What every launch has in common."""

from __future__ import annotations

from torch import Tensor
from triton import next_power_of_2

__all__ = ["EXACT", "rows_of", "warps_for"]

EXACT = {"enable_fp_fusion": False}
"""Launch options of every kernel: a product is rounded before it is added, as the contracts have it."""

ELEMENTS_PER_WARP = 512


def rows_of(x: Tensor) -> Tensor:
    """x [..., C] as rows [R, C] with contiguous channels, without a copy where its strides allow."""
    x = x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def warps_for(width: int) -> int:
    """Warps of a program that holds a row of this width."""
    return min(max(next_power_of_2(width) // ELEMENTS_PER_WARP, 1), 8)

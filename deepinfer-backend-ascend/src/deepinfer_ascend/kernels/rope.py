"""`rope` through `npu_rotary_mul`, mode `interleave`.

Documented: out = cos * x + sin * (-x[1], x[0], -x[3], x[2], ...), which rotates adjacent pairs as the contract does.
Rows lie on the S axis of layout BSND, where cos and sin are [1, S, 1, D]; they are float32 and rounded once.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

__all__ = ["rope"]


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """See the contract `rope`."""
    if x.numel() == 0:
        return x.clone()
    rotated = 2 * cos.shape[-1]
    kept, tail = x[..., :-rotated], x[..., -rotated:]
    rows = tail.reshape(1, x.shape[0], -1, rotated).to(torch.float32)
    cosines, sines = (part.to(torch.float32).repeat_interleave(2, -1)[None, :, None] for part in (cos, sin))
    turned = torch_npu.npu_rotary_mul(rows, cosines, -sines if inverse else sines, rotary_mode="interleave")
    return torch.cat((kept, turned.reshape(tail.shape).to(x.dtype)), dim=-1)

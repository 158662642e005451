"""Root-mean-square norm: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer_cuda.kernels.codes import as_dtype
from deepinfer_cuda.kernels.launch import EXACT, rows_of, warps_for

__all__ = ["kernels", "rms_norm"]


@triton.jit
def _rms_norm(x, weight, out, width, x_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    live = channel < width
    values = tl.load(x + row * x_stride + channel, mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / width + eps)
    weights = tl.load(weight + channel, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * width + channel, as_dtype(values * scale * weights, out.dtype.element_ty), mask=live)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the contract `rms_norm`."""
    rows = rows_of(x)
    count, width = rows.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if count:
        block = triton.next_power_of_2(width)
        _rms_norm[(count,)](
            rows, weight, out, width, rows.stride(0), eps, BLOCK=block, num_warps=warps_for(width), **EXACT
        )
    return out


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family."""
    return {"rms_norm": Kernel(rms_norm, Determinism.ROW_INVARIANT)}

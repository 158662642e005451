"""Rows of the embedding table."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer_cuda.kernels.launch import warps_for

__all__ = ["embedding", "kernels"]


@triton.jit
def _embedding(ids, table, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    token = tl.load(ids + row)
    values = tl.load(table + token * width + channel, mask=(channel < width) & (token >= 0), other=0.0)
    tl.store(out + row * width + channel, values, mask=channel < width)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """See the contract `embedding`."""
    count, width = ids.shape[0], table.shape[1]
    out = torch.empty(count, width, dtype=table.dtype, device=table.device)
    if count:
        block = triton.next_power_of_2(width)
        _embedding[(count,)](ids, table, out, width, BLOCK=block, num_warps=warps_for(width))
    return out


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family."""
    return {"embedding": Kernel(embedding, Determinism.EXACT)}

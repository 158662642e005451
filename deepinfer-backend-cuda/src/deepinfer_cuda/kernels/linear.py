"""Dense products with stored weights: FP8 with a scale for every 32 inputs, or plain values.

One program computes a tile of rows and outputs over all inputs, chunk by chunk in ascending order, so a row's sum
depends on the chunk length alone as long as the tile has a fixed number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer.api.ops import DenseWeight, Rows, accumulate_dtype
from deepinfer_cuda.handles import Fp8Weight
from deepinfer_cuda.kernels.codes import INTERPRETED, as_dtype, exponent_values

__all__ = ["ROW_TILE", "Products", "kernels"]

ROW_TILE = 16
OUTPUT_TILE = 64
INPUT_CHUNK = 64


@triton.jit
def _product(
    x, codes, scales, out, rows, x_stride, x_group, out_stride,
    outputs: tl.constexpr, inputs: tl.constexpr, FP8: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[t, g outputs + n] = sum over k of x[t, g, k] * w[g outputs + n, k]; program ids: outputs, rows, group."""
    group = tl.program_id(2)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.program_id(1) * TILE + tl.arange(0, TILE)
    chunk = tl.arange(0, BK)
    weight_row = (group * outputs + n).to(tl.int64)
    groups = tl.cdiv(inputs, 32)
    sums, lost = tl.zeros((TILE, BN), tl.float32), tl.zeros((TILE, BN), tl.float32)
    for start in range(0, inputs, BK):
        k = start + chunk
        live = k < inputs
        a = tl.load(
            x + t.to(tl.int64)[:, None] * x_stride + group * x_group + k[None, :],
            mask=(t < rows)[:, None] & live[None, :],
            other=0.0,
        )
        here = (n < outputs)[:, None] & live[None, :]
        w = tl.load(codes + weight_row[:, None] * inputs + k[None, :], mask=here, other=0.0)
        if FP8:
            scale = tl.load(scales + weight_row[:, None] * groups + (k // 32)[None, :], mask=here, other=0)
            w = w.to(tl.float32) * exponent_values(scale)
        if WIDE:
            # Compensated: what an addition rounds off goes into the next one.
            chunk_sum = tl.dot(a.to(tl.float32), tl.trans(w.to(tl.float32)), input_precision="ieee") - lost
            total = sums + chunk_sum
            lost = (total - sums) - chunk_sum
            sums = total
        else:
            sums += tl.dot(a, tl.trans(w.to(tl.bfloat16)))
    place = t.to(tl.int64)[:, None] * out_stride + (group * outputs + n)[None, :]
    tl.store(out + place, as_dtype(sums, out.dtype.element_ty), mask=(t < rows)[:, None] & (n < outputs)[None, :])


class Products:
    """The dense operations; `row_tile` rows share a program, whatever their number.

    Args:
        row_tile: a multiple of 16.
    """

    def __init__(self, row_tile: int = ROW_TILE) -> None:
        self.row_tile = row_tile

    def linear(self, rows: Rows, weight: DenseWeight | Fp8Weight) -> Tensor:
        """See the contract `linear`."""
        x = rows.quantised if weight.quantised else rows.values
        return self._run(x[:, None], weight, x.dtype)

    def linear_accumulate(self, rows: Rows, weight: DenseWeight | Fp8Weight) -> Tensor:
        """See the contract `linear_accumulate`."""
        x = rows.quantised if weight.quantised else rows.values
        return self._run(x[:, None], weight, accumulate_dtype(x.dtype))

    def grouped_linear(self, x: Tensor, weight: DenseWeight | Fp8Weight) -> Tensor:
        """See the contract `grouped_linear`."""
        return self._run(x, weight, x.dtype)

    def _run(self, x: Tensor, weight: DenseWeight | Fp8Weight, dtype: torch.dtype) -> Tensor:
        """x [T, G, K], last dimension contiguous -> [T, G N]."""
        x = x if x.stride(2) == 1 else x.contiguous()
        stored, scales = (
            (weight.codes, weight.scales) if isinstance(weight, Fp8Weight) else (weight.values, weight.values)
        )
        total, inputs = stored.shape
        rows, groups = x.shape[0], x.shape[1]
        out = torch.empty(rows, total, dtype=dtype, device=x.device)
        if not rows:
            return out
        outputs = total // groups
        grid = (triton.cdiv(outputs, OUTPUT_TILE), triton.cdiv(rows, self.row_tile), groups)
        wide = INTERPRETED or x.dtype is torch.float32 or stored.dtype is torch.float32
        _product[grid](
            x, stored, scales, out, rows, x.stride(0), x.stride(1), out.stride(0),
            outputs=outputs, inputs=inputs, FP8=isinstance(weight, Fp8Weight), WIDE=wide, TILE=self.row_tile, BN=OUTPUT_TILE, BK=INPUT_CHUNK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return out


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family."""
    products = Products()
    found = (products.linear, products.linear_accumulate, products.grouped_linear)
    return {function.__name__: Kernel(function, Determinism.ROW_INVARIANT) for function in found}

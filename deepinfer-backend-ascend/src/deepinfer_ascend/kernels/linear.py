"""Dense products: `npu_quant_matmul` in its MX form where both operands are FP8 codes, aten products elsewhere.

MX form (group_sizes [1, 1, 32], e8m0 scales): sums of code products, scaled per 32 terms of the sum, as the contract
has it. Its scales are [M, K / 64, 2] for rows and [K / 64, N, 2] for the weight. Activations are quantised here by the
rule of the contract, not by `npu_dynamic_mx_quant`, whose documented scale is floor(log2 amax) - 8.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from deepinfer.api.ops import CONTRACTS, DenseWeight, Rows
from deepinfer_ascend.handles import MxRows, MxWeight, mx_width

__all__ = ["grouped_linear", "linear", "linear_accumulate", "mx_rows", "quantise_rows"]

_quantise = CONTRACTS["fp8_block32_quantise"].reference


def mx_rows(x: Tensor) -> MxRows:
    """Quantise [T, C], C a multiple of 64, to FP8 codes and paired scales."""
    if _quantise is None:
        raise RuntimeError("the contract `fp8_block32_quantise` is expected to have a reference")
    codes, scales = _quantise(x)
    return MxRows(x, codes, scales.unflatten(-1, (-1, 2)))


def quantise_rows(x: Tensor, enabled: bool) -> MxRows | Rows:
    """See the contract `quantise_rows`; codes are kept where products read them."""
    if not enabled:
        return Rows(x, x)
    if x.dtype is torch.bfloat16 and x.dim() == 2 and mx_width(x.shape[1]):
        return mx_rows(x)
    if _quantise is None:
        raise RuntimeError("the contract `fp8_block32_quantise` is expected to have a reference")
    codes, scales = _quantise(x)
    factors = torch.exp2(scales.to(torch.float32) - 127)[..., None]
    values = (codes.to(torch.float32).unflatten(-1, (-1, 32)) * factors).flatten(-2)
    return Rows(x, values.to(x.dtype))


def linear(rows: Rows | MxRows, weight: DenseWeight | MxWeight) -> Tensor:
    """See the contract `linear`."""
    return _product(rows, weight, rows.values.dtype)


def linear_accumulate(rows: Rows | MxRows, weight: DenseWeight | MxWeight) -> Tensor:
    """See the contract `linear_accumulate`."""
    return _product(rows, weight, torch.float32)


def _product(rows: Rows | MxRows, weight: DenseWeight | MxWeight, dtype: torch.dtype) -> Tensor:
    if isinstance(rows, MxRows) and isinstance(weight, MxWeight) and rows.values.shape[0]:
        result: Tensor = torch_npu.npu_quant_matmul(
            rows.codes,
            weight.codes,
            weight.scales,
            pertoken_scale=rows.scales,
            scale_dtype=torch_npu.float8_e8m0fnu,
            pertoken_scale_dtype=torch_npu.float8_e8m0fnu,
            group_sizes=[1, 1, 32],
            output_dtype=dtype,
        )
        return result
    x = rows.quantised if weight.quantised else rows.values
    values = weight.values
    if dtype is torch.float32 or values.dtype is torch.float32:
        x, values = x.to(torch.float32), values.to(torch.float32)
    return (x @ values.T).to(dtype)


def grouped_linear(x: Tensor, weight: DenseWeight | MxWeight) -> Tensor:
    """See the contract `grouped_linear`: inputs are not quantised, so the weight is read as exact values."""
    blocks = weight.values.to(x.dtype).unflatten(0, (x.shape[1], -1))
    return torch.bmm(x.transpose(0, 1), blocks.transpose(1, 2)).transpose(0, 1).flatten(1)

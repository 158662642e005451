"""`expert_ffn` through `npu_grouped_matmul`: one product for all experts, and no count ever reaches the host.

Documented: rows sorted by group, `group_type` 0 (rows are grouped), `group_list_type` 1 (counts, on the device),
`split_item` 2 (one result). Rows behind the last group are undefined; here they belong to nobody and are dropped.
The MX form takes FP8 codes with scales [M, K / 64, 2] and [E, K / 64, N, 2].
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from deepinfer.api.ops import CONTRACTS, Rows, gated_activation
from deepinfer_ascend.handles import MxExperts, MxRows, ValueExperts
from deepinfer_ascend.kernels.linear import mx_rows, quantise_rows

__all__ = ["expert_ffn"]

_dispatch = CONTRACTS["moe_dispatch"].reference


def expert_ffn(
    rows: Rows | MxRows, ids: Tensor, weights: Tensor, experts: MxExperts | ValueExperts, limit: float, quantise: bool
) -> Tensor:
    """See the contract `expert_ffn`."""
    if _dispatch is None:
        raise RuntimeError("the contract `moe_dispatch` is expected to have a reference")
    count, width = ids.numel(), rows.values.shape[1]
    if count == 0:
        return rows.values.new_zeros(*ids.shape, width)
    pairs, counts = _dispatch(ids, experts.down.shape[0])
    chosen = pairs.clamp(min=0)
    source = chosen // ids.shape[1]
    shares = weights.flatten()[chosen]
    if isinstance(experts, MxExperts) and isinstance(rows, MxRows) and quantise:
        results = _mx_ffn(rows, source, counts, shares, experts, limit)
    else:
        plain = experts.values() if isinstance(experts, MxExperts) else experts
        results = _value_ffn(rows, source, counts, shares, plain, limit, quantise)
    # Pairs without an expert write a row of their own behind the others.
    target = torch.where(pairs >= 0, pairs, count)
    out = results.new_zeros(count + 1, width).index_copy(0, target, results)
    return torch.where((ids.flatten() >= 0)[:, None], out[:count], 0).view(*ids.shape, width)


def _mx_ffn(rows: MxRows, source: Tensor, counts: Tensor, shares: Tensor, experts: MxExperts, limit: float) -> Tensor:
    gate_up = _mx_product(rows.codes, rows.scales, source, experts.gate_up, experts.gate_up_scales, counts)
    inner = mx_rows(gated_activation(gate_up, limit, shares))
    return _mx_product(inner.codes, inner.scales, None, experts.down, experts.down_scales, counts)


def _mx_product(
    codes: Tensor, scales: Tensor, source: Tensor | None, weight: Tensor, weight_scales: Tensor, counts: Tensor
) -> Tensor:
    if source is not None:
        codes = codes.view(torch.uint8)[source].view(torch.float8_e4m3fn)
        scales = scales[source]
    (result,) = torch_npu.npu_grouped_matmul(
        [codes],
        [weight],
        scale=[weight_scales],
        per_token_scale=[scales],
        group_list=counts,
        group_type=0,
        group_list_type=1,
        split_item=2,
        output_dtype=torch.bfloat16,
        scale_dtype=torch_npu.float8_e8m0fnu,
        per_token_scale_dtype=torch_npu.float8_e8m0fnu,
    )
    product: Tensor = result
    return product


def _value_ffn(
    rows: Rows | MxRows,
    source: Tensor,
    counts: Tensor,
    shares: Tensor,
    experts: ValueExperts,
    limit: float,
    quantise: bool,
) -> Tensor:
    gate_up = _value_product(rows.quantised[source], experts.gate_up, counts)
    hidden = gated_activation(gate_up, limit, shares)
    return _value_product(quantise_rows(hidden, quantise).quantised, experts.down, counts)


def _value_product(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    (result,) = torch_npu.npu_grouped_matmul(
        [x], [weight], group_list=counts, group_type=0, group_list_type=1, split_item=2, output_dtype=x.dtype
    )
    product: Tensor = result
    return product

"""Native kernels of the CPU backend: matrix products whose rows do not depend on their neighbours.

A product of zero-padded rows is row-invariant for any row count that is a multiple of 16 as long as the library does
not split the sum; it splits fp32 sums longer than 512 terms when threads are idle. So fp32 products are evaluated in
canonical chunks of 512 terms, each from zero, folded left to right; bfloat16 products are never split. The backend's
self-check (`deepinfer doctor`) tests this on the machine at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepinfer.api.backend import Kernel, Numerics
from deepinfer.api.ops import (
    CONTRACTS,
    FP8_BLOCK32,
    DenseWeight,
    Determinism,
    ExpertWeights,
    RowFormat,
    Rows,
    accumulate_dtype,
    gated_activation,
    round_rows,
)

__all__ = ["ROW_TILE", "SUM_CHUNK", "cpu_kernels", "tile_product"]

ROW_TILE = 16
SUM_CHUNK = 512


def tile_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in the dtype of the operands with a summation order that depends on K alone.

    Args:
        x: [T, K], weight: [N, K], same dtype.

    Returns:
        [T, N].
    """
    rows = x.shape[0]
    if rows % ROW_TILE:
        x = pad(x, (0, 0, 0, -rows % ROW_TILE))
    if x.dtype is torch.bfloat16 or x.shape[1] <= SUM_CHUNK:
        return (x @ weight.T)[:rows]
    total = x[:, :SUM_CHUNK] @ weight[:, :SUM_CHUNK].T
    for start in range(SUM_CHUNK, x.shape[1], SUM_CHUNK):
        total += x[:, start : start + SUM_CHUNK] @ weight[:, start : start + SUM_CHUNK].T
    return total[:rows]


def linear(rows: Rows, weight: DenseWeight) -> Tensor:
    """See the contract `linear`."""
    x = rows.quantised if weight.quantised else rows.values
    return tile_product(x.to(weight.values.dtype), weight.values).to(x.dtype)


def linear_accumulate(rows: Rows, weight: DenseWeight) -> Tensor:
    """See the contract `linear_accumulate`."""
    x = rows.quantised if weight.quantised else rows.values
    accumulate = accumulate_dtype(x.dtype)
    return tile_product(x.to(accumulate), weight.values.to(accumulate))


def grouped_linear(x: Tensor, weight: DenseWeight) -> Tensor:
    """See the contract `grouped_linear`."""
    blocks = weight.values.unflatten(0, (x.shape[1], -1)).unbind(0)
    return torch.cat([tile_product(x[:, group], block) for group, block in enumerate(blocks)], dim=1)


def expert_ffn(
    rows: Rows, ids: Tensor, weights: Tensor, experts: ExpertWeights, limit: float, quantise: bool
) -> Tensor:
    """See the contract `expert_ffn`: pairs sorted by expert, one padded tile run per expert that was chosen."""
    x = rows.quantised
    flat, shares, choices = ids.flatten(), weights.flatten(), ids.shape[1]
    counts = torch.bincount(flat + 1, minlength=experts.down.shape[0] + 1)[1:].tolist()
    order = flat.argsort(stable=True)[flat.shape[0] - sum(counts) :]
    gathered, gathered_shares = x[order // choices], shares[order]
    out = x.new_zeros(flat.shape[0], x.shape[1])
    results, start = [], 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        span = slice(start, start + count)
        start += count
        hidden = gated_activation(tile_product(gathered[span], experts.gate_up[expert]), limit, gathered_shares[span])
        if quantise:
            hidden = round_rows(hidden, RowFormat(FP8_BLOCK32, hidden.shape[-1]))
        results.append(tile_product(hidden, experts.down[expert]))
    if results:
        out[order] = torch.cat(results)
    return out.view(*ids.shape, x.shape[1])


def cpu_kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Kernels of the CPU backend by op name; every other op runs its reference."""
    native = {function.__name__: function for function in (linear, linear_accumulate, grouped_linear, expert_ffn)}
    kernels = {name: Kernel(function, Determinism.ROW_INVARIANT) for name, function in native.items()}
    note = "reference; batched products keep one shape per row"
    attend = CONTRACTS["attend"].reference
    if attend is None:
        raise RuntimeError("the contract `attend` is expected to have a reference")
    kernels["attend"] = Kernel(attend, Determinism.ROW_INVARIANT, note=note)
    return kernels

"""The CPU backend with plain matrix products instead of row-invariant ones: a yardstick, never a backend to serve."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deepinfer.api.backend import Kernel, Numerics
from deepinfer.api.ops import (
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
from deepinfer.cpu.backend import CpuBackend


def linear(rows: Rows, weight: DenseWeight) -> Tensor:
    x = rows.quantised if weight.quantised else rows.values
    return (x.to(weight.values.dtype) @ weight.values.T).to(x.dtype)


def linear_accumulate(rows: Rows, weight: DenseWeight) -> Tensor:
    x = rows.quantised if weight.quantised else rows.values
    accumulate = accumulate_dtype(x.dtype)
    return x.to(accumulate) @ weight.values.to(accumulate).T


def grouped_linear(x: Tensor, weight: DenseWeight) -> Tensor:
    blocks = weight.values.unflatten(0, (x.shape[1], -1))
    return torch.bmm(x.transpose(0, 1), blocks.transpose(1, 2)).transpose(0, 1).flatten(1)


def expert_ffn(
    rows: Rows, ids: Tensor, weights: Tensor, experts: ExpertWeights, limit: float, quantise: bool
) -> Tensor:
    x = rows.quantised
    out = x.new_zeros(*ids.shape, x.shape[1])
    for expert in ids[ids >= 0].unique().tolist():
        row, choice = (ids == expert).nonzero(as_tuple=True)
        hidden = gated_activation(x[row] @ experts.gate_up[expert].T, limit, weights[row, choice])
        if quantise:
            hidden = round_rows(hidden, RowFormat(FP8_BLOCK32, hidden.shape[-1]))
        out[row, choice] = hidden @ experts.down[expert].T
    return out


class PlainProducts(CpuBackend):
    """Everything but the products runs its reference."""

    name = "plain"

    def kernels(self, numerics: Numerics) -> Mapping[str, Kernel]:
        functions = (linear, linear_accumulate, grouped_linear, expert_ffn)
        return {function.__name__: Kernel(function, Determinism.RUN_TO_RUN) for function in functions}

"""Values that large operations exchange; core passes them on and never looks inside.

A backend may use its own types in these places. The classes here are the plain-tensor handles of the references.
A handle is valid within one step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DenseWeight", "EngramTable", "ExpertWeights", "Mixes", "Rows", "Selection", "accumulate_dtype"]


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums, statistics and softmaxes for activations of this dtype."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class Rows:
    """Activations of one step.

    Attributes:
        values: [T, C] in the compute dtype; read by unquantised consumers.
        quantised: [T, C] the same after the FP8 quantiser of spec/model 4.1, as exact values; read by linears whose
            weights are quantised. The same tensor as `values` where activation quantisation is off.
    """

    values: Tensor
    quantised: Tensor


@dataclass(frozen=True, slots=True)
class Mixes:
    """Hyper-connection mixes that one sub-layer computed (spec/model 3.1), all in the accumulate dtype.

    Attributes:
        pre: [T, m] collapse weights, used by the *next* sub-layer.
        post: [T, m] and comb: [T, m, m] (source, destination) expand this sub-layer's output.
    """

    pre: Tensor
    post: Tensor
    comb: Tensor


@dataclass(frozen=True, slots=True)
class Selection:
    """Compressed entries that each row attends to.

    Attributes:
        entries: [T, k] int64 logical entry numbers, ascending, padded with -1 at the end.
        physical: [T, k] int64 page * entries_per_page + offset, -1 where `entries` is.
    """

    entries: Tensor
    physical: Tensor

    def logical(self) -> Tensor:
        """Logical entry numbers, for tests."""
        return self.entries


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A linear's weight as exact values.

    Attributes:
        values: [N, K] in the compute dtype (float32 for float32 weights).
        quantised: whether the stored weight is quantised, so that it reads `Rows.quantised`.
        scales: stored scale bytes per fused part, kept so that the stored bytes can be given back; None if plain.
    """

    values: Tensor
    quantised: bool = False
    scales: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Routed experts, one contiguous block per expert.

    Attributes:
        gate_up: [E, 2 I, d] rows of w1 (gate), then of w3 (up).
        down: [E, d, I] w2.
        gate_up_scales / down_scales: stored scale bytes, or None.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class EngramTable:
    """An n-gram table where it lies: `codes` [rows, De] float8_e4m3fn and `scales` [rows, De / 32] uint8 exponents."""

    codes: Tensor
    scales: Tensor

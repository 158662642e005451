"""Weights as the kernels read them: stored codes and scale bytes; exact values only on demand, for references."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.api.formats import dequantise_fp4, dequantise_rows
from deepinfer_cuda.expert_words import ExpertWords

__all__ = ["GROUP", "ExpertMatrices", "Fp4Experts", "Fp8Weight", "QuantisedRows"]

GROUP = 32
"""Inputs that share a scale byte."""


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Activations of one step with their FP8 form as kernels read it; stands for `deepinfer.api.ops.Rows`.

    Attributes:
        values: [T, C] in the compute dtype.
        codes: uint8 [T, C], e4m3.
        scales: uint8 [T, C / 32], exponent bytes.
    """

    values: Tensor
    codes: Tensor
    scales: Tensor

    @property
    def quantised(self) -> Tensor:
        """Exact values [T, C] of the FP8 form, made anew by every call."""
        return dequantise_rows(self.codes.view(torch.float8_e4m3fn), self.scales).to(self.values.dtype)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A quantised linear.

    Attributes:
        codes: float8_e4m3fn [N, K], fused parts behind each other.
        scales: uint8 [N, ceil(K / 32)], exponent bytes; the byte of a 32 x 32 block is repeated in each of its rows.
        part_rows: rows of each fused part.
        dtype: compute dtype of `values`.
    """

    codes: Tensor
    scales: Tensor
    part_rows: tuple[int, ...]
    dtype: torch.dtype

    @property
    def quantised(self) -> bool:
        """It reads `Rows.quantised`."""
        return True

    @property
    def values(self) -> Tensor:
        """Exact values [N, K], made anew by every call."""
        return dequantise_rows(self.codes, self.scales).to(self.dtype)


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One projection of all experts.

    Attributes:
        codes: uint8 [E, N, K / 2], two e2m1 codes a byte, the low nibble first.
        scales: uint8 [E, N, K / 32], exponent bytes.
        dtype: compute dtype of exact values.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    def stored(self, expert: int) -> tuple[Tensor, Tensor]:
        """Checkpoint bytes [N, K / 2] and [N, K / 32] of one expert."""
        return self.codes[expert], self.scales[expert]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        experts, rows, half = self.codes.shape
        return experts, rows, 2 * half

    def __getitem__(self, expert: int) -> Tensor:
        """Exact values [N, K] of one expert, made anew by every call."""
        return dequantise_fp4(*self.stored(expert)).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Fp4Experts:
    """Routed experts.

    Attributes:
        gate_up: [E, 2 I, d], rows of w1 (gate), then of w3 (up).
        down: [E, d, I].
    """

    gate_up: ExpertMatrices | ExpertWords
    down: ExpertMatrices | ExpertWords

"""Values in the forms that torch_npu's matrix products read, each with its plain values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["GROUP", "PAIR", "MxExperts", "MxRows", "MxWeight", "ValueExperts", "exponents", "mx_width"]

GROUP = 32
"""Elements that share a scale."""

PAIR = 2 * GROUP
"""Scales lie in pairs, so a sum has a multiple of 64 terms."""


def mx_width(columns: int) -> bool:
    """Whether a sum of so many terms has whole pairs of scales."""
    return columns % PAIR == 0


def exponents(scales: Tensor) -> Tensor:
    """float32 values of e8m0 bytes."""
    return torch.exp2(scales.to(torch.float32) - 127)


@dataclass(frozen=True, slots=True)
class MxRows:
    """Activations, plain and as FP8 codes with a power-of-two scale per 32 channels.

    Attributes:
        values: [T, C] bfloat16.
        codes: [T, C] float8_e4m3fn.
        scales: [T, C / 64, 2] uint8 (e8m0).
    """

    values: Tensor
    codes: Tensor
    scales: Tensor

    @property
    def quantised(self) -> Tensor:
        """[T, C] exact values of the codes, for consumers that read plain tensors."""
        groups = self.codes.to(torch.float32).unflatten(-1, (-1, GROUP))
        return (groups * exponents(self.scales).flatten(-2)[..., None]).flatten(-2).to(self.values.dtype)


@dataclass(frozen=True, slots=True)
class MxWeight:
    """A quantised linear's weight as `npu_quant_matmul` reads it.

    Attributes:
        codes: [K, N] float8_e4m3fn, the transposed view of the checkpoint's [N, K].
        scales: [K / 64, N, 2] uint8 (e8m0): a scale per output and 32 inputs.
        part_rows: outputs of each fused part.
    """

    codes: Tensor
    scales: Tensor
    part_rows: tuple[int, ...]

    quantised = True

    @property
    def values(self) -> Tensor:
        """[N, K] bfloat16, exact, for products whose other operand is not quantised."""
        groups = self.codes.T.to(torch.float32).unflatten(-1, (-1, GROUP))
        return (groups * exponents(self.scales.transpose(0, 1).flatten(1))[..., None]).flatten(1).to(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class ValueExperts:
    """Experts as exact values: gate_up [E, d, 2 I] and down [E, I, d], and their stored scales [E, N, K / 32]."""

    gate_up: Tensor
    down: Tensor
    gate_up_scales: Tensor
    down_scales: Tensor


@dataclass(frozen=True, slots=True)
class MxExperts:
    """Experts as `npu_grouped_matmul` reads them; every e2m1 value is an e4m3 value, so FP8 codes are exact.

    Attributes:
        gate_up: [E, d, 2 I] and down [E, I, d]: float8_e4m3fn, transposed views of [E, N, K].
        gate_up_scales: [E, d / 64, 2 I, 2] and down_scales [E, I / 64, d, 2]: uint8 (e8m0).
    """

    gate_up: Tensor
    down: Tensor
    gate_up_scales: Tensor
    down_scales: Tensor

    def values(self) -> ValueExperts:
        """The experts as exact bfloat16 values, for activations that are not quantised."""
        gate_up, down = (
            (matrix.to(torch.float32) * exponents(_rows_of(scales)).repeat_interleave(GROUP, -1).transpose(1, 2)).to(
                torch.bfloat16
            )
            for matrix, scales in ((self.gate_up, self.gate_up_scales), (self.down, self.down_scales))
        )
        return ValueExperts(gate_up, down, _rows_of(self.gate_up_scales), _rows_of(self.down_scales))


def _rows_of(scales: Tensor) -> Tensor:
    """Paired scales [E, K / 64, N, 2] as they are stored, [E, N, K / 32]."""
    return scales.transpose(-3, -2).flatten(-2)

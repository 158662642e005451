"""Elementary functions built from operations whose bits do not depend on where an element lies in its tensor.

Vectorised `sigmoid`, `silu` and `softplus` kernels may treat the tail of a tensor with another code path than its body,
so a row's bits would depend on how many rows there are. `exp`, `log1p`, `sqrt` and the arithmetic operators do not
(`deepinfer doctor` checks it on the machine at hand).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sigmoid", "silu", "softplus"]

SOFTPLUS_LINEAR_FROM = 20.0


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in the dtype of x."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) in the dtype of x."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """ln(1 + exp(x)); x itself above 20 (spec/model 3.10)."""
    return torch.where(x > SOFTPLUS_LINEAR_FROM, x, torch.log1p(torch.exp(x.clamp(max=SOFTPLUS_LINEAR_FROM))))

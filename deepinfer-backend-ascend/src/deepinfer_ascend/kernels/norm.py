"""`rms_norm` through `npu_rms_norm`.

Documented: y = x * rsqrt(mean(x^2) + eps) * gamma, x and gamma of one dtype. The contract multiplies by a float32
weight and rounds once at the end, so rows are widened to the weight's dtype and rounded after the operator.
"""

from __future__ import annotations

import torch_npu
from torch import Tensor

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the contract `rms_norm`."""
    if x.numel() == 0:
        return x.clone()
    normed, _ = torch_npu.npu_rms_norm(x.to(weight.dtype), weight, epsilon=eps)
    result: Tensor = normed.to(x.dtype)
    return result

"""Numerics settings that every backend honours or refuses: compute dtype and the release's quantisers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Numerics"]


@dataclass(frozen=True)
class Numerics:
    """What is rounded where; the default is the numerics of the release.

    Attributes:
        compute_dtype: dtype of activations between operations (bfloat16 in the release). float64 exists for
            verification only and cannot be chosen by a setting.
        activation_quant: round the inputs of quantised linears to FP8 in groups of 32 (spec/model 4.1, 4.3).
        cache_quant: keep window, compressed and index rows in their packed formats (spec/model 4.5); otherwise
            rows hold plain values of `compute_dtype`.
        batch_invariant: bind only kernels whose rows do not depend on their neighbours.
    """

    compute_dtype: torch.dtype = torch.bfloat16
    activation_quant: bool = True
    cache_quant: bool = True
    batch_invariant: bool = False

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """Dtype of statistics, softmaxes, gates and logits: float32, or float64 when computing in float64."""
        return torch.float64 if self.compute_dtype is torch.float64 else torch.float32

    def describe(self) -> dict[str, object]:
        """Plain values for reports and for the numerics id."""
        return {
            "compute_dtype": str(self.compute_dtype).removeprefix("torch."),
            "activation_quant": self.activation_quant,
            "cache_quant": self.cache_quant,
            "batch_invariant": self.batch_invariant,
        }

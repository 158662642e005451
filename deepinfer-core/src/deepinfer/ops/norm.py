"""Normalisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.ops.contract import Sample, SampleSize, op
from deepinfer.ops.handles import accumulate_dtype
from deepinfer.ops.sample_inputs import normal, row_counts

__all__ = ["rms_norm"]


def _rms_norm_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    width = {"tiny": 64, "odd": 67, "real": 5120}[size]
    weight = 1 + 0.1 * normal(generator, width)
    for label, rows in row_counts(size):
        yield Sample(label, {"x": normal(generator, rows, width), "weight": weight, "eps": 1e-20}, ("x",))
    yield Sample("all-zero rows", {"x": torch.zeros(3, width), "weight": weight, "eps": 1e-20}, ("x",))
    yield Sample("tiny values", {"x": 1e-12 * normal(generator, 5, width), "weight": weight, "eps": 1e-20}, ("x",))
    yield Sample("huge values", {"x": 1e15 * normal(generator, 5, width), "weight": weight, "eps": 1e-20}, ("x",))


@op(samples=_rms_norm_samples, activations=("x",))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension with one rounding at the very end (spec/model 0).

    The reference keeps rows independent for C up to 32,768: PyTorch splits longer sums of few rows among CPU threads.

    Args:
        x: [..., C] in the compute dtype.
        weight: [C] multiplier (not 1 + weight).
        eps: added to the mean square; 1e-20 in V4.1.

    Returns:
        [..., C] in the dtype of x.
    """
    accumulate = accumulate_dtype(x.dtype)
    wide = x.to(accumulate)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(accumulate)).to(x.dtype)

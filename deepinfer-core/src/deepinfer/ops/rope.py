"""Rotary position embedding: partial, interleaved, plain and YaRN frequencies (spec/model 3.3)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, Tolerance, op
from deepinfer.ops.handles import accumulate_dtype
from deepinfer.ops.sample_inputs import normal, row_counts

__all__ = ["plain_frequencies", "rope", "rope_angles", "yarn_frequencies"]


def plain_frequencies(width: int, theta: float) -> Tensor:
    """Inverse frequencies [width / 2] float32 of window-only layers and draft stages: theta ** -(2i / width)."""
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / torch.tensor(float(width))
    return 1.0 / torch.pow(torch.tensor(float(theta)), exponents)


def yarn_frequencies(
    width: int, theta: float, factor: float, beta_fast: float, beta_slow: float, original_context: int
) -> Tensor:
    """Inverse frequencies [width / 2] float32 of layers with compressed entries.

    The ramp between kept and stretched frequencies runs from the dimension that turns `beta_fast` times within the
    original context to the one that turns `beta_slow` times; its upper end is clamped to width - 1 as released.
    """

    def turning(rotations: float) -> float:
        return width * math.log(original_context / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(turning(beta_fast)), 0)
    high = min(math.ceil(turning(beta_slow)), width - 1)
    base = plain_frequencies(width, theta)
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return (base / factor) * ramp + base * (1 - ramp)


def _angle_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    frequencies = plain_frequencies({"tiny": 16, "odd": 34, "real": 64}[size], 10000.0)
    for label, rows in row_counts(size):
        positions = torch.randint(0, 1 << 20, (rows,), generator=generator)
        yield Sample(label, {"positions": positions, "frequencies": frequencies}, ("positions",))
    yield Sample(
        "padding rows", {"positions": torch.tensor([-1, 0, 5, -1]), "frequencies": frequencies}, ("positions",)
    )


@op(samples=_angle_samples, tolerance=Tolerance(rtol=2e-7, bf16_rtol=2e-7))
def rope_angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the float32 product of position and frequency, as released (spec/model 8, row 19).

    Args:
        positions: [T] int64; -1 (padding) is treated as 0.
        frequencies: [R / 2] float32.

    Returns:
        cos, sin: [T, R / 2] float32.
    """
    angles = positions.clamp(min=0).to(torch.float32)[:, None] * frequencies.to(torch.float32)
    angles = angles.to(frequencies.dtype)
    # The release builds its table with polar, whose last bit differs from that of cos and sin in some places.
    turned = torch.polar(torch.ones_like(angles), angles)
    return turned.real.contiguous(), turned.imag.contiguous()


def _rope_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    heads, width, rotated = {"tiny": (2, 32, 16), "odd": (3, 38, 34), "real": (64, 512, 64)}[size]
    for label, rows in row_counts(size):
        angles = normal(generator, rows, rotated // 2, scale=100.0)
        for inverse in (False, True):
            arguments = {"x": normal(generator, rows, heads, width), "cos": angles.cos(), "sin": angles.sin()}
            yield Sample(f"{label}, inverse={inverse}", {**arguments, "inverse": inverse}, ("x", "cos", "sin"))


@op(samples=_rope_samples, determinism=Determinism.ROW_INVARIANT, activations=("x",))
def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate adjacent pairs of the last R components; `inverse` rotates back. Math in fp32, one rounding.

    Args:
        x: [T, ..., C] in the compute dtype, C >= R.
        cos, sin: [T, R / 2] float32 of the row's position.

    Returns:
        A new tensor of the shape and dtype of x.
    """
    rotated = 2 * cos.shape[-1]
    accumulate = accumulate_dtype(x.dtype)
    shape = (cos.shape[0], *([1] * (x.dim() - 2)), cos.shape[-1])
    c, s = cos.to(accumulate).view(shape), sin.to(accumulate).view(shape)
    if inverse:
        s = -s
    kept, tail = x[..., :-rotated], x[..., -rotated:].to(accumulate)
    even, odd = tail.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2)
    return torch.cat((kept, turned.to(x.dtype)), dim=-1)

"""Matrix products with the release's weights (spec/model 4.3)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, op
from deepinfer.ops.handles import DenseWeight, Rows, accumulate_dtype
from deepinfer.ops.sample_inputs import RawWeight, RowsInput, fp8_bytes, normal, row_counts

__all__ = ["grouped_linear", "linear", "linear_accumulate"]


def _linear_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    n, k = {"tiny": (64, 64), "odd": (96, 160), "real": (1280, 5120)}[size]
    codes, scales = fp8_bytes(generator, n, k)
    fp8 = RawWeight("fp8_block32", {"w.weight": codes, "w.scale": scales}, ((n, k),))
    dense = normal(generator, n, k, scale=k**-0.5).to(torch.bfloat16)
    bf16 = RawWeight("bf16", {"w.weight": dense}, ((n, k),))
    for weight in (fp8, bf16):
        for label, rows in row_counts(size):
            yield Sample(
                f"{weight.kind}, {label}", {"rows": RowsInput(normal(generator, rows, k)), "weight": weight}, ("rows",)
            )
    huge = normal(generator, 3, k) * torch.exp2(torch.randint(-10, 10, (3, k), generator=generator).float())
    yield Sample("wide exponents", {"rows": RowsInput(huge), "weight": fp8}, ("rows",))


@op(samples=_linear_samples, determinism=Determinism.RUN_TO_RUN, activations=("rows",))
def linear(rows: Rows, weight: DenseWeight) -> Tensor:
    """y = x W^T with fp32 sums and one rounding to the compute dtype.

    Quantised weights read the quantised form of the rows; both operands are then exact products of small integers and
    powers of two, so this is the block-scaled product up to the order of summation.

    Args:
        rows: [T, K].
        weight: [N, K].

    Returns:
        [T, N] in the compute dtype.
    """
    x = rows.quantised if weight.quantised else rows.values
    accumulate = accumulate_dtype(x.dtype)
    return (x.to(accumulate) @ weight.values.to(accumulate).T).to(x.dtype)


@op(samples=_linear_samples, determinism=Determinism.RUN_TO_RUN, activations=("rows",))
def linear_accumulate(rows: Rows, weight: DenseWeight) -> Tensor:
    """y = x W^T kept in the accumulate dtype: router, compressor, hyper-connection mixes and logits.

    Returns:
        [T, N] float32 (float64 for float64 rows).
    """
    x = rows.quantised if weight.quantised else rows.values
    accumulate = accumulate_dtype(x.dtype)
    return x.to(accumulate) @ weight.values.to(accumulate).T


def _grouped_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    groups, n, k = {"tiny": (2, 32, 64), "odd": (3, 32, 96), "real": (8, 1024, 4096)}[size]
    codes, scales = fp8_bytes(generator, groups * n, k)
    weight = RawWeight("fp8_block32", {"w.weight": codes, "w.scale": scales}, ((groups * n, k),))
    for label, rows in row_counts(size):
        yield Sample(label, {"x": normal(generator, rows, groups, k), "weight": weight}, ("x",))


@op(samples=_grouped_samples, determinism=Determinism.RUN_TO_RUN, activations=("x",))
def grouped_linear(x: Tensor, weight: DenseWeight) -> Tensor:
    """Block-diagonal product of the attention output: group g of x meets rows g N .. (g + 1) N of the weight.

    Inputs are not quantised (spec/model 8, row 2).

    Args:
        x: [T, G, K] in the compute dtype.
        weight: [G N, K].

    Returns:
        [T, G N] in the compute dtype, group-major.
    """
    accumulate = accumulate_dtype(x.dtype)
    blocks = weight.values.to(accumulate).unflatten(0, (x.shape[1], -1))
    return torch.einsum("tgk,gnk->tgn", x.to(accumulate), blocks).flatten(1).to(x.dtype)

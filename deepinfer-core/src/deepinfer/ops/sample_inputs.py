"""Building blocks of sample inputs: seeded draws and the row counts that every contract is tried at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.contract import SampleSize

__all__ = ["RawWeight", "RowsInput", "fp4_bytes", "fp8_bytes", "normal", "row_counts", "uniform_ids"]


@dataclass(frozen=True)
class RawWeight:
    """A weight in checkpoint bytes, which the caller loads through the backend under test.

    Attributes:
        kind: a `WeightGroup` kind ("fp8_block32", "fp4_experts", "bf16", "float32", "fp8_rows").
        tensors: raw tensors by part name, in order ("weight" and "scale" per part).
        shapes: logical [N, K] of each part, in order.
    """

    kind: str
    tensors: dict[str, Tensor]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RowsInput:
    """Activations [T, C] that the caller turns into `Rows` with the `quantise_rows` of the table under test."""

    values: Tensor


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """Standard normal float32 values times `scale`."""
    return scale * torch.randn(*shape, generator=generator)


def uniform_ids(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    """Uniform int64 ids in [0, high)."""
    return torch.randint(0, high, shape, generator=generator)


def row_counts(size: SampleSize) -> Iterator[tuple[str, int]]:
    """Labels and row counts to try at a size: empty, single, around tile edges, many."""
    yield "empty", 0
    yield "one row", 1
    if size == "tiny":
        yield "four rows", 4
    elif size == "odd":
        yield from (("just below a tile", 15), ("just above a tile", 17), ("many", 67))
    else:
        yield "many", 64


def fp8_bytes(generator: torch.Generator, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random finite e4m3 codes [rows, columns] and ue8m0 scales per 32 x 32 block, values of order columns**-0.5."""
    codes = normal(generator, rows, columns, scale=64.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    exponent = 127 - 6 - int(torch.tensor(float(columns)).sqrt().log2().round())
    blocks = (-(-rows // 32), -(-columns // 32))
    scales = torch.randint(exponent - 1, exponent + 2, blocks, generator=generator, dtype=torch.uint8)
    return codes, scales


def fp4_bytes(generator: torch.Generator, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random packed e2m1 bytes [rows, columns / 2] uint8 and ue8m0 scales per row and 32 columns."""
    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    exponent = 127 - 2 - int(torch.tensor(float(columns)).sqrt().log2().round())
    scales = torch.randint(exponent - 1, exponent + 2, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    return packed, scales

"""Whether matrix products of this machine keep rows independent, found out once per process in a few milliseconds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deepinfer.cpu.kernels import SUM_CHUNK, tile_product

__all__ = ["row_variant_products"]

ROWS = 48
CUTS = ((0, 1), (5, 6), (0, 2), (3, 20), (0, 16), (15, 48))
"""Row ranges that are computed alone and compared with the same rows of the whole product."""


@functools.cache
def row_variant_products() -> tuple[str, ...]:
    """Products in which a row's bits depended on the other rows of the call; empty where the promise holds."""
    return tuple(label for label, product, operands in _cases() if _depends_on_neighbours(product, operands))


def _cases() -> Iterator[tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]]:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for k, n in ((32, 24), (256, 129), (2 * SUM_CHUNK + 64, 64)):
            x = torch.randn(ROWS, k, generator=generator).to(dtype)
            weight = torch.randn(n, k, generator=generator).to(dtype)
            yield f"{name} [rows, {k}] x [{k}, {n}]", functools.partial(_product, weight), (x,)
    # One product per row, as attention and index scores do it.
    query = torch.randn(ROWS, 4, 64, generator=generator)
    keys = torch.randn(ROWS, 64, 40, generator=generator)
    yield "float32 batched [rows, 4, 64] x [rows, 64, 40]", torch.bmm, (query, keys)


def _product(weight: Tensor, x: Tensor) -> Tensor:
    return tile_product(x, weight)


def _depends_on_neighbours(product: Callable[..., Tensor], operands: tuple[Tensor, ...]) -> bool:
    whole = product(*operands)
    return any(
        not torch.equal(product(*(operand[low:high] for operand in operands)), whole[low:high]) for low, high in CUTS
    )

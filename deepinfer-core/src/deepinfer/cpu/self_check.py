"""Whether the arithmetic of this machine keeps rows independent, found out once per process.

Row-invariance rests on facts about PyTorch's kernels that no document promises: products of padded row tiles, batched
products of one shape per row, reductions over the last dimension of up to 32,768 elements (longer ones are split among
threads when there are few rows), and elementary functions whose vector tail computes like the vector body.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from deepinfer.cpu.kernels import SUM_CHUNK, tile_product

__all__ = ["LONGEST_REDUCTION", "row_variant_products", "row_variant_shapes", "row_variant_work"]

ROWS = 48
CUTS = ((0, 1), (5, 6), (0, 2), (3, 20), (0, 16), (15, 48))
"""Row ranges that are computed alone and compared with the same rows of the whole result."""

LONGEST_REDUCTION = 32_768
"""Elements of a last dimension up to which a sum keeps its order however many rows there are."""

WEIGHT_ELEMENTS = 1 << 20
"""Most elements of a model's matrix that are tried: of a larger one, as many outputs as fit, all of its inputs."""


@functools.cache
def row_variant_products() -> tuple[str, ...]:
    """Small products in which a row's bits depend on the other rows of the call; empty where the promise holds."""
    return tuple(label for label, function, operands in _products() if _depends_on_neighbours(function, operands))


@functools.cache
def row_variant_work(threads: int | None = None) -> tuple[str, ...]:
    """The same for everything that the references rely on: products, elementary functions and reductions.

    Args:
        threads: CPU threads to use; None leaves them alone.
    """
    with _threads(threads):
        cases = (*_products(), *_elementary())
        return tuple(label for label, function, operands in cases if _depends_on_neighbours(function, operands))


@functools.cache
def row_variant_shapes(shapes: tuple[tuple[int, int], ...], dtype: torch.dtype) -> tuple[str, ...]:
    """The same for products with matrices [N, K] of a model in a dtype, with the present threads and with one.

    Args:
        shapes: distinct (N, K).
    """
    found = []
    for n, k in shapes:
        for threads in (None, 1):
            with _threads(threads):
                label, function, operands = _product_case(min(n, max(1, WEIGHT_ELEMENTS // k)), k, dtype)
                if _depends_on_neighbours(function, operands):
                    found.append(label + (" with one thread" if threads else ""))
    return tuple(found)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None and count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


Case = tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _product_case(n: int, k: int, dtype: torch.dtype) -> Case:
    name = str(dtype).removeprefix("torch.")
    weight = _normal(n, k).to(dtype)
    return f"{name} [rows, {k}] x [{k}, {n}]", lambda x: tile_product(x, weight), (_normal(ROWS, k).to(dtype),)


def _products() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for k, n in ((32, 24), (256, 129), (2 * SUM_CHUNK + 64, 64)):
            yield _product_case(n, k, dtype)
    # One product per row, as attention and index scores do it.
    for heads, width, keys in ((4, 64, 40), (6, 96, 61)):
        label = f"float32 batched [rows, {heads}, {width}] x [rows, {width}, {keys}]"
        yield label, torch.bmm, (_normal(ROWS, heads, width), _normal(ROWS, keys, width).transpose(1, 2))


def _elementary() -> Iterator[Case]:
    for width in (37, 129, 1024):
        x = _normal(ROWS, width)
        positive = x.abs() + 1e-3
        for name in ("exp", "sin", "cos"):
            yield f"{name} [rows, {width}]", getattr(torch, name), (x,)
        for name in ("log1p", "sqrt", "rsqrt", "reciprocal"):
            yield f"{name} [rows, {width}]", getattr(torch, name), (positive,)
    for width in (37, 5120, LONGEST_REDUCTION):
        x = _normal(ROWS, width)
        yield f"sum [rows, {width}]", _sum, (x,)
        yield f"mean of squares [rows, {width}]", _mean_square, (x,)
    yield "softmax [rows, 4, 4]", _softmax, (_normal(ROWS, 4, 4),)
    yield "column sums [rows, 4, 4]", _column_sum, (_normal(ROWS, 4, 4),)


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1)


def _mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1)


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


def _column_sum(x: Tensor) -> Tensor:
    return x.sum(-2)


def _depends_on_neighbours(function: Callable[..., Tensor], operands: Sequence[Tensor]) -> bool:
    whole = function(*operands)
    return any(
        not torch.equal(function(*(operand[low:high].clone() for operand in operands)), whole[low:high])
        for low, high in CUTS
    )

"""Least-squares fit of values that can only rise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["isotonic"]


def isotonic(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The non-decreasing sequence nearest to `values` in weighted least squares.

    By the max-min formula: entry k is the largest, over i <= k, of the smallest, over j >= k, weighted mean of entries
    i .. j. Quadratic in the length, which suits the few dozen entries of a table.

    Args:
        values: [..., n].
        weights: [..., n], positive.

    Returns:
        [..., n].
    """
    size = values.shape[-1]
    sums = _sums_between(values * weights) / _sums_between(weights)
    means = np.where(np.tri(size, k=-1, dtype=np.bool_), np.inf, sums)
    smallest = np.minimum.accumulate(means[..., ::-1], axis=-1)[..., ::-1]
    # Row i says nothing about entries before i.
    smallest = np.where(np.tri(size, k=-1, dtype=np.bool_), -np.inf, smallest)
    largest: NDArray[np.float64] = smallest.max(axis=-2)
    return largest


def _sums_between(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[..., n] -> [..., n, n], the sum of entries i .. j at (i, j) for j >= i; 1 below the diagonal."""
    size = values.shape[-1]
    shifted = np.broadcast_to(values[..., None, :], (*values.shape, size))
    sums = np.cumsum(np.where(np.tri(size, k=-1, dtype=np.bool_), 0.0, shifted), axis=-1)
    return np.where(np.tri(size, k=-1, dtype=np.bool_), 1.0, sums)

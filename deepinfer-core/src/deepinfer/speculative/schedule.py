"""Which drafts to verify: the number of rows, and their owners, that bring the most accepted tokens a second."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["assign_drafts", "best_total"]


def best_total(survival: NDArray[np.float64], limits: NDArray[np.int32], seconds: NDArray[np.float64]) -> int:
    """The number of drafts, over all sequences, with the highest expected tokens per second.

    A step with k drafts brings one token of each sequence and, in expectation, the survival of every verified draft.
    Survival falls along a sequence, so the k largest values never leave a gap and are the best choice of k drafts.
    Where a larger step costs no more time (padding up to a row bucket), more drafts are always at least as good.

    Args:
        survival: [S, N], probability that draft j and all before it are accepted; non-increasing along a row.
        limits: [S], drafts that each sequence may verify.
        seconds: [K + 1], time of the step with 0 .. K drafts, positive; no more than K are chosen.

    Returns:
        0 .. min(K, sum of limits); the smallest of several that are equally good.
    """
    available = np.sort(survival[_allowed(survival, limits)])[::-1][: seconds.size - 1]
    expected = survival.shape[0] + np.concatenate([[0.0], np.cumsum(available)])
    return int(np.argmax(expected / seconds[: expected.size]))


def assign_drafts(survival: NDArray[np.float64], limits: NDArray[np.int32], total: int) -> NDArray[np.int32]:
    """Give a number of verify rows to the drafts that survive most probably.

    Whether draft j of a sequence is taken depends on the survival of its drafts up to j, never on later ones: those are
    at most as probable, come later among equals, and the total is given. With a total that was fixed before the drafts
    were drawn, rejection sampling therefore stays unbiased.

    Args:
        survival: [S, N], non-increasing along a row.
        limits: [S], drafts that each sequence may verify.
        total: drafts to verify, at most the sum of the limits.

    Returns:
        int32 [S], drafts of each sequence, 0 .. limits. Equal values go to earlier drafts, then to earlier sequences.
    """
    if total <= 0:
        return np.zeros(survival.shape[0], np.int32)
    # By position first, so that ties are spread over the sequences.
    values = np.where(_allowed(survival, limits), survival, -1.0).T.ravel()
    smallest = np.partition(values, values.size - total)[values.size - total]
    taken = values > smallest
    ties = np.flatnonzero(values == smallest)
    taken[ties[: total - int(taken.sum())]] = True
    return taken.reshape(survival.T.shape).sum(0, dtype=np.int32)


def _allowed(survival: NDArray[np.float64], limits: NDArray[np.int32]) -> NDArray[np.bool_]:
    return np.arange(survival.shape[1]) < limits[:, None]

"""Histograms with fixed buckets: constant memory, however long an engine runs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["REQUEST_SECONDS", "STEP_SECONDS", "Histogram"]

STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Bounds for steps and for the time between two tokens."""

REQUEST_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Bounds for what a request waits for."""


class Histogram:
    """Counts of values by bucket; a value equal to a bound belongs to the bucket that the bound ends.

    One thread writes; others may read at any time and see counts that are at most one value apart.

    Args:
        bounds: ascending upper ends of the buckets; one more bucket holds everything above.

    Raises:
        ValueError: no bounds, or they do not ascend.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        if not bounds or any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(f"bucket bounds must ascend, found {list(bounds)}")
        self.bounds = tuple(float(bound) for bound in bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def quantile(self, share: float) -> float:
        """Value below which a share of all values lies, interpolated inside its bucket; NaN without values.

        Values above the last bound count as that bound.

        Raises:
            ValueError: the share is not in [0, 1].
        """
        if not 0 <= share <= 1:
            raise ValueError(f"a share is in [0, 1], found {share}")
        counts = list(self.counts)
        total = sum(counts)
        if not total:
            return math.nan
        below, wanted = 0, share * total
        for index, (count, bound) in enumerate(zip(counts, self.bounds, strict=False)):
            if count and below + count >= wanted:
                low = self.bounds[index - 1] if index else 0.0
                return low + (bound - low) * max(wanted - below, 0.0) / count
            below += count
        return self.bounds[-1]

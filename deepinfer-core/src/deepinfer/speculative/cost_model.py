"""What a step costs by its rows: a curve measured on this machine, kept right by the steps that run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import ConfigError
from deepinfer.speculative.monotone import isotonic

__all__ = ["CostCurve", "StepCosts", "fit_curve", "row_edges"]

MAX_BUCKETS = 64
"""More distinct buckets than this are measured at a geometric grid and interpolated."""
LEAST_SHARE = 0.1
"""Part of a measured step that is always its rows'."""
SLOWEST = 1.0 / 16
"""Least weight of a new step against those before it."""
CLIP = 0.25
"""Most that one step can say, as a difference of logarithms: a hiccup moves a believed time by 1.6 %."""
TRUST = 5.0
"""Steps after which an edge's own steps and those of all edges weigh the same."""
FADE = 1.0 - 1.0 / 1024
"""Weight of a step one step later: a row count that was slow once must not be avoided for ever."""


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a decode step: a part for its rows and a part for each sequence (the draft block).

    Attributes:
        rows: ascending row counts that were measured.
        row_seconds: time of the forward pass and sampling at each of them; positive.
        sequence_seconds: further time for each sequence.
        padded: whether a step takes as long as the next measured row count; else times between two are interpolated.

    Raises:
        ConfigError: no such curve.
    """

    rows: tuple[int, ...]
    row_seconds: tuple[float, ...]
    sequence_seconds: float
    padded: bool

    def __post_init__(self) -> None:
        rows, seconds = np.array(self.rows), np.array(self.row_seconds)
        if rows.size != seconds.size or not rows.size or rows[0] < 1 or (np.diff(rows) <= 0).any():
            raise ConfigError(f"rows {self.rows} must ascend from 1 or more, with one time each", field="cost_curve")
        if not (np.isfinite(seconds) & (seconds > 0)).all() or not 0 <= self.sequence_seconds < np.inf:
            raise ConfigError("times must be positive numbers of seconds", field="cost_curve")


def row_edges(buckets: NDArray[np.int64]) -> tuple[tuple[int, ...], bool]:
    """Row counts to measure, and whether steps are padded up to them.

    Args:
        buckets: padded row count of 1, 2, ... rows.
    """
    distinct = np.unique(buckets)
    if distinct.size <= MAX_BUCKETS and distinct.size < buckets.size:
        return tuple(distinct.tolist()), True
    # Two steps for each doubling: costs are close to straight lines between them.
    grid = np.unique(np.geomspace(1, distinct[-1], 1 + 2 * int(np.ceil(np.log2(max(distinct[-1], 2))))).round())
    return tuple(grid.astype(np.int64).tolist()), False


def fit_curve(
    rows: NDArray[np.int64], sequences: NDArray[np.int64], seconds: NDArray[np.float64], *, padded: bool
) -> CostCurve:
    """The curve of measured steps.

    Args:
        rows, sequences, seconds: [P], of each measured step. Where two have equal rows, their sequences tell how much
            of the time belongs to those.
        padded: as `CostCurve`.

    Raises:
        ConfigError: nothing was measured, or a time is not positive.
    """
    edges = np.unique(rows)
    groups = [rows == edge for edge in edges]
    slopes = [np.polyfit(sequences[group], seconds[group], 1)[0] for group in groups if np.ptp(sequences[group])]
    each = max(float(np.median(slopes)), 0.0) if slopes else 0.0
    # Noise must not make rows free: some of the time is always theirs.
    own = np.maximum(seconds - each * sequences, LEAST_SHARE * seconds)
    return CostCurve(tuple(edges.tolist()), tuple(float(own[group].mean()) for group in groups), each, padded)


class StepCosts:
    """A cost curve and what the steps that run say about it.

    The logarithm of a step's time over the curve's moves a running mean of its edge and one of all edges, by no more
    than a bounded amount. An edge is corrected by its own mean as far as that has evidence, else by the mean of all.
    Corrected times never fall with the rows.
    """

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve
        self._rows = np.array(curve.rows, np.float64)
        self._base = isotonic(np.array(curve.row_seconds), np.ones(len(curve.rows)))
        self._ratio = np.zeros(len(curve.rows))
        self._evidence = np.zeros(len(curve.rows))
        self._ratio_of_all = 0.0
        self._observed = 0
        self._current = self._base

    @property
    def row_seconds(self) -> NDArray[np.float64]:
        """Time of each edge as it is believed now."""
        return self._current

    def seconds(self, rows: NDArray[np.int64], sequences: int) -> NDArray[np.float64]:
        """Expected seconds of decode steps with so many rows of so many sequences."""
        return self._at(self._current, rows) + self.curve.sequence_seconds * sequences

    def observe(self, rows: int, sequences: int, seconds: float) -> None:
        """Learn from one decode step; a time of no more than the sequences' part says nothing about the rows."""
        own = seconds - self.curve.sequence_seconds * sequences
        if own <= 0:
            return
        ratio = float(np.log(own / self._at(self._base, np.array([rows]))[0]))
        self._observed += 1
        self._ratio_of_all += _step(ratio - self._ratio_of_all, self._observed)
        edge = self._edge(rows)
        self._evidence *= FADE
        self._evidence[edge] += 1
        self._ratio[edge] += _step(ratio - self._ratio[edge], self._evidence[edge])
        share = self._evidence / (self._evidence + TRUST)
        correction = np.exp(self._ratio_of_all + share * (self._ratio - self._ratio_of_all))
        self._current = isotonic(self._base * correction, 1.0 + self._evidence)

    def _edge(self, rows: int) -> int:
        """The edge that a step tells about: the one that it is padded to, or the nearest."""
        above = min(int(np.searchsorted(self._rows, rows)), self._rows.size - 1)
        below = max(above - 1, 0)
        nearer = not self.curve.padded and rows - self._rows[below] < self._rows[above] - rows
        return below if nearer else above

    def _at(self, seconds: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Times at any row counts; past the last edge they grow in proportion to the rows."""
        last = self._rows[-1]
        if self.curve.padded:
            found = seconds[np.searchsorted(self._rows, np.minimum(rows, last))]
        else:
            found = np.interp(rows, self._rows, seconds)
        grown: NDArray[np.float64] = found * np.maximum(rows / last, 1.0)
        return grown


def _step(difference: float, evidence: float) -> float:
    """How far a mean moves towards a new value."""
    return max(1.0 / evidence, SLOWEST) * min(max(difference, -CLIP), CLIP)

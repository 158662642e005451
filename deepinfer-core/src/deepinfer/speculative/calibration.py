"""What a confidence is worth: measured acceptance of drafts by position and confidence."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.speculative.monotone import isotonic

__all__ = ["Calibration", "Reliability"]

BINS = 16
PRIOR = 8.0
"""Tries that a bin starts with, at the rate that the confidence itself says."""
LEVELS = 512
"""Steps of the confidence that planning tells apart."""
FADE = 1.0 - 1.0 / 4096
"""Weight of evidence a step later, so that bins which scheduling no longer visits return to the confidence itself."""


class Reliability:
    """Reliability table: how often drafts of each position and confidence were accepted, given those before them were.

    Args:
        num_drafts: positions N of a draft block.
        fade: what is left of every count at the next observation.

    Attributes:
        tries: [N, BINS], drafts that were verified and whose predecessors were all accepted.
        hits: [N, BINS], those of them that were accepted.
        confidence: [N, BINS], sum of their confidences.
    """

    def __init__(self, num_drafts: int, *, fade: float = 1.0) -> None:
        self.num_drafts = num_drafts
        self.fade = fade
        self.tries, self.hits, self.confidence = np.zeros((3, num_drafts, BINS))

    def observe(
        self, confidences: NDArray[np.float32], verified: NDArray[np.int32], accepted: NDArray[np.int32]
    ) -> None:
        """Count one step.

        Args:
            confidences: [S, N] in [0, 1]; NaN where it was not known.
            verified: [S], drafts of each sequence that the target judged.
            accepted: [S], those that stand, 0 .. verified.
        """
        position = np.arange(self.num_drafts)
        judged = (position < verified[:, None]) & (position <= accepted[:, None]) & ~np.isnan(confidences)
        sequence, draft = np.nonzero(judged)
        confidence = confidences[sequence, draft].astype(np.float64)
        cell = draft * BINS + np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
        for table, values in (
            (self.tries, None),
            (self.hits, draft < accepted[sequence]),
            (self.confidence, confidence),
        ):
            table *= self.fade
            table += np.bincount(cell, values, minlength=table.size).reshape(table.shape)

    def rows(self) -> list[dict[str, Any]]:
        """The cells that hold anything, for reports: position, mean confidence, share accepted, drafts."""
        return [
            {
                "position": int(position),
                "confidence": float(self.confidence[position, cell] / self.tries[position, cell]),
                "accepted": float(self.hits[position, cell] / self.tries[position, cell]),
                "drafts": round(float(self.tries[position, cell])),
            }
            for position, cell in zip(*np.nonzero(self.tries), strict=True)
        ]

    def error(self) -> float:
        """Expected calibration error: mean distance of confidence and acceptance over the drafts; 0 without any."""
        return float(np.abs(self.confidence - self.hits).sum() / max(self.tries.sum(), 1.0))


class Calibration:
    """From confidences to the probability that a draft survives, corrected by what was accepted.

    Each position has a rising curve through its bins: measured acceptance, drawn towards the confidence itself where
    little was measured. A confidence that is not known counts as the position's mean, which starts at 1: an unknown
    draft is worth a try. Nothing changes between two observations.

    Attributes:
        table: what was observed, older steps counting less.
    """

    def __init__(self, num_drafts: int) -> None:
        self.table = Reliability(num_drafts, fade=FADE)
        self._centres = (np.arange(BINS) + 0.5) / BINS
        self._refresh()

    def observe(
        self, confidences: NDArray[np.float32], verified: NDArray[np.int32], accepted: NDArray[np.int32]
    ) -> None:
        """Learn from one step; arguments as `Reliability.observe`."""
        self.table.observe(confidences, verified, accepted)
        self._refresh()

    def survival(self, confidences: NDArray[np.float32]) -> NDArray[np.float64]:
        """Probability that each draft and all before it are accepted: [S, N] confidences or NaN -> [S, N]."""
        level = np.where(np.isnan(confidences), LEVELS + 1, np.rint(confidences * LEVELS)).astype(np.int64)
        rates = self._rates[np.arange(self.table.num_drafts), level]
        return np.cumprod(rates, axis=1, out=rates)

    def _refresh(self) -> None:
        tries, hits = self.table.tries, self.table.hits
        weights = tries + PRIOR
        curves = isotonic((hits + PRIOR * self._centres) / weights, weights)
        levels = np.arange(LEVELS + 1) / LEVELS
        self._rates = np.empty((tries.shape[0], LEVELS + 2))
        for rates, curve in zip(self._rates, curves, strict=True):
            rates[:-1] = np.interp(levels, self._centres, curve)
        self._rates[:, -1] = (hits.sum(1) + PRIOR) / (tries.sum(1) + PRIOR)

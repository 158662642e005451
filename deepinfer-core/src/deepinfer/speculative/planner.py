"""How many drafts each sequence verifies in the next step, from what the host knows when it plans it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepinfer.speculative.calibration import Calibration
from deepinfer.speculative.cost_model import StepCosts
from deepinfer.speculative.schedule import assign_drafts, best_total

__all__ = ["VerificationPlanner"]


class VerificationPlanner:
    """Confidence-scheduled verification. One thread calls it, in the order of the steps.

    The synchronous loop knows the confidences of the drafts that it is about to verify. The asynchronous one plans
    before they exist, with those of the round before: then these are what acceptance is measured against, so the
    calibration says how much they are worth a round later.

    With `unbiased` the number of verify rows comes from the round before the one whose confidences assign them. It is
    then fixed before any draft of the round was drawn, and whether a draft is verified cannot depend on later ones.

    Args:
        num_slots: state slots, slot 0 included. num_drafts: N.
        costs: of steps.
        lookahead: steps in flight while one is planned: 0 in the synchronous loop.
        unbiased: as rejection sampling needs; coupled verification cannot be biased.
    """

    def __init__(
        self, num_slots: int, num_drafts: int, costs: StepCosts, *, lookahead: int, unbiased: bool = False
    ) -> None:
        self.costs = costs
        self.calibration = Calibration(num_drafts)
        self._lookahead, self._unbiased = lookahead, unbiased
        # The last round of each slot that the host has read, and the one before.
        self._latest, self._previous = np.full((2, num_slots, num_drafts), np.nan, np.float32)

    def admit(self, slots: NDArray[np.int32]) -> None:
        """Forget the rounds of slots that got another request."""
        self._latest[slots] = self._previous[slots] = np.nan

    def lengths(
        self, slots: NDArray[np.int32], limits: NDArray[np.int32], *, other_rows: int, max_rows: int
    ) -> NDArray[np.int32]:
        """Drafts to verify of each decoding sequence.

        Args:
            slots: [S], of the sequences.
            limits: [S], most drafts of each. In `unbiased` mode they, and what is done with the result, must not
                depend on a result: whoever has to drop drafts afterwards decides so for the limits, before.
            other_rows: further rows of the step, prompt chunks.
            max_rows: rows that the sequences may have together, at least S.

        Returns:
            int32 [S], 0 .. limits.
        """
        count = slots.size
        most = min(max_rows - count, int(limits.sum()))
        if most <= 0:
            return np.zeros(count, np.int32)
        seconds = self.costs.seconds(other_rows + count + np.arange(most + 1), count)
        survival = self.calibration.survival(self._latest[slots])
        known_before = self.calibration.survival(self._previous[slots]) if self._unbiased else survival
        return assign_drafts(survival, limits, best_total(known_before, limits, seconds))

    def read(
        self,
        slots: NDArray[np.int32],
        verified: NDArray[np.int32],
        accepted: NDArray[np.int32],
        confidences: NDArray[np.float32],
    ) -> None:
        """Hear what a step brought for the sequences that drew tokens in it.

        Args:
            slots: [S], of the sequences that still own them.
            verified: [S], drafts judged; 0 after a prompt. accepted: [S], those that stand.
            confidences: [S, N] of the drafts that were made at the end of the step.
        """
        planned_with = self._previous if self._lookahead else self._latest
        self.calibration.observe(planned_with[slots], verified, accepted)
        self._previous[slots] = self._latest[slots]
        self._latest[slots] = confidences

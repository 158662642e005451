"""What speculation did: drafts by position, committed tokens, and how far confidences can be trusted."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.speculative.calibration import Reliability

__all__ = ["SpeculationStatistics"]


class SpeculationStatistics:
    """Counts since the start, by position in the draft block.

    Attributes:
        drafted: [N], drafts that the drafter proposed.
        verified: [N], those of them that the target judged.
        accepted: [N], those that stand.
        steps: steps that verified or could have: with at least one decoding sequence.
        sequence_steps: decoding sequences of all those steps.
        committed: tokens that they brought, the target's own included.
        reliability: confidences against acceptance.
    """

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self.drafted, self.verified, self.accepted = np.zeros((3, num_drafts), np.int64)
        self.steps = self.sequence_steps = self.committed = 0
        self.reliability = Reliability(num_drafts)

    def observe(
        self,
        drafted: NDArray[np.int32],
        verified: NDArray[np.int32],
        accepted: NDArray[np.int32],
        confidences: NDArray[np.float32],
    ) -> None:
        """Count the S sequences that decoded in one step.

        Args:
            drafted: [S], drafts that were ready for each. verified: [S], how many the target judged.
            accepted: [S], how many of those stand.
            confidences: [S, N] of the drafts, NaN where not known.
        """
        if not drafted.size:
            return
        position = np.arange(self.num_drafts)
        for total, counts in ((self.drafted, drafted), (self.verified, verified), (self.accepted, accepted)):
            total += (position < counts[:, None]).sum(0)
        self.steps += 1
        self.sequence_steps += drafted.size
        self.committed += int(accepted.sum()) + drafted.size
        self.reliability.observe(confidences, verified, accepted)

    def to_dict(self) -> dict[str, Any]:
        """Counts, rates and the reliability table, as JSON values."""
        return {
            "drafted": self.drafted.tolist(),
            "verified": self.verified.tolist(),
            "accepted": self.accepted.tolist(),
            "steps": self.steps,
            "sequence_steps": self.sequence_steps,
            "committed_tokens": self.committed,
            "tokens_per_sequence_step": self.committed / max(self.sequence_steps, 1),
            "calibration_error": self.reliability.error(),
            "reliability": self.reliability.rows(),
        }

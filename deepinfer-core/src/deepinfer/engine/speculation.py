"""What the loop learns of drafts from each result: statistics for people, confidences and times for the planner."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deepinfer.engine.generation import Generation
from deepinfer.engine.runner import StepResult
from deepinfer.scheduler.plan import StepPlan
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.scheduler import ScheduledStep
from deepinfer.speculative.planner import VerificationPlanner
from deepinfer.speculative.statistics import SpeculationStatistics

__all__ = ["Speculation"]


class Speculation:
    """Hears of every step that has been read, in order.

    Args:
        num_drafts: N. num_slots: slot 0 included.
        planner: chooses how many drafts are verified; None: nobody does.
        current: the generation behind a planned request; None if it has ended since.

    Attributes:
        statistics: counts since the start. Rows of requests that had ended when their step was read are left out.
    """

    def __init__(
        self,
        num_drafts: int,
        num_slots: int,
        planner: VerificationPlanner | None,
        current: Callable[[Request], Generation | None],
    ) -> None:
        self.statistics = SpeculationStatistics(num_drafts)
        self._planner, self._current = planner, current
        # What the next step of each slot verifies.
        self._drafted = np.zeros(num_slots, np.int32)
        self._confidences = np.full((num_slots, num_drafts), np.nan, np.float32)

    def read(self, scheduled: ScheduledStep, result: StepResult) -> None:
        """Take up a result, before it can end a request."""
        plan = scheduled.plan
        entered = np.concatenate([plan.admitted_slots, np.array([move.slot for move in plan.restores], np.int32)])
        self._drafted[entered], self._confidences[entered] = 0, np.nan
        # A request that was preempted behind this step has given its slot away.
        holders = [
            self._current(request) if request.slot == slot else None
            for request, slot in zip(scheduled.requests, plan.slots.tolist(), strict=True)
        ]
        held = np.array([holder is not None for holder in holders], np.bool_)
        drew = np.flatnonzero(plan.samples & (result.sampled > 0) & held)
        slots, decoding = plan.slots[drew], ~plan.is_prefill[drew]
        verified = np.where(decoding, result.sampled[drew] - 1, 0).astype(np.int32)
        accepted = np.clip(result.accepted[drew] - 1, 0, verified).astype(np.int32)
        before = slots[decoding]
        self.statistics.observe(
            self._drafted[before], verified[decoding], accepted[decoding], self._confidences[before]
        )
        for index, judged, stand in zip(drew.tolist(), verified.tolist(), accepted.tolist(), strict=True):
            holder = holders[index]
            if holder is not None:
                holder.metrics.num_drafts_verified += judged
                holder.metrics.num_drafts_accepted += stand
        exists = result.drafts[drew] >= 0
        self._drafted[slots] = exists.sum(1)
        self._confidences[slots] = np.where(exists, result.confidences[drew], np.nan)
        if self._planner is not None:
            self._planner.read(slots, verified, accepted, self._confidences[slots])

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Take up the time of a step that did nothing but decode and waited for no mask."""
        if self._planner is not None and not (plan.is_prefill.any() or plan.saves or plan.restores):
            self._planner.costs.observe(plan.num_rows, plan.num_sequences, seconds)

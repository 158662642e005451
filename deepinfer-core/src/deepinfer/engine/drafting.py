"""Draws drafts as the target would draw there: with the request's own filters, and what of its bans is known here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.engine.logit_changes import CHANGING, LogitChanges
from deepinfer.engine.slot_tables import SlotTables
from deepinfer.ops.step import SlotRecords, StepInputs
from deepinfer.sampling.slots import Feature
from deepinfer.scheduler.plan import StepPlan

if TYPE_CHECKING:
    from deepinfer.engine.loader import DraftResult, StepOps

__all__ = ["DraftSampler"]


class DraftSampler:
    """The drafting side of a runner; called in the order of the steps.

    In coupled mode a draft is drawn with the noise that the target will have at its position, so that both choose alike
    as often as can be. In rejection mode it has noise of its own, and what it was drawn from is kept until the target
    judges it. At temperature 0 it is the largest logit in both.

    Penalties count the drafts before a draft. Grammars are not known here; the host cuts what they refuse.

    Args:
        ops: bound kernels. tables: what requests ask for, by slot.
        proposals: float32 [slots, N, V], written here for rejection sampling; None in coupled mode.
    """

    def __init__(self, ops: StepOps, tables: SlotTables, proposals: Tensor | None) -> None:
        self.tables, self.proposals = tables, proposals
        self.changes = LogitChanges(ops, tables)
        self.sample, self.force = ops.sample_step, ops.force_tokens
        self.draft = None if proposals is None else ops.draft_step

    def chooser(
        self, plan: StepPlan, inputs: StepInputs, positions: Tensor, records: SlotRecords
    ) -> DraftChooser | None:
        """What takes each draft from its logits; None where the largest logit is right for every sequence.

        Args:
            plan: of the step. inputs: expanded from it. records: of the slots.
            positions: int64 [S], of the last accepted rows.
        """
        slots = np.where(plan.samples, plan.slots, -1)
        features = self.tables.features(slots)
        plain = not (features & (CHANGING | Feature.FORCE)).any()
        if plain and self.draft is None and self.tables.are_greedy(slots):
            return None
        return DraftChooser(self, features, inputs.seq_slots, positions, records)

    def keep(self, draft: DraftResult, slots: Tensor) -> None:
        """Note for rejection that drafts came without logits: each counts as drawn with probability 1."""
        if self.proposals is None:
            return
        ids = draft.ids[:, : self.proposals.shape[1]]
        every = torch.arange(self.proposals.shape[2], device=ids.device)
        self.proposals[slots.clamp(min=0)] = torch.where(every == ids[..., None], 0.0, -torch.inf)


class DraftChooser:
    """Draws the drafts of one step, block position by block position: (logits [S, V], k) -> ids [S]."""

    def __init__(
        self,
        sampler: DraftSampler,
        features: NDArray[np.uint16],
        slots: Tensor,
        positions: Tensor,
        records: SlotRecords,
    ) -> None:
        self._sampler, self._features, self._slots, self._anchors = sampler, features, slots, positions
        self._safe = safe = slots.clamp(min=0)
        tables = sampler.tables
        self._filters = (records.temperature[safe], records.top_k[safe], records.top_p[safe])
        self._seeds, self._completions = records.seed[safe], records.completion[safe]
        self._min_p = tables.min_p_of(safe, features)
        self._first = positions + 2 - tables.prompt_length[safe]
        self._drawn: list[Tensor] = []

    def __call__(self, logits: Tensor, k: int) -> Tensor:
        """Draft number k; -1 where a logit is NaN or none is finite, and for all drafts after that."""
        sampler, tables = self._sampler, self._sampler.tables
        # The drafter's logits stay as they are.
        logits = logits.to(torch.float32, copy=True)
        output_index = self._first + k
        logits = sampler.changes.apply(logits, self._features, self._slots, output_index, self._pending)
        ids = self._draw(logits, k)
        if (self._features & Feature.FORCE).any():
            forced = tables.only(Feature.FORCE, self._features, self._slots)
            ids = sampler.force(ids, forced, output_index, tables.forced)
        if self._drawn:
            ids = torch.where(self._drawn[-1] >= 0, ids, -1)
        self._drawn.append(ids)
        return ids

    def _pending(self, chosen: NDArray[np.int64], index: Tensor) -> Tensor:
        """Drafts [rows, k] before the next one."""
        if not self._drawn:
            return torch.full((chosen.size, 1), -1, device=index.device)
        return torch.stack(self._drawn, 1)[index]

    def _draw(self, logits: Tensor, k: int) -> Tensor:
        sampler = self._sampler
        draws = (self._seeds, self._anchors + 2 + k, self._completions)
        if sampler.draft is None or sampler.proposals is None:
            min_p = [] if self._min_p is None else [self._min_p]
            ids: Tensor = sampler.sample(logits, *self._filters, *draws, *min_p)[0]
            return ids
        least = torch.zeros_like(self._filters[0]) if self._min_p is None else self._min_p
        ids, proposed = sampler.draft(logits, *self._filters, *draws, self._anchors, least)
        if k < sampler.proposals.shape[1]:
            sampler.proposals[self._safe, k] = proposed
        return ids

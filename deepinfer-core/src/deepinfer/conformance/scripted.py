"""A drafter whose acceptance is known: speculation can be tested and measured without trained weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.step import SlotRecords
from deepinfer.sampling.rng import random_words

__all__ = ["ScriptedDrafter", "ScriptedDrafts"]

SCRIPT = 1 << 20
"""Completion index of the script's draws: none that a request has."""


@dataclass
class ScriptedDrafts:
    """Drafts of S sequences: ids int64 [S, N] and confidences float32 [S, N]."""

    ids: Tensor
    confidences: Tensor


@dataclass
class ScriptedDrafter:
    """Proposes what a request says without speculation, with mistakes at scripted positions.

    Whether the token of a position is drafted rightly depends on the request's seed and the position alone, so it is
    the same in every batch and loop. A request that the script does not know is drafted wrongly.

    Attributes:
        num_drafts: N.
        outputs: seed of a request -> length of its prompt, and its output without speculation.
        acceptance: probability that a draft is right, of all requests or by seed; also its confidence.
        beside: called with every block and forgotten; the model's own drafting, where its time should count.
    """

    num_drafts: int
    outputs: Mapping[int, tuple[int, Sequence[int]]]
    acceptance: float | Mapping[int, float]
    beside: Callable[[Tensor, Tensor, Tensor], Any] | None = field(default=None, repr=False)

    def __call__(self, anchors: Tensor, positions: Tensor, slots: Tensor, records: SlotRecords) -> ScriptedDrafts:
        """Draft after `positions` int64 [S], the last accepted rows of `slots` int64 [S]; -1 is padding."""
        if self.beside is not None:
            self.beside(anchors, positions, slots)
        seeds = records.seed[slots.clamp(min=0)]
        probability = torch.tensor([self._acceptance(seed) for seed in seeds.tolist()]).reshape(-1, 1)
        offsets = torch.arange(self.num_drafts)
        targets = positions.cpu()[:, None] + 2 + offsets
        rows = seeds.cpu().repeat_interleave(self.num_drafts)
        script = random_words(rows, targets.flatten(), torch.full_like(rows, SCRIPT), 1).view(targets.shape)
        truth = torch.tensor(
            [self._follow(*item) for item in zip(seeds.tolist(), positions.tolist(), strict=True)], dtype=torch.int64
        ).view(targets.shape)
        wrong = torch.where(truth > 0, truth - 1, 1)
        ids = torch.where(script < probability * 2**32, truth, wrong)
        ids = torch.where((anchors.cpu() >= 0)[:, None], ids, -1)
        confidences = probability.expand_as(ids).to(torch.float32)
        return ScriptedDrafts(ids.to(anchors.device), confidences.contiguous().to(anchors.device))

    def _acceptance(self, seed: int) -> float:
        return self.acceptance.get(seed, 0.0) if isinstance(self.acceptance, Mapping) else self.acceptance

    def _follow(self, seed: int, position: int) -> list[int]:
        """The N tokens after the one behind `position`; 0 where the output has ended or is not known."""
        length, output = self.outputs.get(seed, (0, ()))
        found = list(output[max(position + 2 - length, 0) :][: self.num_drafts])
        return found + [0] * (self.num_drafts - len(found))

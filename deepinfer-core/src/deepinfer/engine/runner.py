"""Runs step plans on the device: expand, forward, sample, draft, commit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.engine.loader import ServedModel
from deepinfer.ops.metadata import PlanTensors, SlotRecords
from deepinfer.scheduler.plan import StepPlan

__all__ = ["ModelRunner", "PendingStep", "StepResult", "history_length", "pack_plan"]

POISON = 0xFF
"""Every byte of a page or slot that holds nothing: a NaN in all formats."""


@dataclass(frozen=True)
class StepResult:
    """What a step decided, on the host, in the order of its sequences.

    Attributes:
        tokens: int64 [S], sampled ids; -1 where nothing was sampled.
        status: int32 [S], status words of `sample_step`; 0 where nothing was sampled.
    """

    tokens: NDArray[np.int64]
    status: NDArray[np.int32]


@dataclass(frozen=True)
class PendingStep:
    """A launched step whose result has not been read."""

    tokens: Tensor
    status: Tensor

    def read(self) -> StepResult:
        """Wait for the step and copy its result to the host."""
        return StepResult(self.tokens.cpu().numpy(), self.status.cpu().numpy())


def history_length(ngram_size: int, max_drafts: int) -> int:
    """Entries of a slot's id ring: the n-gram window and the rows that may pass an accepted length, in 16s."""
    return -(-(ngram_size - 1 + 2 * (max_drafts + 1)) // 16) * 16


def pack_plan(plan: StepPlan, device: torch.device) -> PlanTensors:
    """Send a plan to the device in one copy."""
    sampling = plan.admitted_sampling
    parts = {
        "slots": plan.slots,
        "row_counts": plan.row_counts,
        "is_prefill": plan.is_prefill,
        "samples": plan.samples,
        "host_tokens": plan.host_tokens,
        "page_slots": plan.page_slots,
        "page_indices": plan.page_indices,
        "page_ids": plan.page_ids,
        "admitted_slots": plan.admitted_slots,
        "admitted_lengths": plan.admitted_lengths,
        "admitted_tokens": plan.admitted_tokens.ravel(),
        "admitted_temperature": sampling.temperature.view(np.int32),
        "admitted_top_p": sampling.top_p.view(np.int32),
        "admitted_top_k": sampling.top_k,
        "admitted_seed": sampling.seed,
        "admitted_completion": sampling.completion,
        "released_slots": plan.released_slots,
    }
    packed = torch.from_numpy(np.concatenate([part.astype(np.int64) for part in parts.values()])).to(device)
    views = dict(zip(parts, packed.split([part.size for part in parts.values()]), strict=True))
    views["is_prefill"] = views["is_prefill"] != 0
    views["samples"] = views["samples"] != 0
    views["admitted_tokens"] = views["admitted_tokens"].view(plan.admitted_tokens.shape)
    for name in ("admitted_temperature", "admitted_top_p"):
        views[name] = views[name].to(torch.int32).view(torch.float32)
    for name in ("admitted_top_k", "admitted_completion"):
        views[name] = views[name].to(torch.int32)
    return PlanTensors(**views)


class ModelRunner:
    """One device's model, caches and slot records.

    Args:
        model: what to run.
        num_pages, num_slots: of the caches, page 0 and slot 0 included.
        max_pages: pages of the longest request.
        drafting: let the model propose `traits.max_drafts` tokens after every sampled one.
        poison_released: fill released pages and slots with NaN bytes before anyone gets them, so that a read of stale
            bytes shows (tests; costs bandwidth).
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        num_pages: int,
        num_slots: int,
        max_pages: int,
        drafting: bool = False,
        poison_released: bool = False,
    ) -> None:
        traits = model.traits
        self.model = model
        self.traits = traits
        self.drafting = drafting
        self.poison_released = poison_released
        num_drafts = traits.max_drafts if drafting else 0
        self.records = SlotRecords.allocate(
            num_slots, max_pages, num_drafts, history_length(traits.ngram_size, traits.max_drafts), model.device
        )
        self.storage = model.allocate_caches(num_pages, num_slots)
        # Bound once: a step looks nothing up.
        self._expand = model.table.expand_plan
        self._sample = model.table.sample_step
        self._commit = model.table.commit_step

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Run a plan up to its sampled tokens without reading anything back."""
        records = self.records
        tensors = pack_plan(plan, self.model.device)
        inputs = self._expand(records, tensors, plan.row_bucket, self.traits.ring_length, self.traits.ngram_size)
        result = self.model.forward(inputs, self.storage)
        sampled = inputs.last_rows >= 0
        slots = inputs.seq_slots.clamp(min=0)
        if plan.samples.any():
            tokens, status = self._sample(
                result.logits,
                records.temperature[slots],
                records.top_k[slots],
                records.top_p[slots],
                records.seed[slots],
                inputs.seq_positions + 1,
                records.completion[slots],
            )
            tokens, status = torch.where(sampled, tokens, -1), torch.where(sampled, status, 0)
        else:
            tokens = torch.full_like(inputs.last_rows, -1)
            status = torch.zeros_like(tokens, dtype=torch.int32)
        drafts = confidences = None
        if self.drafting:
            draft = self.model.draft(tokens, inputs.seq_positions, inputs.seq_slots, self.storage)
            drafts, confidences = draft.ids, draft.confidences
        self._commit(records, inputs, tokens, None, drafts, confidences)
        return PendingStep(tokens, status)

    def released(self, slot: int, pages: NDArray[np.int32]) -> None:
        """Hear of a slot and pages that nobody owns any more."""
        if self.poison_released:
            self.storage.slots[slot] = POISON
            self.storage.pages[torch.from_numpy(pages.astype(np.int64))] = POISON

"""Runs step plans on the device: move, expand, forward, sample, verify, draft, commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.engine.block_copies import BlockCopies
from deepinfer.engine.drafting import DraftSampler
from deepinfer.engine.forward_graphs import ForwardGraphs
from deepinfer.engine.grammars import CUT, MaskGate, Masks
from deepinfer.engine.host_copies import HostCopies
from deepinfer.engine.loader import DraftResult, ServedModel
from deepinfer.engine.sampler import Drawn, LogprobRows, Sampler, fed_tokens
from deepinfer.engine.slot_tables import SlotTables
from deepinfer.engine.transfers import Transfers, arrived
from deepinfer.ops.step import PlanTensors, SlotRecords, StepInputs
from deepinfer.scheduler.plan import StepPlan

if TYPE_CHECKING:
    from deepinfer.backend.runtime import DeviceRuntime

__all__ = ["DeviceStep", "Drafter", "ModelRunner", "StepResult", "history_length", "pack_plan"]

Drafter = Callable[[Tensor, Tensor, Tensor, SlotRecords], "DraftResult"]
"""(anchors [S], positions [S] of the last accepted rows, slots [S], records) -> drafts; -1 where there is none."""


@dataclass(frozen=True)
class StepResult:
    """What a step decided, on the host. R sampled rows lie behind each other, sequence by sequence.

    Attributes:
        tokens: int64 [R], sampled ids; -1 where nothing was sampled.
        status: int32 [R], status words of `sample_step`; 0 where nothing was sampled.
        starts: int64 [S], first sampled row of each sequence.
        sampled: int64 [S], sampled rows that held a token.
        accepted: int64 [S], sampled rows that stand; the last one's token may be unsound (see its status).
        drafts: int64 [S, N], proposed after the last token that stands, for the next step; -1 for none.
        confidences: float32 [S, N], of these drafts.
        logprobs: of the sampled rows that ask for them.
        prompt_logprobs: of the prompt chunks that ask for them.
    """

    tokens: NDArray[np.int64]
    status: NDArray[np.int32]
    starts: NDArray[np.int64]
    sampled: NDArray[np.int64]
    accepted: NDArray[np.int64]
    drafts: NDArray[np.int64]
    confidences: NDArray[np.float32]
    logprobs: LogprobRows | None = None
    prompt_logprobs: tuple[LogprobRows, ...] = ()


@dataclass(frozen=True)
class DeviceStep:
    """A launched step whose result has not been read.

    Attributes:
        arrive: waits until the tensors, which then lie on the host, hold their values.
    """

    tokens: Tensor
    status: Tensor
    starts: Tensor
    sampled: Tensor
    accepted: Tensor
    drafts: Tensor
    confidences: Tensor
    logprobs: LogprobRows | None = None
    prompt_logprobs: tuple[LogprobRows, ...] = ()
    arrive: Callable[[], None] = arrived

    def on_its_way(self, transfers: Transfers) -> DeviceStep:
        """The same step with its result under way to the host, behind what was launched before."""
        fetch = transfers.fetch
        moved = replace(
            self,
            tokens=fetch(self.tokens),
            status=fetch(self.status),
            starts=fetch(self.starts),
            sampled=fetch(self.sampled),
            accepted=fetch(self.accepted),
            drafts=fetch(self.drafts),
            confidences=fetch(self.confidences),
            logprobs=None if self.logprobs is None else self.logprobs.on_their_way(transfers),
            prompt_logprobs=tuple(rows.on_their_way(transfers) for rows in self.prompt_logprobs),
        )
        return replace(moved, arrive=transfers.mark())

    def read(self) -> StepResult:
        """Wait for the step and take its result."""
        self.arrive()
        return StepResult(
            tokens=self.tokens.cpu().numpy(),
            status=self.status.cpu().numpy(),
            starts=self.starts.cpu().numpy(),
            sampled=self.sampled.cpu().numpy(),
            accepted=self.accepted.cpu().numpy(),
            drafts=self.drafts.cpu().numpy(),
            confidences=self.confidences.cpu().numpy(),
            logprobs=None if self.logprobs is None else self.logprobs.read(),
            prompt_logprobs=tuple(rows.read() for rows in self.prompt_logprobs),
        )


def history_length(ngram_size: int, max_drafts: int) -> int:
    """Entries of a slot's id ring: the n-gram window and the rows that may pass an accepted length, in 16s."""
    return -(-(ngram_size - 1 + 2 * (max_drafts + 1)) // 16) * 16


def pack_plan(plan: StepPlan, send: Callable[[NDArray[Any]], Tensor]) -> PlanTensors:
    """Bring a plan to the device in one copy; `send` brings an array."""
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
        "keep_from": plan.keep_from,
    }
    packed = send(np.concatenate([part.astype(np.int64) for part in parts.values()]))
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
    """One device's model, caches and slot records. One thread calls it, in the order of the steps.

    Args:
        model: what to run.
        num_pages, num_slots: of the caches, page 0 and slot 0 included.
        num_snapshots: further slots of the caches, which no request runs in.
        max_pages: pages of the longest request.
        num_drafts: drafts that a record holds; 0: nothing is drafted.
        drafter: proposes tokens instead of the model.
        rejection: drafts are judged by rejection sampling instead of coupled verification.
        poison_released: fill released pages and slots with NaN bytes before anyone gets them, so that a read of stale
            bytes shows (tests; costs bandwidth).
        runtime: of the device: host memory for preempted requests and blocks on their way; plain memory without it.
        graphs: replay forward passes from captured graphs; needs the runtime.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        num_pages: int,
        num_slots: int,
        max_pages: int,
        num_snapshots: int = 0,
        num_drafts: int = 0,
        drafter: Drafter | None = None,
        rejection: bool = False,
        poison_released: bool = False,
        runtime: DeviceRuntime | None = None,
        graphs: bool = False,
    ) -> None:
        traits = model.traits
        self.model = model
        self.traits = traits
        self.num_drafts = num_drafts
        self.drafter = drafter
        self.poison_released = poison_released
        self.records = SlotRecords.allocate(
            num_slots,
            max_pages,
            num_drafts,
            history_length(traits.ngram_size, max(traits.max_drafts, num_drafts)),
            model.device,
        )
        self.storage = model.allocate_caches(num_pages, num_slots + num_snapshots)
        self.transfers = Transfers(model.device, runtime)
        send = self.transfers.send
        pinned = None if runtime is None else runtime.alloc_pinned
        self.host_copies = HostCopies(self.records, self.storage, send, pinned)
        self.blocks = BlockCopies(self.storage, model.table.copy_blocks, send, runtime)
        self.graphs = ForwardGraphs(model, self.storage, runtime) if graphs and runtime is not None else None
        self.moved_step = -1
        """The last step whose moves between device and host were done."""
        self._broken: set[int] = set()
        self.tables = SlotTables(traits.vocab_size, num_slots, self.transfers)
        proposals = None
        if rejection and num_drafts:
            proposals = torch.zeros(num_slots, num_drafts, traits.vocab_size, device=model.device)
        self.sampler = Sampler(model.table, self.tables, proposals)
        self.drafts = DraftSampler(model.table, self.tables, proposals)
        # Bound once: a step looks nothing up.
        self._expand = model.table.expand_plan
        self._verify = model.table.verify_coupled
        self._commit = model.table.commit_step

    @torch.inference_mode()
    def launch(self, plan: StepPlan, masks: MaskGate | None = None) -> DeviceStep:
        """Run a plan up to its committed records without reading anything back.

        With `masks` it waits after the forward pass until they are known.

        If it raises, the sequences of the plan are undefined: later plans that name their slots run them as padding
        until the slots are admitted anew.
        """
        self._broken.difference_update(plan.admitted_slots.tolist(), (move.slot for move in plan.restores))
        try:
            return self._launch(self._without_broken(plan), masks)
        except BaseException:
            self._broken.update(plan.slots.tolist())
            raise

    def _launch(self, plan: StepPlan, masks: MaskGate | None) -> DeviceStep:
        self._move(plan)
        self.tables.admit(plan)
        records = self.records
        tensors = pack_plan(plan, self.transfers.send)
        sampled_rows = int(plan.sample_counts.sum())
        traits = self.traits
        inputs = self._expand(records, tensors, plan.row_bucket, sampled_rows, traits.ring_length, traits.ngram_size)
        inputs.kept_bucket = plan.kept_bucket
        logits, prompt_logprobs = self._forward(plan, inputs)
        taken = None if masks is None else masks.take()
        drawn = self._sample_rows(plan, inputs, logits, taken)
        tokens, status = drawn.tokens, drawn.status
        fed = self._without_cut(fed_tokens(inputs), taken)
        starts, sampled = inputs.sample_starts, inputs.sample_counts
        accepted, last = self._verify(fed, tokens, status, inputs.sample_sequences, starts, sampled)
        self.sampler.count(plan, inputs, tokens, accepted)
        rejected = sampled - accepted
        drafts, confidences = self._draft(plan, inputs, last, inputs.seq_positions - rejected)
        self._commit(records, inputs, last, rejected, drafts, confidences)
        self.blocks.save(plan.snapshot_copies)
        drafts = torch.where((sampled > 0)[:, None], drafts, -1)
        step = DeviceStep(
            tokens, status, starts, sampled, accepted, drafts, confidences, drawn.logprobs, prompt_logprobs
        )
        return step.on_its_way(self.transfers)

    def _forward(self, plan: StepPlan, inputs: StepInputs) -> tuple[Tensor, tuple[LogprobRows, ...]]:
        """Logits of the sampled rows, and the log-probabilities of prompt tokens where they are asked for."""
        prompt_rows = self.sampler.prompt_rows(plan)
        if not prompt_rows.size and self.graphs is not None:
            return self.graphs.forward(inputs), ()
        if not prompt_rows.size:
            return self.model.forward(inputs, self.storage).logits, ()
        sampled = inputs.sample_rows.shape[0]
        more = self.transfers.send(prompt_rows)
        wider = replace(inputs, sample_rows=torch.cat([inputs.sample_rows, more]))
        logits = self.model.forward(wider, self.storage).logits
        return logits[:sampled], self.sampler.prompt_logprobs(plan, logits[sampled:])

    def _sample_rows(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        logits: Tensor,
        masks: Masks | None,
    ) -> Drawn:
        """Draw after each sampled row: tokens [R] and status [R], -1 and 0 for padding."""
        rows = inputs.sample_rows
        if rows.shape[0] == 0:
            return Drawn(torch.full_like(rows, -1), torch.zeros_like(rows, dtype=torch.int32))
        return self.sampler.draw(plan, inputs, logits, self.records, masks)

    def _without_cut(self, fed: Tensor, masks: Masks | None) -> Tensor:
        """The tokens that rows were fed, -1 for those that the host has cut off: these are never accepted."""
        if masks is None or not (masks[1] == CUT).any():
            return fed
        return torch.where(self.tables.send(masks[1] == CUT), -1, fed)

    def _draft(self, plan: StepPlan, inputs: StepInputs, anchors: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Drafts [S, N] and their confidences after the tokens that stand; positions [S] of the rows that drew them."""
        count, slots = self.num_drafts, inputs.seq_slots
        if count == 0:
            return anchors.new_empty(slots.shape[0], 0), torch.empty(slots.shape[0], 0, device=anchors.device)
        if self.drafter is not None:
            draft = self.drafter(anchors, positions, slots, self.records)
            self.drafts.keep(draft, slots)
        else:
            choose = self.drafts.chooser(plan, inputs, positions, self.records)
            draft = self.model.draft(anchors, positions, slots, self.storage, choose)
        return draft.ids[:, :count], draft.confidences[:, :count]

    def _move(self, plan: StepPlan) -> None:
        """Copy preempted requests out and resumed ones in, before anything of the step can touch their places."""
        copies = self.host_copies
        for move in plan.saves:
            copies.save(move)
            self.tables.save(move.key, move.slot)
            self.released(move.slot, move.unowned)
        for move in plan.discards:
            self.released(move.slot, move.unowned)
        if plan.evicted.size:
            self.released(0, plan.evicted)
        for move in plan.restores:
            copies.restore(move)
            self.tables.restore(move.key, move.slot)
        self.blocks.resume(plan.slot_copies)
        for key in plan.dropped:
            copies.drop(key)
            self.tables.drop(key)
        self.moved_step = plan.step

    def _without_broken(self, plan: StepPlan) -> StepPlan:
        """The plan with the sequences of failed steps as padding."""
        if not self._broken:
            return plan
        broken = np.isin(plan.slots, np.fromiter(self._broken, np.int32, len(self._broken)))
        return replace(plan, slots=np.where(broken, -1, plan.slots)) if broken.any() else plan

    def released(self, slot: int, pages: NDArray[np.int32]) -> None:
        """Hear, in the order of the steps, of a slot and pages that nobody owns any more."""
        if self.poison_released:
            self.storage.poison(slot, torch.from_numpy(pages.astype(np.int64)))

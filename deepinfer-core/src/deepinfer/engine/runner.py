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
from deepinfer.engine.forward_graphs import ForwardGraphs
from deepinfer.engine.grammars import MaskGate
from deepinfer.engine.host_copies import HostCopies
from deepinfer.engine.loader import DraftResult, ServedModel
from deepinfer.engine.sampler import Drawn, LogprobRows, Sampler
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
        accepted: int64 [S], sampled rows that stand; the last one's token may be unsound (see its status).
        logprobs: of the sampled rows that ask for them.
        prompt_logprobs: of the prompt chunks that ask for them.
    """

    tokens: NDArray[np.int64]
    status: NDArray[np.int32]
    starts: NDArray[np.int64]
    accepted: NDArray[np.int64]
    logprobs: LogprobRows | None = None
    prompt_logprobs: tuple[LogprobRows, ...] = ()


@dataclass(frozen=True)
class DeviceStep:
    """A launched step whose result has not been read; `wait` lets the host wait until it has arrived there."""

    tokens: Tensor
    status: Tensor
    starts: Tensor
    accepted: Tensor
    logprobs: LogprobRows | None = None
    prompt_logprobs: tuple[LogprobRows, ...] = ()
    wait: Callable[[], None] | None = None

    def sent(self, runtime: DeviceRuntime) -> DeviceStep:
        """The same with its result on the way to the host, so that reading it waits for no later step."""

        def send(values: Tensor) -> Tensor:
            target = runtime.alloc_pinned(values.nbytes).view(values.dtype)
            runtime.copy_async(target, values)
            return target

        arriving: dict[str, Any] = {
            name: send(getattr(self, name)) for name in ("tokens", "status", "starts", "accepted")
        }
        done = runtime.event()
        return replace(self, **arriving, wait=lambda: runtime.wait(done, host=True))

    def read(self) -> StepResult:
        """Wait for the step and copy its result to the host."""
        if self.wait is not None:
            self.wait()
        return StepResult(
            tokens=self.tokens.cpu().numpy(),
            status=self.status.cpu().numpy(),
            starts=self.starts.cpu().numpy(),
            accepted=self.accepted.cpu().numpy(),
            logprobs=None if self.logprobs is None else self.logprobs.read(),
            prompt_logprobs=tuple(rows.read() for rows in self.prompt_logprobs),
        )


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
        "keep_from": plan.keep_from,
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
    """One device's model, caches and slot records. One thread calls it, in the order of the steps.

    Args:
        model: what to run.
        num_pages, num_slots: of the caches, page 0 and slot 0 included.
        num_snapshots: further slots of the caches, which no request runs in.
        max_pages: pages of the longest request.
        num_drafts: drafts that a record holds; 0: nothing is drafted.
        drafter: proposes tokens instead of the model.
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
        self.host_copies = HostCopies(self.records, self.storage, None if runtime is None else runtime.alloc_pinned)
        self.blocks = BlockCopies(self.storage, model.table.copy_blocks, runtime)
        self._sends_to = runtime if graphs else None
        self.graphs = ForwardGraphs(model, self.storage, runtime) if graphs and runtime is not None else None
        self.moved_step = -1
        """The last step whose moves between device and host were done."""
        self._broken: set[int] = set()
        self.sampler = Sampler(model.table, traits.vocab_size, num_slots, model.device)
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
        self.sampler.admit(plan)
        records = self.records
        tensors = pack_plan(plan, self.model.device)
        sampled_rows = int(plan.sample_counts.sum())
        traits = self.traits
        inputs = self._expand(records, tensors, plan.row_bucket, sampled_rows, traits.ring_length, traits.ngram_size)
        inputs.kept_bucket = plan.kept_bucket
        logits, prompt_logprobs = self._forward(plan, inputs)
        drawn = self._sample_rows(plan, inputs, logits, None if masks is None else masks.take())
        tokens, status = drawn.tokens, drawn.status
        fed = inputs.token_ids[inputs.sample_rows.clamp(min=0)]
        accepted, last = self._verify(
            fed, tokens, status, inputs.sample_sequences, inputs.sample_starts, inputs.sample_counts
        )
        self.sampler.count(plan, inputs, tokens, accepted)
        rejected = inputs.sample_counts - accepted
        drafts = confidences = None
        if self.num_drafts:
            draft = self._draft(last, inputs.seq_positions - rejected, inputs.seq_slots)
            drafts, confidences = draft.ids[:, : self.num_drafts], draft.confidences[:, : self.num_drafts]
        self._commit(records, inputs, last, rejected, drafts, confidences)
        self.blocks.save(plan.snapshot_copies)
        step = DeviceStep(tokens, status, inputs.sample_starts, accepted, drawn.logprobs, prompt_logprobs)
        return step if self._sends_to is None else step.sent(self._sends_to)

    def _forward(self, plan: StepPlan, inputs: StepInputs) -> tuple[Tensor, tuple[LogprobRows, ...]]:
        """Logits of the sampled rows, and the log-probabilities of prompt tokens where they are asked for."""
        prompt_rows = self.sampler.prompt_rows(plan)
        if not prompt_rows.size and self.graphs is not None:
            return self.graphs.forward(inputs), ()
        if not prompt_rows.size:
            return self.model.forward(inputs, self.storage).logits, ()
        sampled = inputs.sample_rows.shape[0]
        more = torch.from_numpy(prompt_rows).to(self.model.device, non_blocking=True)
        wider = replace(inputs, sample_rows=torch.cat([inputs.sample_rows, more]))
        logits = self.model.forward(wider, self.storage).logits
        return logits[:sampled], self.sampler.prompt_logprobs(plan, logits[sampled:])

    def _sample_rows(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        logits: Tensor,
        masks: tuple[NDArray[np.int32], NDArray[np.int64]] | None,
    ) -> Drawn:
        """Draw after each sampled row: tokens [R] and status [R], -1 and 0 for padding."""
        rows = inputs.sample_rows
        if rows.shape[0] == 0:
            return Drawn(torch.full_like(rows, -1), torch.zeros_like(rows, dtype=torch.int32))
        return self.sampler.draw(plan, inputs, logits, self.records, masks)

    def _draft(self, anchors: Tensor, positions: Tensor, slots: Tensor) -> DraftResult:
        if self.drafter is not None:
            return self.drafter(anchors, positions, slots, self.records)
        return self.model.draft(anchors, positions, slots, self.storage)

    def _move(self, plan: StepPlan) -> None:
        """Copy preempted requests out and resumed ones in, before anything of the step can touch their places."""
        copies = self.host_copies
        for move in plan.saves:
            copies.save(move)
            self.sampler.save(move.key, move.slot)
            self.released(move.slot, move.unowned)
        if plan.evicted.size:
            self.released(0, plan.evicted)
        for move in plan.restores:
            copies.restore(move)
            self.sampler.restore(move.key, move.slot)
        self.blocks.resume(plan.slot_copies)
        for key in plan.dropped:
            copies.drop(key)
            self.sampler.drop(key)
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

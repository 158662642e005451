"""Continuous batching: which rows run in the next step, and who gives way when pages run out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.cache.pool import PagePool, SlotPool
from deepinfer.cache.reuse import PrefixCache
from deepinfer.errors import ConfigError, InvalidRequest
from deepinfer.scheduler.assembly import StepRows, assemble
from deepinfer.scheduler.config import SchedulerConfig
from deepinfer.scheduler.plan import Changes, Move, StepPlan
from deepinfer.scheduler.policy import DraftPlanner, Policy, PriorityOrder
from deepinfer.scheduler.preemption import Preemption
from deepinfer.scheduler.prefixes import PrefixReuse
from deepinfer.scheduler.request import FinishReason, Request, RequestState
from deepinfer.scheduler.sequences import Sequences

__all__ = ["ScheduledStep", "Scheduler"]


@dataclass(frozen=True)
class ScheduledStep:
    """A plan and the requests behind its sequences, in the same order."""

    plan: StepPlan
    requests: tuple[Request, ...]


class Scheduler:
    """Admits, chunks, preempts and plans; knows bounds of lengths, never a token's value.

    A step takes one row of every decoding sequence and its draft rows first, then prefill chunks, most urgent prompt
    first. The order is that of the policy's `rank`. Without a `planner` every sequence verifies as many drafts as there
    are rows for; with one as many as it says.

    Pages: a request is admitted when a slot and the pages of its whole prompt are free beside a reserve of one page per
    running sequence; those pages are its own until it is through its prompt. Later pages are granted when a step first
    reaches them. When they run out, drafts are left away first; pages that are about to come back are waited for; else
    the least urgent request is preempted and queues with its old place: its pages, slot and record go to the host, to
    resume exactly there, or are given up where `host_bytes` are spent, to run again. A request whose footprint,
    ceil((prompt + max_tokens - 1 + lookahead) / page_size) pages, exceeds the pool is refused, so the most urgent one
    always runs.

    Waiting is bounded: the most urgent running request has a row in every step, and every decoding sequence has unless
    pages have run out; the most urgent prompt gets at least half the rows that max_num_batched_tokens leaves beside one
    row of every other sequence, and no less than one (or its chunk limit); queued requests are bounded by the policy.

    `plan` may be called again before the previous step is complete: lengths advance by all planned rows and draws by
    one a step; `correct` sets them right when accepted counts are known. A sequence is not scheduled beyond max_tokens
    draws, and a finished request keeps pages and slot until the last step that names them is complete.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pages: PagePool,
        slots: SlotPool,
        *,
        policy: Policy | None = None,
        prefix: PrefixCache | None = None,
        planner: DraftPlanner | None = None,
    ) -> None:
        if slots.capacity < config.max_num_seqs:
            raise ConfigError(f"{config.max_num_seqs} exceeds the {slots.capacity} state slots", field="max_num_seqs")
        self.config = config
        self.pages = pages
        self.slots = slots
        self.prefix = prefix
        self.planner = planner
        self.queue: Policy = PriorityOrder() if policy is None else policy
        self.changes = Changes()
        self.sequences = Sequences(config, pages, slots, prefix, self.changes)
        self.reuse = PrefixReuse(prefix, self.sequences, self.changes, resume_slack=config.resume_slack)
        self.preemption = Preemption(config, self.sequences, self.reuse, self.changes)
        self._by_id: dict[str, Request] = {}
        self._prefilling: dict[str, Request] = {}
        self._draining: list[Request] = []
        self._arrivals = 0
        self._scored_left = config.max_scored_rows
        self._next_step = 0
        self._completed = -1

    # ---- requests in and out -------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Requests that wait for a slot and pages."""
        return len(self.queue)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and are not finished."""
        return self.sequences.num_running

    @property
    def num_prefilling(self) -> int:
        """Running requests whose prompt is not through."""
        return len(self._prefilling)

    def has_work(self) -> bool:
        """Whether a request is unfinished or a finished one still waits for its last step."""
        return bool(self._by_id or self._draining)

    def check_fit(self, request_id: str, length: int, max_tokens: int) -> int:
        """Pages of a request that could run if it were alone.

        Raises:
            InvalidRequest: empty prompt, no output token, or longer than the context.
            CapacityError: its pages exceed the whole pool, so it could never run.
        """
        return self.config.check_fit(request_id, length, max_tokens, self.pages.capacity)

    def add(self, request: Request, *, loading: bool = False) -> None:
        """Queue a request.

        Args:
            request: new.
            loading: it waits for its prefix until `ready` is called; others go before it meanwhile.

        Raises:
            InvalidRequest: its id is already in flight; or as `check_fit`.
            CapacityError: as `check_fit`.
        """
        if request.request_id in self._by_id:
            raise InvalidRequest(f"{request.request_id!r} is already in flight", field="request_id")
        request.footprint = self.check_fit(request.request_id, request.num_prompt_tokens, request.max_tokens)
        request.arrival = self._arrivals
        self._arrivals += 1
        self._by_id[request.request_id] = request
        if loading:
            request.state = RequestState.LOADING
        else:
            self.queue.push(request)

    def ready(self, request: Request) -> None:
        """Queue a request that has waited for its prefix, at the place of its arrival."""
        if request.state is RequestState.LOADING:
            request.state = RequestState.QUEUED
            self.queue.push(request)

    def find(self, request_id: str) -> Request | None:
        """The unfinished request of that id."""
        return self._by_id.get(request_id)

    def abort(self, request_id: str) -> Request | None:
        """End a request in whatever state it is; None if it is unknown or already finished."""
        request = self._by_id.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.ABORT)
        return request

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request; its pages and slot come back once no step in flight names them."""
        if request.is_finished:
            return
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.reuse.conclude(request)
        state = request.state
        request.state, request.finish_reason = RequestState.FINISHED, reason
        del self._by_id[request.request_id]
        if state is not RequestState.RUNNING:
            if state is not RequestState.LOADING:
                self.queue.remove(request)
            self.reuse.end(request)
            self.preemption.forget(request)
            return
        self._prefilling.pop(request.request_id, None)
        self.sequences.active[request.slot] = False
        if self.sequences.last_step[request.slot] <= self._completed:
            self.sequences.release(request)
        else:
            self._draining.append(request)

    def complete(self, step: int) -> None:
        """Note that the device has finished every step up to this one."""
        self._completed = max(self._completed, step)
        if self._draining:
            done = [r for r in self._draining if self.sequences.last_step[r.slot] <= self._completed]
            self._draining = [r for r in self._draining if self.sequences.last_step[r.slot] > self._completed]
            for request in done:
                self.sequences.release(request)

    def correct(self, step: ScheduledStep, accepted: NDArray[np.int64]) -> None:
        """Replace the bounds of a planned step by what happened.

        Args:
            step: as planned.
            accepted: int64 [S], sampled rows that stand.
        """
        plan = step.plan
        for index in np.flatnonzero(~plan.is_prefill & (plan.row_counts > 1)).tolist():
            request = step.requests[index]
            rejected = int(plan.row_counts[index] - accepted[index])
            extra = max(int(accepted[index]) - 1, 0)
            if request.parked is not None:
                request.parked.scheduled -= rejected
                request.parked.draws += extra
            elif request.state is RequestState.RUNNING:
                self.sequences.scheduled[request.slot] -= rejected
                self.sequences.draws[request.slot] += extra

    def forget(self, plan: StepPlan) -> None:
        """Drop the host copies of a plan that failed before its moves were done."""
        self.changes.dropped += [move.key for move in (*plan.saves, *plan.restores)] + list(plan.dropped)

    def assert_idle(self) -> None:
        """Verify that nothing is left: no request, no used page, no slot.

        Raises:
            PoolError: pages or slots leaked.
            RuntimeError: requests are left.
        """
        if self.has_work() or self.sequences.active.any():
            raise RuntimeError(f"not idle: {len(self._by_id)} requests, {len(self._draining)} wait for their last step")
        self.pages.assert_idle()
        self.slots.assert_idle()
        if self.prefix is not None:
            self.prefix.assert_idle()

    # ---- planning ------------------------------------------------------------------------------------------------

    def plan(self) -> ScheduledStep | None:
        """Plan the next step; None if no sequence can take a row now."""
        with self.reuse.planning():
            return self._plan()

    def _plan(self) -> ScheduledStep | None:
        config = self.config
        if config.preempt_every and self._next_step % config.preempt_every == config.preempt_every - 1:
            self._preempt_without_need()
        decoding, counts = self._decode_rows()
        self.sequences.grant(decoding, counts)
        budget = config.max_num_batched_tokens - int(counts.sum())
        self._scored_left = config.max_scored_rows
        chunks = self._take_chunks(budget)
        budget -= sum(chunk for _, chunk in chunks)
        admitted, resumed, restores = self._admit(budget, chunks)
        if self.planner is not None:
            entered = [request.slot for request in admitted] + [move.slot for move in restores]
            self.planner.admit(np.array(entered, np.int32))
        if not decoding.size and not chunks and not resumed:
            return None
        rows = self._take_rows(decoding, counts, resumed, chunks)
        decoded, prompts = rows.slots[: rows.first_prefill], [request for request, _ in chunks]
        snapshots = self.reuse.snapshots(self._next_step, decoded, prompts)
        plan = assemble(
            self._next_step,
            rows,
            self.changes,
            config,
            admitted=admitted,
            restores=restores,
            snapshots=snapshots,
        )
        self.changes.clear()
        self.preemption.host.settle(plan)
        self._next_step += 1
        return ScheduledStep(plan, tuple(self.sequences.owner[rows.slots].tolist()))

    def _take_rows(
        self,
        decoding: NDArray[np.int32],
        counts: NDArray[np.int32],
        resumed: list[int],
        chunks: list[tuple[Request, int]],
    ) -> StepRows:
        """Advance the sequences by their rows of this step."""
        sequences = self.sequences
        prefill_slots = np.fromiter((request.slot for request, _ in chunks), np.int32, len(chunks))
        slots = np.concatenate([decoding, np.array(resumed, np.int32), prefill_slots])
        counts = np.concatenate([counts, np.ones(len(resumed), np.int32), [chunk for _, chunk in chunks]])
        counts = counts.astype(np.int32)
        starts = sequences.scheduled[slots]
        sequences.grant(prefill_slots, counts[slots.size - len(chunks) :])
        sequences.scheduled[slots] = starts + counts
        lengths = sequences.prompt_length[slots]
        samples = sequences.scheduled[slots] >= lengths
        sequences.draws[slots] += samples
        sequences.last_step[slots] = self._next_step
        for request, _ in chunks:
            if sequences.scheduled[request.slot] >= sequences.prompt_length[request.slot]:
                del self._prefilling[request.request_id]
        return StepRows(slots, counts, starts, samples, chunks)

    def _decode_rows(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Decoding sequences and their rows, as far as pages last; preempts where they do not."""
        decoding = self.sequences.decoding()
        limits = self._draft_limits(decoding)
        available = self.sequences.num_available_pages
        if self.sequences.missing(decoding, 1 + limits).sum() <= available:
            return decoding, 1 + self._drafts(decoding, limits)
        counts = np.ones(decoding.size, np.int32)
        while (missing := self.sequences.missing(decoding, counts)).sum() > available:
            if self._pages_return() or not self.preempt_worst():
                # The least urgent ones that need a page sit this step out.
                owners = self.sequences.owner[decoding].tolist()
                order = sorted(range(decoding.size), key=lambda index: self.queue.rank(owners[index]))
                fits = np.cumsum(missing[order]) <= available
                kept = np.sort(np.array(order, np.int64)[fits | (missing[order] == 0)])
                return decoding[kept], counts[kept]
            decoding = self.sequences.decoding()
            counts = np.ones(decoding.size, np.int32)
            available = self.sequences.num_available_pages
        return decoding, counts

    def _draft_limits(self, decoding: NDArray[np.int32]) -> NDArray[np.int32]:
        """Most drafts of each decoding sequence: as far as tokens are wanted."""
        sequences = self.sequences
        wanted = sequences.max_draws[decoding] - sequences.draws[decoding] - 1
        return np.minimum(wanted, self.config.num_drafts)

    def _drafts(self, decoding: NDArray[np.int32], limits: NDArray[np.int32]) -> NDArray[np.int32]:
        """Drafts of each decoding sequence, as far as rows are left beside prompts."""
        if not limits.any():
            return limits
        spare = self.config.max_num_batched_tokens - decoding.size
        if self._prefilling or len(self.queue):
            spare //= 2
        if self.planner is None:
            return np.minimum(limits, spare // decoding.size).astype(np.int32)
        left = self.config.max_num_batched_tokens - decoding.size - spare
        return self.planner.lengths(
            decoding,
            limits,
            other_rows=min(self.sequences.num_prompt_rows, left),
            max_rows=decoding.size + spare,
        )

    def _pages_return(self) -> bool:
        """Whether a step in flight ends a request, so that pages come back without preemption."""
        return bool(self._draining) or self.sequences.any_ending(self._completed)

    def preempt_worst(self) -> bool:
        """Preempt the least urgent request that has still something to do; False if there is none."""
        candidates = self.sequences.unfinished()
        if not candidates:
            return False
        self._preempt(max(candidates, key=self.queue.rank))
        return True

    def _preempt_without_need(self) -> None:
        """Preempt for a test. Who would run again must have drawn since it came back, or it might never end."""
        draws, keeps = self.sequences.draws, self.preemption.keeps
        candidates = [
            item for item in self.sequences.unfinished() if not item.num_preemptions or draws[item.slot] or keeps(item)
        ]
        if candidates:
            self._preempt(max(candidates, key=self.queue.rank))

    def _preempt(self, request: Request) -> None:
        self.preemption.take_place(request)
        self._prefilling.pop(request.request_id, None)
        self.queue.push(request)

    def _take_chunks(self, budget: int) -> list[tuple[Request, int]]:
        """Chunks of the prompts in progress, most urgent first; their pages are promised."""
        chunks: list[tuple[Request, int]] = []
        for request in sorted(self._prefilling.values(), key=self.queue.rank):
            if budget == 0:
                break
            chunk = self._chunk(request, budget)
            chunks.append((request, chunk))
            budget -= chunk
        return chunks

    def _admit(self, budget: int, chunks: list[tuple[Request, int]]) -> tuple[list[Request], list[int], list[Move]]:
        """Admit and resume from the head of the queue while slot, pages and budget last; append prompts' chunks.

        Returns:
            New requests; slots of resumed sequences that decode; what is to be copied back.
        """
        admitted: list[Request] = []
        resumed: list[int] = []
        restores: list[Move] = []
        sequences = self.sequences
        while budget > 0 and sequences.num_running < self.config.max_num_seqs and self.slots.num_free:
            request = self.queue.peek()
            if request is None or request.last_step > self._completed:
                break
            if self.preemption.entry_pages(request) + sequences.num_running > sequences.num_available_pages:
                break
            self.queue.remove(request)
            if request.parked is None:
                admitted.append(request)
                self.preemption.enter(request)
            else:
                restores.append(self.preemption.resume(request, request.parked))
            if self.sequences.scheduled[request.slot] < self.sequences.prompt_length[request.slot]:
                self._prefilling[request.request_id] = request
                chunk = self._chunk(request, budget)
                chunks.append((request, chunk))
                budget -= chunk
            else:
                resumed.append(request.slot)
                self.sequences.grant(np.array([request.slot], np.int32), np.ones(1, np.int32))
                budget -= 1
        return admitted, resumed, restores

    def _chunk(self, request: Request, budget: int) -> int:
        start = int(self.sequences.scheduled[request.slot])
        left = int(self.sequences.prompt_length[request.slot]) - start
        limit = self.config.max_prefill_chunk
        rows = min(left, budget) if limit is None else min(left, budget, limit)
        if request.scored and not request.replayed.size:
            rows = min(rows, max(1, self._scored_left))
            self._scored_left -= rows
        return self.reuse.cut(request, start, rows)

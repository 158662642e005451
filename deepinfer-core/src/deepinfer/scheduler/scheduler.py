"""Continuous batching: which rows run in the next step, and who owns which page and slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.cache.pool import PagePool, SlotPool
from deepinfer.cache.reuse import PrefixCache
from deepinfer.errors import CapacityError, ConfigError, InvalidRequest
from deepinfer.scheduler.plan import Move, SamplingRows, StepPlan
from deepinfer.scheduler.policy import Policy, PriorityOrder
from deepinfer.scheduler.request import FinishReason, Parked, Request, RequestState

__all__ = ["ScheduledStep", "Scheduler", "SchedulerConfig", "exact_rows"]


def exact_rows(rows: int) -> int:
    """The row bucket of a backend that needs no padding."""
    return rows


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and of a request.

    Attributes:
        max_num_seqs: sequences that may run at once (= state slots).
        max_num_batched_tokens: rows of one step; at least `max_num_seqs`, so that every running sequence can decode
            and, since a prompt in progress holds a slot itself, at least one row is left for prefill.
        max_model_len: prompt and output tokens of one request.
        page_size: tokens of one page.
        max_prefill_chunk: longest chunk of one prompt in a step; None: as long as the budget.
        max_scored_rows: prompt rows of a step whose logits are wanted; each such prompt gets at least one more.
        num_drafts: draft rows of a decoding sequence, at most.
        lookahead: positions past a request's last token that rows in flight may write: `num_drafts` if a step is
            planned before the previous one is read, else 0.
        preempt_every: preempt a request in every so many steps although nothing requires it (tests); 0: never.
        history_width: tokens before a resumed position that an admission brings along.
        keep_tokens: last tokens of a prompt that bounded replay sends through the consumer half; 0: no replay.
        row_bucket: padded row count for a number of rows.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    max_prefill_chunk: int | None = None
    max_scored_rows: int = 512
    num_drafts: int = 0
    lookahead: int = 0
    preempt_every: int = 0
    history_width: int = 0
    keep_tokens: int = 0
    row_bucket: Callable[[int], int] = exact_rows

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{getattr(self, name)} is not positive", field=name)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"{self.max_num_batched_tokens} rows a step cannot hold one row of each of max_num_seqs="
                f"{self.max_num_seqs} sequences; raise it or lower max_num_seqs",
                field="max_num_batched_tokens",
            )
        if self.max_prefill_chunk is not None and self.max_prefill_chunk < 1:
            raise ConfigError(f"{self.max_prefill_chunk} is not positive", field="max_prefill_chunk")

    @property
    def max_pages(self) -> int:
        """Pages that the longest request can need."""
        return -(-(self.max_model_len + self.lookahead) // self.page_size)


@dataclass(frozen=True)
class ScheduledStep:
    """A plan and the requests behind its sequences, in the same order."""

    plan: StepPlan
    requests: tuple[Request, ...]


class Scheduler:
    """Admits, chunks, preempts and plans; knows bounds of lengths, never a token's value.

    A step takes one row of every decoding sequence and its draft rows first, then prefill chunks, most urgent prompt
    first. Order is that of `Request.order_key`.

    Pages: a request is admitted when a slot and the pages of its whole prompt are free beside a reserve of one page per
    running sequence; those pages are its own until it is through its prompt. Later pages are granted when a step first
    reaches them. When they run out, drafts are left away first; pages that are about to come back are waited for; else
    the least urgent request is preempted: its pages, slot and record go to the host and it queues with its old place,
    to resume exactly there. A request whose footprint, ceil((prompt + max_tokens - 1 + lookahead) / page_size) pages,
    exceeds the pool is refused, so the most urgent one always runs.

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
    ) -> None:
        if slots.capacity < config.max_num_seqs:
            raise ConfigError(f"{config.max_num_seqs} exceeds the {slots.capacity} state slots", field="max_num_seqs")
        self.config = config
        self.pages = pages
        self.slots = slots
        self.prefix = prefix
        self.queue: Policy = PriorityOrder() if policy is None else policy
        self.on_release: Callable[[int, NDArray[np.int32]], None] | None = None
        """Told of every slot and the pages that come back with it."""
        self._by_id: dict[str, Request] = {}
        self._prefilling: dict[str, Request] = {}
        self._draining: list[Request] = []
        self._released: list[int] = []
        self._saves: list[Move] = []
        self._dropped: list[int] = []
        self._slot_copies: list[tuple[int, int]] = []
        self._evicted: list[NDArray[np.int32]] = []
        self._planning = False
        if prefix is not None:
            prefix.on_evict = self._note_evicted
        self._grants: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]] = []
        self.num_preemptions = 0
        """Times that a request was preempted."""
        self._arrivals = 0
        self._scored_left = config.max_scored_rows
        self._next_step = 0
        self._completed = -1
        size = slots.num_slots
        self._active = np.zeros(size, np.bool_)
        self._single_row = np.zeros(size, np.bool_)
        self._prompt_length = np.zeros(size, np.int32)
        self._max_draws = np.zeros(size, np.int32)
        self._scheduled = np.zeros(size, np.int32)
        self._draws = np.zeros(size, np.int32)
        self._granted = np.zeros(size, np.int32)
        self._last_step = np.full(size, -1, np.int64)
        self._page_table = np.full((size, config.max_pages), -1, np.int32)
        self._owner = np.full(size, None, object)

    # ---- requests in and out -------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Requests that wait for a slot and pages."""
        return len(self.queue)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and are not finished."""
        return int(self._active.sum())

    @property
    def num_promised_pages(self) -> int:
        """Pages not granted yet that running prompts own for their remaining tokens."""
        need = -(-self._prompt_length // self.config.page_size) - self._granted
        return int(need[self._active & (self._scheduled < self._prompt_length)].clip(min=0).sum())

    @property
    def num_available_pages(self) -> int:
        """Pages that can be granted to anyone: free ones, and cached ones, which make room when needed."""
        return self.pages.num_free + self.pages.num_cached - self.num_promised_pages

    def has_work(self) -> bool:
        """Whether a request is unfinished or a finished one still waits for its last step."""
        return bool(self._by_id or self._draining)

    def footprint(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Pages that a request can need: the last sampled token is never forwarded."""
        positions = num_prompt_tokens + max_tokens - 1 + self.config.lookahead
        return -(-positions // self.config.page_size)

    def check_fit(self, request_id: str, length: int, max_tokens: int) -> int:
        """Pages of a request that could run if it were alone.

        Raises:
            InvalidRequest: empty prompt, no output token, or longer than the context.
            CapacityError: its pages exceed the whole pool, so it could never run.
        """
        limit = self.config.max_model_len
        if length < 1:
            raise InvalidRequest("the prompt is empty; give at least one token", field="prompt")
        if max_tokens < 1:
            raise InvalidRequest(f"{max_tokens} is not at least 1", field="max_tokens")
        if length + max_tokens > limit:
            raise InvalidRequest(
                f"{length} prompt tokens and max_tokens={max_tokens} exceed the context of {limit} tokens",
                field="prompt",
            )
        footprint = self.footprint(length, max_tokens)
        if footprint > self.pages.capacity:
            raise CapacityError(
                f"request {request_id!r} can need {footprint} pages of {self.config.page_size} tokens "
                f"({length} prompt tokens, max_tokens={max_tokens}), the pool has {self.pages.capacity}; lower "
                "max_tokens, shorten the prompt or give the engine more pages"
            )
        return footprint

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
        state = request.state
        request.state, request.finish_reason = RequestState.FINISHED, reason
        del self._by_id[request.request_id]
        if state is not RequestState.RUNNING:
            if state is not RequestState.LOADING:
                self.queue.remove(request)
            self._end_chain(request)
            if state is RequestState.PREEMPTED:
                self._dropped.append(request.arrival)
                request.parked = None
            return
        self._prefilling.pop(request.request_id, None)
        self._active[request.slot] = False
        if self._last_step[request.slot] <= self._completed:
            self._release(request)
        else:
            self._draining.append(request)

    def complete(self, step: int) -> None:
        """Note that the device has finished every step up to this one."""
        self._completed = max(self._completed, step)
        if self._draining:
            done = [r for r in self._draining if self._last_step[r.slot] <= self._completed]
            self._draining = [r for r in self._draining if self._last_step[r.slot] > self._completed]
            for request in done:
                self._release(request)

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
                self._scheduled[request.slot] -= rejected
                self._draws[request.slot] += extra

    def forget(self, plan: StepPlan) -> None:
        """Drop the host copies of a plan that failed before its moves were done."""
        self._dropped += [move.key for move in (*plan.saves, *plan.restores)] + list(plan.dropped)

    def assert_idle(self) -> None:
        """Verify that nothing is left: no request, no used page, no slot.

        Raises:
            PoolError: pages or slots leaked.
            RuntimeError: requests are left.
        """
        if self.has_work() or self._active.any():
            raise RuntimeError(f"not idle: {len(self._by_id)} requests, {len(self._draining)} wait for their last step")
        self.pages.assert_idle()
        self.slots.assert_idle()
        if self.prefix is not None:
            self.prefix.assert_idle()

    # ---- planning ------------------------------------------------------------------------------------------------

    def plan(self) -> ScheduledStep | None:
        """Plan the next step; None if no sequence can take a row now."""
        self._planning = True
        try:
            return self._plan()
        finally:
            self._planning = False

    def _plan(self) -> ScheduledStep | None:
        config = self.config
        if config.preempt_every and self._next_step % config.preempt_every == config.preempt_every - 1:
            self._preempt_worst()
        decoding, counts = self._decode_rows()
        self._grant(decoding, counts)
        budget = config.max_num_batched_tokens - int(counts.sum())
        self._scored_left = config.max_scored_rows
        chunks = self._take_chunks(budget)
        budget -= sum(chunk for _, chunk in chunks)
        admitted, resumed, restores = self._admit(budget, chunks)
        if not decoding.size and not chunks and not resumed:
            return None
        prefill_slots = np.fromiter((request.slot for request, _ in chunks), np.int32, len(chunks))
        slots = np.concatenate([decoding, np.array(resumed, np.int32), prefill_slots])
        first_prefill = slots.size - len(chunks)
        counts = np.concatenate([counts, np.ones(len(resumed), np.int32), [chunk for _, chunk in chunks]])
        counts = counts.astype(np.int32)
        starts = self._scheduled[slots]
        tokens = [
            request.prompt[start : start + chunk]
            for (request, chunk), start in zip(chunks, starts[first_prefill:].tolist(), strict=True)
        ]
        self._grant(prefill_slots, counts[first_prefill:])
        self._scheduled[slots] = starts + counts
        samples = self._scheduled[slots] >= self._prompt_length[slots]
        self._draws[slots] += samples
        self._last_step[slots] = self._next_step
        for request, _ in chunks:
            if self._scheduled[request.slot] >= self._prompt_length[request.slot]:
                del self._prefilling[request.request_id]
        back = {move.slot for move in restores}
        snapshots = self._snapshots([request for request, _ in chunks])
        granted = [np.concatenate(part) for part in zip(*self._grants, strict=True)] or [np.empty(0, np.int32)] * 3
        keep_from, kept_bucket = self._kept(slots, starts, counts, first_prefill)
        plan = StepPlan(
            step=self._next_step,
            keep_from=keep_from,
            kept_bucket=kept_bucket,
            slots=slots,
            row_counts=counts,
            is_prefill=np.arange(slots.size) >= first_prefill,
            host_tokens=np.concatenate(tokens) if tokens else np.empty(0, np.int64),
            samples=samples,
            row_bucket=config.row_bucket(int(counts.sum())),
            page_slots=granted[0],
            page_indices=granted[1],
            page_ids=granted[2],
            admitted_slots=np.array([request.slot for request in admitted], np.int32),
            admitted_lengths=np.array([request.num_cached_tokens for request in admitted], np.int32),
            admitted_tokens=_tokens_before(admitted, config.history_width),
            admitted_sampling=_sampling_rows(admitted),
            released_slots=np.array([slot for slot in self._released if slot not in back], np.int32),
            saves=tuple(self._saves),
            restores=tuple(restores),
            dropped=tuple(self._dropped),
            evicted=np.concatenate(self._evicted) if self._evicted else np.empty(0, np.int32),
            slot_copies=np.array(self._slot_copies, np.int32).reshape(-1, 2),
            snapshot_copies=np.array(snapshots, np.int32).reshape(-1, 2),
        )
        self._released, self._saves, self._dropped, self._grants = [], [], [], []
        self._slot_copies, self._evicted = [], []
        self._next_step += 1
        return ScheduledStep(plan, tuple(self._owner[slots].tolist()))

    def _kept(
        self, slots: NDArray[np.int32], starts: NDArray[np.int32], counts: NDArray[np.int32], first_prefill: int
    ) -> tuple[NDArray[np.int32], int]:
        """Where each prompt enters the consumer half, defined by its whole length alone, and the rows that do."""
        if not self.config.keep_tokens:
            return np.empty(0, np.int32), 0
        keep_from = np.maximum(self._prompt_length[slots] - self.config.keep_tokens, 0).astype(np.int32)
        keep_from[:first_prefill] = 0
        kept = np.clip(starts + counts - keep_from, 0, counts)
        return keep_from, self.config.row_bucket(max(int(kept.sum()), 1))

    def _decode_rows(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Decoding sequences and their rows, as far as pages last; preempts where they do not."""
        decoding = self._decoding()
        counts = self._with_drafts(decoding)
        available = self.num_available_pages
        if self._missing(decoding, counts).sum() <= available:
            return decoding, counts
        counts = np.ones(decoding.size, np.int32)
        while (missing := self._missing(decoding, counts)).sum() > available:
            if self._pages_return() or not self._preempt_worst():
                # The least urgent ones that need a page sit this step out.
                owners = self._owner[decoding].tolist()
                order = sorted(range(decoding.size), key=lambda index: owners[index].order_key)
                fits = np.cumsum(missing[order]) <= available
                kept = np.sort(np.array(order, np.int64)[fits | (missing[order] == 0)])
                return decoding[kept], counts[kept]
            decoding = self._decoding()
            counts = np.ones(decoding.size, np.int32)
            available = self.num_available_pages
        return decoding, counts

    def _decoding(self) -> NDArray[np.int32]:
        """Slots of the sequences that are through their prompt and may draw again."""
        ready = self._active & (self._scheduled >= self._prompt_length) & (self._draws < self._max_draws)
        return np.flatnonzero(ready).astype(np.int32)

    def _with_drafts(self, decoding: NDArray[np.int32]) -> NDArray[np.int32]:
        """Rows of each decoding sequence: one, and drafts as far as tokens are wanted and rows are left."""
        if not self.config.num_drafts or not decoding.size:
            return np.ones(decoding.size, np.int32)
        spare = self.config.max_num_batched_tokens - decoding.size
        if self._prefilling or len(self.queue):
            spare //= 2
        most = min(self.config.num_drafts, spare // decoding.size)
        wanted = np.where(self._single_row[decoding], 1, 1 + most).astype(np.int32)
        return np.minimum(wanted, self._max_draws[decoding] - self._draws[decoding])

    def _missing(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.int32]:
        """Pages that each sequence lacks for its next rows."""
        needed = -(-(self._scheduled[slots] + counts) // self.config.page_size)
        return np.maximum(needed - self._granted[slots], 0)

    def _pages_return(self) -> bool:
        """Whether a step in flight ends a request, so that pages come back without preemption."""
        ending = self._active & (self._draws >= self._max_draws) & (self._last_step > self._completed)
        return bool(self._draining) or bool(ending.any())

    def _preempt_worst(self) -> bool:
        """Preempt the least urgent request that has still something to do; False if there is none."""
        candidates = np.flatnonzero(self._active & (self._draws < self._max_draws))
        if not candidates.size:
            return False
        self._preempt(max(self._owner[candidates].tolist(), key=lambda request: request.order_key))
        return True

    def _preempt(self, request: Request) -> None:
        """Take pages and slot of a request; the next plan copies them to the host before anyone can write them."""
        slot = request.slot
        granted = int(self._granted[slot])
        request.parked = Parked(int(self._scheduled[slot]), int(self._draws[slot]), granted)
        pages = self._page_table[slot, :granted].copy()
        self._saves.append(Move(request.arrival, slot, pages, self._vacate(request)))
        self._prefilling.pop(request.request_id, None)
        self._active[slot] = False
        request.state = RequestState.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.queue.push(request)

    def _take_chunks(self, budget: int) -> list[tuple[Request, int]]:
        """Chunks of the prompts in progress, most urgent first; their pages are promised."""
        chunks: list[tuple[Request, int]] = []
        for request in sorted(self._prefilling.values(), key=lambda item: item.order_key):
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
        while budget > 0 and self.num_running < self.config.max_num_seqs and self.slots.num_free:
            request = self.queue.peek()
            if request is None or self._entry_pages(request) + self.num_running > self.num_available_pages:
                break
            self.queue.remove(request)
            if request.parked is None:
                admitted.append(request)
                self._enter(request)
                self._find_prefix(request)
            else:
                restores.append(self._resume(request))
            if self._scheduled[request.slot] < self._prompt_length[request.slot]:
                self._prefilling[request.request_id] = request
                chunk = self._chunk(request, budget)
                chunks.append((request, chunk))
                budget -= chunk
            else:
                resumed.append(request.slot)
                self._grant(np.array([request.slot], np.int32), np.ones(1, np.int32))
                budget -= 1
        return admitted, resumed, restores

    def _entry_pages(self, request: Request) -> int:
        """Pages that must be free for a request to start or resume."""
        parked = request.parked or Parked(0, 0, 0)
        positions = max(request.num_prompt_tokens, parked.scheduled + 1)
        return max(parked.granted, -(-positions // self.config.page_size))

    def _enter(self, request: Request) -> None:
        slot = request.slot = self.slots.allocate()
        request.state = RequestState.RUNNING
        self._owner[slot] = request
        self._active[slot] = True
        self._single_row[slot] = request.single_row
        self._prompt_length[slot] = request.num_prompt_tokens
        self._max_draws[slot] = request.max_tokens
        self._scheduled[slot] = self._draws[slot] = self._granted[slot] = 0
        self._last_step[slot] = -1

    def _resume(self, request: Request) -> Move:
        """Give a preempted request a slot and as many pages as it had."""
        parked = request.parked
        if parked is None:
            raise RuntimeError(f"request {request.request_id!r} is not preempted")
        self._enter(request)
        request.parked = None
        slot = request.slot
        pages = self._extend(np.array([slot], np.int32), np.array([parked.granted], np.int32))
        self._scheduled[slot], self._draws[slot] = parked.scheduled, parked.draws
        return Move(request.arrival, slot, pages)

    def _chunk(self, request: Request, budget: int) -> int:
        start = int(self._scheduled[request.slot])
        left = int(self._prompt_length[request.slot]) - start
        limit = self.config.max_prefill_chunk
        rows = min(left, budget) if limit is None else min(left, budget, limit)
        if request.scored:
            rows = min(rows, max(1, self._scored_left))
            self._scored_left -= rows
        if self.prefix is None or request.chain is None:
            return rows
        return self.prefix.cut(request.chain, start, rows)

    # ---- reuse of prefixes ---------------------------------------------------------------------------------------

    def advance(self, request: Request, rows: int) -> bool:
        """Note rows of a request that stand, as a good step told; whether they complete something to `publish`.

        Args:
            request: that ran; it may be preempted by now.
            rows: prompt rows, or accepted rows.
        """
        request.num_forwarded += rows
        chain = request.chain
        if chain is None or request.slot < 0:
            return False
        return bool(chain.pending) or request.num_forwarded // self.config.page_size > len(chain.keys)

    def publish(self, request: Request, output: Sequence[int]) -> None:
        """Let others reuse the pages that a request has completed.

        Args:
            request: for which `advance` said so.
            output: its generated tokens, at least those that were forwarded.
        """
        if self.prefix is not None and request.chain is not None:
            length = min(request.num_forwarded, request.num_prompt_tokens + len(output))
            row = self._page_table[request.slot, : self._granted[request.slot]]
            self.prefix.publish(request.chain, length, output, row)

    def withdraw(self, request: Request) -> None:
        """Make what a request left in the cache unknown: its numbers are not sound."""
        if self.prefix is not None and request.chain is not None:
            self.prefix.forget(request.chain)

    def _find_prefix(self, request: Request) -> None:
        """Let a prompt begin at the deepest place that the cache knows."""
        if self.prefix is None:
            return
        chain = request.chain = self.prefix.begin(request.prompt, reuse=request.reuse_prefix)
        count, slot = chain.pages.size, request.slot
        request.num_cached_tokens = request.num_forwarded = count * self.config.page_size
        if count:
            self._page_table[slot, :count] = chain.pages
            self._granted[slot] = count
            self._scheduled[slot] = request.num_cached_tokens
            self._grants.append((np.full(count, slot, np.int32), np.arange(count, dtype=np.int32), chain.pages))
            self._slot_copies.append((chain.restore, slot))

    def _snapshots(self, requests: list[Request]) -> list[tuple[int, int]]:
        """(slot, snapshot) of the prompts whose chunks end where a snapshot is wanted."""
        if self.prefix is None:
            return []
        copies = []
        for request in requests:
            if request.chain is not None:
                snapshot = self.prefix.save(request.chain, int(self._scheduled[request.slot]))
                if snapshot >= 0:
                    copies.append((request.slot, snapshot))
        return copies

    def _note_evicted(self, pages: NDArray[np.int32]) -> None:
        """Pages of a request that the same plan preempts may be among them: its saves must come first."""
        if self._planning:
            self._evicted.append(pages)
        elif self.on_release is not None:
            self.on_release(0, pages)

    def _end_chain(self, request: Request) -> None:
        if self.prefix is not None and request.chain is not None:
            self.prefix.end(request.chain)

    def _grant(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Give each sequence the pages that its next rows newly reach."""
        missing = self._missing(slots, counts)
        if missing.any():
            self._extend(slots, missing)

    def _extend(self, slots: NDArray[np.int32], missing: NDArray[np.int32]) -> NDArray[np.int32]:
        """Grant so many further pages to each sequence and note them for the plan; their ids."""
        total = int(missing.sum())
        ids = self.pages.allocate(total) if self.prefix is None else self.prefix.allocate(total)
        owners = np.repeat(slots, missing)
        first = np.repeat(np.cumsum(missing) - missing, missing)
        indices = (np.repeat(self._granted[slots], missing) + np.arange(ids.size) - first).astype(np.int32)
        self._page_table[owners, indices] = ids
        self._granted[slots] += missing
        self._grants.append((owners, indices, ids))
        return ids

    def _release(self, request: Request) -> None:
        slot = request.slot
        self._end_chain(request)
        pages = self._vacate(request)
        if self.on_release is not None:
            self.on_release(slot, pages)

    def _vacate(self, request: Request) -> NDArray[np.int32]:
        """Take a request's slot and pages; the pages that nobody owns any more."""
        slot = request.slot
        granted = int(self._granted[slot])
        pages = self._page_table[slot, :granted]
        unowned = self.pages.free(pages) if self.prefix is None else self.prefix.release(pages)
        self._page_table[slot, :granted] = -1
        self._granted[slot] = 0
        self._owner[slot] = None
        self.slots.free(slot)
        self._released.append(slot)
        request.slot = -1
        return unowned


def _tokens_before(requests: list[Request], width: int) -> NDArray[np.int64]:
    """The last tokens before the place where each prompt begins to run: [requests, width], -1 before the start."""
    tokens = np.full((len(requests), width), -1, np.int64)
    for row, request in zip(tokens, requests, strict=True):
        count = min(width, request.num_cached_tokens)
        row[width - count :] = request.prompt[request.num_cached_tokens - count : request.num_cached_tokens]
    return tokens


def _sampling_rows(requests: list[Request]) -> SamplingRows:
    rows = [request.sampling for request in requests]
    return SamplingRows(
        temperature=np.array([row.temperature for row in rows], np.float32),
        top_k=np.array([row.top_k for row in rows], np.int32),
        top_p=np.array([row.top_p for row in rows], np.float32),
        seed=np.array([row.seed for row in rows], np.uint64).view(np.int64),
        completion=np.array([row.completion for row in rows], np.int32),
        views=tuple(row.view for row in rows),
    )

"""Continuous batching: which rows run in the next step, and who owns which page and slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.cache.pool import PagePool, SlotPool
from deepinfer.errors import CapacityError, ConfigError, InvalidRequest
from deepinfer.scheduler.plan import SamplingRows, StepPlan
from deepinfer.scheduler.policy import FirstComeFirstServed, Policy
from deepinfer.scheduler.request import FinishReason, Request, RequestState

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
        lookahead: positions past the last known token that a step may write (drafts and rows in flight).
        history_width: tokens before a resumed position that an admission brings along.
        row_bucket: padded row count for a number of rows.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    max_prefill_chunk: int | None = None
    lookahead: int = 0
    history_width: int = 0
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
    """Admits, chunks and plans; knows lengths and draws in flight, never a token's value.

    A step takes one row of every decoding sequence first and fills the rest of its budget with prefill chunks, oldest
    prompt first. A request is admitted when a slot and its full footprint, ceil((prompt + max_tokens - 1 + lookahead) /
    page_size) pages, are free; pages are reserved then and granted when a step first writes them, so a running request
    never runs out of pages and nothing is preempted.

    Waiting is bounded: a decoding sequence runs in every step; the oldest unfinished prompt gets at least
    max_num_batched_tokens - (max_num_seqs - 1) rows of every step (or its chunk limit); a queued request waits only for
    those that arrived before it.

    `plan` may be called again before the previous step is complete: lengths advance at planning, a sequence is not
    scheduled beyond max_tokens draws, and a finished request keeps pages and slot until the last step that names them
    is complete.
    """

    def __init__(
        self, config: SchedulerConfig, pages: PagePool, slots: SlotPool, *, policy: Policy | None = None
    ) -> None:
        if slots.capacity < config.max_num_seqs:
            raise ConfigError(f"{config.max_num_seqs} exceeds the {slots.capacity} state slots", field="max_num_seqs")
        self.config = config
        self.pages = pages
        self.slots = slots
        self.queue: Policy = FirstComeFirstServed() if policy is None else policy
        self.on_release: Callable[[int, NDArray[np.int32]], None] | None = None
        """Told of every slot and the pages that come back with it."""
        self._by_id: dict[str, Request] = {}
        self._prefilling: dict[str, Request] = {}
        self._draining: list[Request] = []
        self._released: list[int] = []
        self._reserved = 0
        self._arrivals = 0
        self._next_step = 0
        self._completed = -1
        size = slots.num_slots
        self._active = np.zeros(size, np.bool_)
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
    def num_reserved_pages(self) -> int:
        """Pages promised to running requests, granted or not."""
        return self._reserved

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

    def add(self, request: Request) -> None:
        """Queue a request.

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
        was_queued = request.state is RequestState.QUEUED
        request.state, request.finish_reason = RequestState.FINISHED, reason
        del self._by_id[request.request_id]
        if was_queued:
            self.queue.remove(request)
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

    def assert_idle(self) -> None:
        """Verify that nothing is left: no request, no reserved or used page, no slot.

        Raises:
            PoolError: pages or slots leaked.
            RuntimeError: requests or reservations are left.
        """
        if self.has_work() or self._reserved or self._active.any():
            raise RuntimeError(f"not idle: {len(self._by_id)} requests, {self._reserved} pages reserved")
        self.pages.assert_idle()
        self.slots.assert_idle()

    # ---- planning ------------------------------------------------------------------------------------------------

    def plan(self) -> ScheduledStep | None:
        """Plan the next step; None if no sequence can take a row now."""
        decoding = np.flatnonzero(
            self._active & (self._scheduled >= self._prompt_length) & (self._draws < self._max_draws)
        ).astype(np.int32)
        budget = self.config.max_num_batched_tokens - decoding.size
        chunks = self._take_chunks(budget)
        admitted = self._admit(budget - sum(chunk for _, chunk in chunks), chunks)
        if not decoding.size and not chunks:
            return None
        prefill_slots = np.fromiter((request.slot for request, _ in chunks), np.int32, len(chunks))
        slots = np.concatenate([decoding, prefill_slots])
        counts = np.ones(slots.size, np.int32)
        counts[decoding.size :] = [chunk for _, chunk in chunks]
        starts = self._scheduled[slots]
        tokens = [
            request.prompt[start : start + chunk]
            for (request, chunk), start in zip(chunks, starts[decoding.size :].tolist(), strict=True)
        ]
        self._scheduled[slots] = starts + counts
        samples = self._scheduled[slots] >= self._prompt_length[slots]
        self._draws[slots] += samples
        self._last_step[slots] = self._next_step
        for request, _ in chunks:
            if self._scheduled[request.slot] >= self._prompt_length[request.slot]:
                del self._prefilling[request.request_id]
        page_slots, page_indices, page_ids = self._grant(slots)
        plan = StepPlan(
            step=self._next_step,
            slots=slots,
            row_counts=counts,
            is_prefill=np.arange(slots.size) >= decoding.size,
            host_tokens=np.concatenate(tokens) if tokens else np.empty(0, np.int64),
            samples=samples,
            row_bucket=self.config.row_bucket(int(counts.sum())),
            page_slots=page_slots,
            page_indices=page_indices,
            page_ids=page_ids,
            admitted_slots=np.array([request.slot for request in admitted], np.int32),
            admitted_lengths=np.zeros(len(admitted), np.int32),
            admitted_tokens=np.full((len(admitted), self.config.history_width), -1, np.int64),
            admitted_sampling=_sampling_rows(admitted),
            released_slots=np.array(self._released, np.int32),
        )
        self._released = []
        self._next_step += 1
        return ScheduledStep(plan, tuple(self._owner[slots].tolist()))

    def _take_chunks(self, budget: int) -> list[tuple[Request, int]]:
        """Chunks of the prompts in progress, oldest first."""
        chunks: list[tuple[Request, int]] = []
        for request in self._prefilling.values():
            if budget == 0:
                break
            chunk = self._chunk(request, budget)
            chunks.append((request, chunk))
            budget -= chunk
        return chunks

    def _admit(self, budget: int, chunks: list[tuple[Request, int]]) -> list[Request]:
        """Admit from the head of the queue while slot, pages and budget last; append their first chunks."""
        admitted: list[Request] = []
        while budget > 0 and self.num_running < self.config.max_num_seqs and self.slots.num_free:
            request = self.queue.peek()
            if request is None or self._reserved + request.footprint > self.pages.capacity:
                break
            self.queue.remove(request)
            self._enter(request)
            admitted.append(request)
            chunk = self._chunk(request, budget)
            chunks.append((request, chunk))
            budget -= chunk
        return admitted

    def _enter(self, request: Request) -> None:
        slot = request.slot = self.slots.allocate()
        request.state = RequestState.RUNNING
        self._reserved += request.footprint
        self._prefilling[request.request_id] = request
        self._owner[slot] = request
        self._active[slot] = True
        self._prompt_length[slot] = request.num_prompt_tokens
        self._max_draws[slot] = request.max_tokens
        self._scheduled[slot] = self._draws[slot] = self._granted[slot] = 0
        self._last_step[slot] = -1

    def _chunk(self, request: Request, budget: int) -> int:
        left = int(self._prompt_length[request.slot] - self._scheduled[request.slot])
        limit = self.config.max_prefill_chunk
        return min(left, budget) if limit is None else min(left, budget, limit)

    def _grant(self, slots: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Give each sequence the pages that its scheduled positions newly reach."""
        reach = self._scheduled[slots] + self.config.lookahead
        needed = -(-reach // self.config.page_size)
        missing = np.maximum(needed - self._granted[slots], 0)
        ids = self.pages.allocate(int(missing.sum()))
        owners = np.repeat(slots, missing)
        first = np.repeat(np.cumsum(missing) - missing, missing)
        indices = (np.repeat(self._granted[slots], missing) + np.arange(ids.size) - first).astype(np.int32)
        self._page_table[owners, indices] = ids
        self._granted[slots] += missing
        return owners, indices, ids

    def _release(self, request: Request) -> None:
        slot = request.slot
        granted = int(self._granted[slot])
        pages = self._page_table[slot, :granted].copy()
        self.pages.free(pages)
        self._page_table[slot, :granted] = -1
        self._reserved -= request.footprint
        self._owner[slot] = None
        self.slots.free(slot)
        self._released.append(slot)
        request.slot = -1
        if self.on_release is not None:
            self.on_release(slot, pages)


def _sampling_rows(requests: list[Request]) -> SamplingRows:
    rows = [request.sampling for request in requests]
    return SamplingRows(
        temperature=np.array([row.temperature for row in rows], np.float32),
        top_k=np.array([row.top_k for row in rows], np.int32),
        top_p=np.array([row.top_p for row in rows], np.float32),
        seed=np.array([row.seed for row in rows], np.uint64).view(np.int64),
        completion=np.array([row.completion for row in rows], np.int32),
    )

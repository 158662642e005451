"""Plans, bounded waiting, admission and the way back of pages and slots."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.cache.pool import PagePool, SlotPool
from deepinfer.errors import CapacityError, ConfigError, InvalidRequest
from deepinfer.scheduler.config import SchedulerConfig
from deepinfer.scheduler.request import FinishReason, Request, RequestState, SamplingRow
from deepinfer.scheduler.scheduler import ScheduledStep, Scheduler


def make(pages: int = 20, **config: Any) -> Scheduler:
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 40, "page_size": 4, **config}
    limits = SchedulerConfig(**given)
    return Scheduler(limits, PagePool(pages + 1), SlotPool(limits.max_num_seqs + 1))


def request(name: str, length: int, max_tokens: int = 4, **sampling: Any) -> Request:
    return Request(name, 100 + np.arange(length), max_tokens, SamplingRow(**sampling))


def run(scheduler: Scheduler) -> ScheduledStep:
    """Plan a step and let it be complete; sequences end when their draws are spent."""
    step = scheduler.plan()
    assert step is not None
    scheduler.complete(step.plan.step)
    return step


def names(step: ScheduledStep) -> list[str]:
    return [item.request_id for item in step.requests]


def test_importing_the_scheduler_does_not_import_torch() -> None:
    code = "import deepinfer.scheduler.scheduler, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_plan_mixes_decode_rows_first_then_chunks() -> None:
    scheduler = make()
    scheduler.add(request("a", 3))
    run(scheduler)
    scheduler.add(request("b", 9, temperature=0.5, seed=2**64 - 1, top_k=7, top_p=0.25))
    scheduler.add(request("c", 4))
    first = run(scheduler)
    plan = first.plan
    assert names(first) == ["a", "b"]
    assert plan.step == 1
    assert plan.row_counts.tolist() == [1, 7]
    assert plan.is_prefill.tolist() == [False, True]
    assert plan.samples.tolist() == [True, False]
    assert plan.host_tokens.tolist() == list(range(100, 107))
    assert plan.row_bucket == plan.num_rows == 8
    assert plan.num_sequences == 2
    assert plan.admitted_slots.tolist() == [plan.slots[1]]
    assert plan.admitted_lengths.tolist() == [0]
    sampling = plan.admitted_sampling
    values = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, sampling.completion)
    assert [value.tolist() for value in values] == [[0.5], [7], [0.25], [-1], [0]]
    # "a" stays within its first page; "b" needs two for seven tokens.
    assert plan.page_slots.tolist() == [plan.slots[1]] * 2
    assert plan.page_indices.tolist() == [0, 1]
    second = run(scheduler)
    assert names(second) == ["a", "b", "c"]
    assert second.plan.row_counts.tolist() == [1, 2, 4]
    assert second.plan.samples.tolist() == [True, True, True]
    assert second.plan.host_tokens.tolist() == [107, 108, 100, 101, 102, 103]


def test_pages_are_granted_when_positions_reach_them() -> None:
    scheduler = make()
    scheduler.add(request("a", 3, max_tokens=7))
    grants = []
    while (step := scheduler.plan()) is not None:
        scheduler.complete(step.plan.step)
        grants.append((step.plan.page_indices.tolist(), step.plan.row_counts.tolist()))
    # Positions 0-2, then one a step up to 8: three pages, each when its first position is scheduled.
    assert grants == [([0], [3]), ([], [1]), ([1], [1]), ([], [1]), ([], [1]), ([], [1]), ([2], [1])]
    assert scheduler.pages.num_used == 3


def test_plans_may_run_ahead_of_results() -> None:
    """The next step can be planned before the last one is complete; max_tokens still bounds the draws."""
    scheduler = make()
    item = request("a", 2, max_tokens=3)
    scheduler.add(item)
    steps = [scheduler.plan() for _ in range(4)]
    assert [step.plan.row_counts.tolist() for step in steps[:3] if step] == [[2], [1], [1]]
    assert steps[3] is None
    scheduler.finish(item, FinishReason.STOP)
    assert scheduler.has_work()
    assert scheduler.pages.num_used == 1, "a step in flight still names the page"
    scheduler.complete(1)
    assert scheduler.pages.num_used == 1
    scheduler.complete(2)
    scheduler.assert_idle()


def test_released_slots_are_named_once_and_may_be_admitted_in_the_same_plan() -> None:
    scheduler = make(max_num_seqs=1)
    first, second = request("a", 2), request("b", 2)
    scheduler.add(first)
    scheduler.add(second)
    slot = run(scheduler).plan.slots[0]
    scheduler.finish(first, FinishReason.STOP)
    plan = run(scheduler).plan
    assert plan.released_slots.tolist() == plan.admitted_slots.tolist() == [slot]
    assert run(scheduler).plan.released_slots.size == 0


def test_abort_in_every_state() -> None:
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        scheduler.add(request(name, 12))
    step = run(scheduler)
    assert names(step) == ["a"]
    prefilling, queued = step.requests[0], scheduler.find("c")
    assert queued is not None
    assert (prefilling.state, queued.state) == (RequestState.RUNNING, RequestState.QUEUED)
    assert scheduler.abort("c") is queued
    assert scheduler.abort("a") is prefilling
    assert prefilling.finish_reason == queued.finish_reason == FinishReason.ABORT
    assert scheduler.abort("a") is None
    assert scheduler.abort("nobody") is None
    while names(run(scheduler)) != ["b"] or scheduler.find("b") is None:
        pass
    run(scheduler)
    scheduler.abort("b")
    scheduler.assert_idle()


@pytest.mark.parametrize(
    ("length", "max_tokens", "error", "text"),
    [
        (0, 4, InvalidRequest, "prompt: the prompt is empty; give at least one token"),
        (3, 0, InvalidRequest, "max_tokens: 0 is not at least 1"),
        (37, 4, InvalidRequest, "prompt: 37 prompt tokens and max_tokens=4 exceed the context of 40 tokens"),
        (
            30,
            4,
            CapacityError,
            "request 'x' can need 9 pages of 4 tokens (30 prompt tokens, max_tokens=4), the pool has 8",
        ),
    ],
)
def test_what_can_never_run_is_refused_with_the_numbers(
    length: int, max_tokens: int, error: type[Exception], text: str
) -> None:
    scheduler = make(pages=8)
    with pytest.raises(error) as caught:
        scheduler.add(request("x", length, max_tokens))
    assert str(caught.value).startswith(text)
    assert not scheduler.has_work()


def test_a_request_id_is_unique_in_flight() -> None:
    scheduler = make()
    scheduler.add(request("a", 3))
    with pytest.raises(InvalidRequest, match="request_id: 'a' is already in flight"):
        scheduler.add(request("a", 3))


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("max_num_seqs", 0, "max_num_seqs: 0 is not positive"),
        ("page_size", -1, "page_size: -1 is not positive"),
        ("max_prefill_chunk", 0, "max_prefill_chunk: 0 is not positive"),
        (
            "max_num_batched_tokens",
            3,
            "max_num_batched_tokens: 3 rows a step cannot hold one row of each of max_num_seqs=4",
        ),
    ],
)
def test_limits_that_cannot_work(field: str, value: int, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**{field: value})
    assert str(caught.value).startswith(text)


def test_a_large_request_is_not_overtaken() -> None:
    """First come, first served: small ones behind a large one wait, so it cannot starve."""
    scheduler = make(pages=8, max_num_batched_tokens=32)
    scheduler.add(request("a", 10, max_tokens=4))
    run(scheduler)
    scheduler.add(request("large", 28, max_tokens=4))
    scheduler.add(request("small", 1, max_tokens=1))
    while scheduler.find("a"):
        step = run(scheduler)
        assert names(step) == ["a"]
        if scheduler.plan() is None:
            scheduler.finish(step.requests[0], FinishReason.LENGTH)
    assert names(run(scheduler)) == ["large"]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=1, max_size=12),
    seqs=st.integers(1, 4),
    spare=st.integers(0, 8),
    chunk=st.sampled_from([None, 1, 4]),
)
def test_waiting_is_bounded(lengths: list[tuple[int, int]], seqs: int, spare: int, chunk: int | None) -> None:
    """While pages last, decoding sequences run in every step; the oldest prompt gets its share; arrivals start in order."""
    scheduler = make(40, max_num_seqs=seqs, max_num_batched_tokens=seqs + spare, max_prefill_chunk=chunk)
    requests = [request(str(index), *pair) for index, pair in enumerate(lengths)]
    for item in requests:
        scheduler.add(item)
    left = {item.request_id: item.num_prompt_tokens for item in requests}
    drawn = dict.fromkeys(left, 0)
    started: list[str] = []
    while scheduler.has_work():
        decoding = {name for name, count in drawn.items() if count and scheduler.find(name)}
        step = run(scheduler)
        plan = step.plan
        assert plan.num_rows <= seqs + spare
        assert decoding <= set(names(step))
        prefill = [
            (item.request_id, int(count))
            for item, count, is_prefill in zip(step.requests, plan.row_counts, plan.is_prefill, strict=True)
            if is_prefill
        ]
        if prefill:
            oldest, rows = prefill[0]
            share = min(left[oldest], spare + 1, chunk or 1000)
            assert rows >= share
        for name, rows in prefill:
            left[name] -= rows
            started += [name] if name not in started else []
        for item, samples in zip(step.requests, plan.samples, strict=True):
            assert samples == (left[item.request_id] == 0)
            drawn[item.request_id] += int(samples)
            if drawn[item.request_id] == item.max_tokens:
                scheduler.finish(item, FinishReason.LENGTH)
    assert started == [item.request_id for item in requests]
    assert all(count == item.max_tokens for count, item in zip(drawn.values(), requests, strict=True))
    scheduler.assert_idle()

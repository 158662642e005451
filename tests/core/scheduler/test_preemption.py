"""Priorities, bounded waiting, pages that run out, and rows of drafts in a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.cache.pool import PagePool, SlotPool
from deepinfer.errors import ConfigError
from deepinfer.scheduler.config import SchedulerConfig
from deepinfer.scheduler.policy import PriorityOrder
from deepinfer.scheduler.request import FinishReason, Request, RequestState
from deepinfer.scheduler.scheduler import ScheduledStep, Scheduler


def make(pages: int = 20, policy: Any = None, **config: Any) -> Scheduler:
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 40, "page_size": 4, **config}
    limits = SchedulerConfig(**given)
    return Scheduler(limits, PagePool(pages + 1), SlotPool(limits.max_num_seqs + 1), policy=policy)


def request(name: str, length: int, max_tokens: int = 4, priority: int = 0) -> Request:
    return Request(name, 100 + np.arange(length), max_tokens, priority=priority)


def names(step: ScheduledStep) -> list[str]:
    return [item.request_id for item in step.requests]


def finish_spent(scheduler: Scheduler, step: ScheduledStep, drawn: dict[str, int]) -> None:
    """Every sampled row stands; requests end when they have their tokens."""
    plan = step.plan
    scheduler.correct(step, plan.sample_counts.astype(np.int64))
    scheduler.complete(plan.step)
    for item, count in zip(step.requests, plan.sample_counts.tolist(), strict=True):
        drawn[item.request_id] = drawn.get(item.request_id, 0) + count
        if drawn[item.request_id] >= item.max_tokens:
            scheduler.finish(item, FinishReason.LENGTH)


def arrived(priorities: list[int]) -> list[Request]:
    items = [request(str(index), 1, priority=priority) for index, priority in enumerate(priorities)]
    for index, item in enumerate(items):
        item.arrival = index
    return items


def test_lower_priority_values_go_first_and_equals_in_order() -> None:
    policy = PriorityOrder()
    items = arrived([1, 0, -2, 0, 1])
    for item in items:
        policy.push(item)
    order = []
    while (item := policy.peek()) is not None:
        order.append(item.request_id)
        policy.remove(item)
    assert order == ["2", "1", "3", "0", "4"]
    assert len(policy) == 0


def test_an_overtaken_request_is_next_after_the_documented_number() -> None:
    policy = PriorityOrder(max_overtakes=3)
    items = arrived([9, *[0] * 10])
    for item in items:
        policy.push(item)
    order = []
    while (item := policy.peek()) is not None:
        order.append(item.request_id)
        policy.remove(item)
    assert order[:5] == ["1", "2", "3", "0", "4"]
    assert items[0].boosted


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_overtakes: -1 is negative"):
        PriorityOrder(-1)


@settings(max_examples=100, deadline=None)
@given(priorities=st.lists(st.integers(-2, 2), min_size=1, max_size=30), limit=st.integers(0, 5), data=st.data())
def test_waiting_in_the_queue_is_bounded(priorities: list[int], limit: int, data: st.DataObject) -> None:
    """A request with k older ones waits for at most (k + 1) (limit + 1) admissions, whatever arrives meanwhile."""
    policy = PriorityOrder(limit)
    waiting: dict[int, int] = {}
    bound: dict[int, int] = {}
    left = arrived(priorities)
    while left or waiting:
        if left and (not waiting or data.draw(st.booleans())):
            item = left.pop(0)
            bound[item.arrival] = (len(waiting) + 1) * (limit + 1)
            waiting[item.arrival] = 0
            policy.push(item)
            continue
        chosen = policy.peek()
        assert chosen is not None
        policy.remove(chosen)
        assert waiting.pop(chosen.arrival) <= bound[chosen.arrival]
        for arrival in waiting:
            waiting[arrival] += 1


def test_the_least_urgent_request_is_preempted_and_resumes_where_it_was() -> None:
    scheduler = make(pages=9)
    first, second = request("first", 8, max_tokens=20), request("second", 8, max_tokens=12, priority=1)
    scheduler.add(first)
    scheduler.add(second)
    drawn: dict[str, int] = {}
    saves = restores = None
    while scheduler.has_work():
        step = scheduler.plan()
        assert step is not None
        plan = step.plan
        if plan.saves:
            assert saves is None
            assert second.state is RequestState.PREEMPTED
            (saves,) = plan.saves
            parked = second.parked
            assert parked is not None
            assert saves.key == second.arrival
            assert saves.pages.size == parked.granted == -(-parked.scheduled // 4)
            assert saves.unowned.tolist() == sorted(saves.pages.tolist())
            assert names(step) == ["first"]
        if plan.restores:
            (restores,) = plan.restores
            assert saves is not None
            assert restores.key == saves.key
            assert restores.pages.size == saves.pages.size
            granted = plan.page_ids[plan.page_slots == restores.slot]
            assert granted[: restores.pages.size].tolist() == restores.pages.tolist()
            assert restores.slot not in plan.released_slots
            assert plan.admitted_slots.size == 0
        finish_spent(scheduler, step, drawn)
        scheduler.pages.check()
    assert restores is not None
    assert second.num_preemptions == scheduler.preemption.num_preemptions == 1
    assert drawn == {"first": 20, "second": 12}
    scheduler.assert_idle()


def test_abort_while_preempted_drops_the_copy() -> None:
    scheduler = make(preempt_every=2, max_num_seqs=2)
    for name in "ab":
        scheduler.add(request(name, 3, max_tokens=9))
    drawn: dict[str, int] = {}
    step = scheduler.plan()
    assert step is not None
    finish_spent(scheduler, step, drawn)
    scheduler.preempt_worst()
    parked = scheduler.find("b")
    assert parked is not None
    assert parked.state is RequestState.PREEMPTED
    assert scheduler.abort("b") is parked
    step = scheduler.plan()
    assert step is not None
    assert step.plan.dropped == (parked.arrival,)
    scheduler.abort("a")
    scheduler.complete(step.plan.step)
    scheduler.assert_idle()


def test_without_room_on_the_host_a_request_waits_for_its_tokens_and_runs_again() -> None:
    """Its last step is in flight: what that draws belongs to what its prefill runs again."""
    scheduler = make(host_bytes=0, page_bytes=8, slot_bytes=1)
    item = request("a", 6, max_tokens=9)
    scheduler.add(item)
    first = scheduler.plan()
    second = scheduler.plan()
    assert first is not None
    assert second is not None
    scheduler.complete(0)
    item.output.append(7)
    scheduler.preempt_worst()
    assert scheduler.plan() is None, "step 1 has not been read"
    assert item.state is RequestState.PREEMPTED
    item.output.append(8)
    scheduler.complete(1)
    step = scheduler.plan()
    assert step is not None
    plan = step.plan
    assert plan.saves == plan.restores == ()
    (discard,) = plan.discards
    assert discard.unowned.size == 2
    assert plan.host_tokens.tolist() == [*range(100, 106), 7, 8]
    assert [tokens.tolist() for tokens in plan.admitted_outputs] == [[7, 8]]
    assert plan.samples.tolist() == [True]
    drawn = {"a": 2}
    finish_spent(scheduler, step, drawn)
    while scheduler.has_work():
        step = scheduler.plan()
        assert step is not None
        finish_spent(scheduler, step, drawn)
    assert drawn == {"a": 9}
    assert scheduler.preemption.num_recomputations == 1
    scheduler.assert_idle()


def test_the_host_budget_is_exact_and_comes_back() -> None:
    """A copy of a page and a slot takes 9 bytes; it counts until the plan that takes or drops it."""
    scheduler = make(host_bytes=20, page_bytes=8, slot_bytes=1)
    for name in "abc":
        scheduler.add(request(name, 3))
    step = scheduler.plan()
    assert step is not None
    host = scheduler.preemption.host
    for used in (9, 18, 18):
        scheduler.preempt_worst()
        assert host.used == used
    scheduler.abort("b")
    assert host.used == 18
    scheduler.find("a").output.append(7)  # type: ignore[union-attr]
    scheduler.complete(step.plan.step)
    step = scheduler.plan()
    assert step is not None
    assert names(step) == ["c", "a"]
    assert [move.key for move in step.plan.saves] == [2, 1]
    assert ([move.key for move in step.plan.restores], step.plan.dropped) == ([2], (1,))
    assert host.used == 0
    for name in "ac":
        scheduler.abort(name)
    scheduler.complete(step.plan.step)
    scheduler.assert_idle()


def test_pages_that_come_back_are_waited_for() -> None:
    """A request that ends with the step in flight frees its pages: nobody is preempted for one step."""
    scheduler = make(pages=4, max_num_seqs=2)
    scheduler.add(request("a", 4, max_tokens=8))
    scheduler.add(request("b", 4, max_tokens=5))
    first, second = scheduler.find("a"), scheduler.find("b")
    assert first is not None
    assert second is not None
    for number in range(5):
        step = scheduler.plan()
        assert step is not None
        scheduler.complete(number - 1)
    assert scheduler.plan() is None, "the third page of a is one of b's, whose last draw is in flight"
    assert scheduler.preemption.num_preemptions == 0
    scheduler.complete(4)
    scheduler.finish(second, FinishReason.LENGTH)
    step = scheduler.plan()
    assert step is not None
    assert names(step) == ["a"]
    scheduler.finish(first, FinishReason.ABORT)
    scheduler.complete(5)
    scheduler.assert_idle()


def test_draft_rows_stop_at_the_last_wanted_token_and_bounds_are_corrected() -> None:
    scheduler = make(num_drafts=3, lookahead=3)
    item = request("a", 2, max_tokens=8)
    scheduler.add(item)
    step = scheduler.plan()
    assert step is not None
    scheduler.complete(step.plan.step)
    second = scheduler.plan()
    third = scheduler.plan()  # while the second is in flight: it draws one token at least
    assert second is not None
    assert third is not None
    assert second.plan.row_counts.tolist() == third.plan.row_counts.tolist() == [4]
    assert second.plan.sample_counts.tolist() == [4]
    assert scheduler.sequences.scheduled[item.slot] == 2 + 8
    scheduler.correct(second, np.array([2]))
    assert scheduler.sequences.scheduled[item.slot] == 2 + 6
    assert scheduler.sequences.draws[item.slot] == 1 + 2 + 1
    scheduler.correct(third, np.array([4]))
    last = scheduler.plan()
    assert last is not None
    assert last.plan.row_counts.tolist() == [1], "7 of 8 tokens are known"
    scheduler.finish(item, FinishReason.LENGTH)
    scheduler.complete(last.plan.step)
    scheduler.assert_idle()


def test_prompts_keep_half_of_what_drafts_could_take() -> None:
    scheduler = make(num_drafts=5, max_num_batched_tokens=16, max_num_seqs=3)
    for name in "ab":
        scheduler.add(request(name, 1, max_tokens=20))
    step = scheduler.plan()
    assert step is not None
    assert names(step) == ["a", "b"]
    step = scheduler.plan()
    assert step is not None
    assert step.plan.row_counts.tolist() == [6, 6]
    scheduler.add(request("c", 30))
    step = scheduler.plan()
    assert step is not None
    assert step.plan.row_counts.tolist() == [4, 4, 8]


def test_requests_that_end_while_they_wait_overtake_nobody() -> None:
    policy = PriorityOrder(max_overtakes=2)
    old, *young = arrived([9, 0, 0, 0])
    for item in (old, *young):
        policy.push(item)
    for item in young[:2]:
        item.state = RequestState.FINISHED
        policy.remove(item)
    assert old.overtaken == 0
    assert policy.peek() is young[2]

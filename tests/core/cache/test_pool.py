"""Page and slot accounting: every page in one state, nothing handed out twice, leaks and double frees loud."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer.cache.pool import PagePool, PoolError, SlotPool


class PagePoolMachine(RuleBasedStateMachine):
    """Random sharing, caching and freeing against a dictionary of owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9)
        self.owners: dict[int, int] = {}
        self.cached: set[int] = set()

    @rule(count=st.integers(0, 10))
    def allocate(self, count: int) -> None:
        free = 8 - len(self.owners) - len(self.cached)
        if count > free:
            with pytest.raises(PoolError, match=f"{count} pages asked, {free} of 8 are free"):
                self.pool.allocate(count)
            return
        ids = self.pool.allocate(count).tolist()
        assert len(set(ids)) == count
        assert not set(ids) & (self.owners.keys() | self.cached | {0})
        self.owners.update(dict.fromkeys(ids, 1))

    @precondition(lambda self: self.owners or self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        choice = st.sampled_from(sorted(self.owners.keys() | self.cached))
        ids = data.draw(st.lists(choice, max_size=4))
        self.pool.share(ids)
        for page in ids:
            self.owners[page] = self.owners.get(page, 0) + 1
            self.cached.discard(page)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), keep=st.booleans())
    def free(self, data: st.DataObject, keep: bool) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.owners)), max_size=5))
        if any(ids.count(page) > self.owners[page] for page in ids):
            before = (self.pool.num_free, self.pool.num_cached)
            with pytest.raises(PoolError, match="double free"):
                self.pool.free(ids, keep=keep)
            assert (self.pool.num_free, self.pool.num_cached) == before
            return
        idle = set(self.pool.free(np.array(ids, np.int32), keep=keep).tolist())
        for page in ids:
            self.owners[page] -= 1
        assert idle == {page for page in ids if self.owners[page] == 0}
        for page in idle:
            del self.owners[page]
        self.cached |= idle if keep else set()

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.cached)), unique=True))
        self.pool.evict(ids)
        self.cached -= set(ids)

    @invariant()
    def accounts(self) -> None:
        self.pool.check()
        assert self.pool.num_used == len(self.owners)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_free == 8 - len(self.owners) - len(self.cached)
        ids = sorted(self.owners)
        assert self.pool.owners(ids).tolist() == [self.owners[page] for page in ids]

    def teardown(self) -> None:
        for page, count in self.owners.items():
            self.pool.free([page] * count)
        self.pool.assert_idle()


PagePoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestPagePool = PagePoolMachine.TestCase


@pytest.mark.parametrize("page", [0, -1, 9])
def test_reserved_and_foreign_pages_are_refused(page: int) -> None:
    pool = PagePool(9)
    for action in (pool.share, pool.free, pool.evict):
        with pytest.raises(PoolError, match=rf"page ids \[{page}\] outside 1\.\.8"):
            action([page])


def test_a_free_page_cannot_be_shared_nor_evicted() -> None:
    pool = PagePool(4)
    (page,) = pool.allocate(1).tolist()
    pool.free([page])
    with pytest.raises(PoolError, match="are free and cannot be shared"):
        pool.share([page])
    with pytest.raises(PoolError, match="not all cached once"):
        pool.evict([page])


def test_a_leak_is_named() -> None:
    pool = PagePool(5)
    ids = pool.allocate(2).tolist()
    with pytest.raises(PoolError, match=rf"leaked pages at idle: \[{ids[0]}, {ids[1]}\]"):
        pool.assert_idle()


def test_freed_pages_are_reused_last() -> None:
    pool = PagePool(5)
    first = pool.allocate(2).tolist()
    pool.free(first)
    assert not set(pool.allocate(2).tolist()) & set(first)


def test_pools_need_something_to_hand_out() -> None:
    with pytest.raises(PoolError, match="page 0 is reserved"):
        PagePool(1)
    with pytest.raises(PoolError, match="slot 0 is reserved"):
        SlotPool(1)


def test_slots() -> None:
    pool = SlotPool(4)
    slots = [pool.allocate() for _ in range(3)]
    assert sorted(slots) == [1, 2, 3]
    with pytest.raises(PoolError, match="all 3 slots are in use"):
        pool.allocate()
    with pytest.raises(PoolError, match=r"leaked slots at idle: \[1, 2, 3\]"):
        pool.assert_idle()
    for slot in slots:
        pool.free(slot)
    pool.assert_idle()
    for slot in (0, 1, 7):
        with pytest.raises(PoolError, match=f"slot {slot} is not in use"):
            pool.free(slot)

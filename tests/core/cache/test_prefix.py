"""Prefix index, snapshots and pool together: nothing is found that does not hold exactly the asked prefix."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer.cache.chain import PrefixChain
from deepinfer.cache.pool import PagePool, PoolError
from deepinfer.cache.prefix import ImageSpan, PrefixIndex, page_keys, root_key
from deepinfer.cache.reuse import PrefixCache
from deepinfer.cache.snapshots import SnapshotPool

ROOT = root_key(b"checkpoint", "numerics", 2, "layout")
PAGE = 2
PAGES = 14
FIRST_SNAPSHOT = 5


def make(pages: int = PAGES, snapshots: int = 3, interval: int = 8) -> PrefixCache:
    pool = PagePool(pages + 1)
    return PrefixCache(
        ROOT, PAGE, pool, first_snapshot=FIRST_SNAPSHOT, num_snapshots=snapshots, snapshot_interval=interval
    )


@dataclass
class Run:
    """A request as a scheduler would drive it, and what it wrote where."""

    chain: PrefixChain
    prompt: list[int]
    limit: int
    row: list[int]
    length: int
    output: list[int] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)


class PrefixMachine(RuleBasedStateMachine):
    """Requests over a two-letter alphabet; pages and snapshots remember the whole prefix that they stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make()
        self.cache.exports = []
        self.runs: list[Run] = []
        self.content: dict[int, tuple[int, ...]] = {}
        self.state: dict[int, tuple[int, ...]] = {}
        self.reserved = 0

    @staticmethod
    def footprint(run: Run) -> int:
        return -(-(len(run.prompt) + run.limit) // PAGE)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14), limit=st.integers(1, 6), reuse=st.booleans())
    def admit(self, prompt: list[int], limit: int, reuse: bool) -> None:
        pages = -(-(len(prompt) + limit) // PAGE)
        if self.reserved + pages > PAGES:
            return
        chain = self.cache.begin(np.array(prompt), reuse=reuse)
        length = len(chain.pages) * PAGE
        assert length < len(prompt)
        for index, page in enumerate(chain.pages.tolist()):
            assert self.content[page] == tuple(prompt[: (index + 1) * PAGE])
        if length:
            assert reuse
            assert self.state[chain.restore] == tuple(prompt[:length])
        else:
            assert chain.restore == -1
        self.reserved += pages
        self.runs.append(Run(chain, prompt, limit, chain.pages.tolist(), length))

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), rows=st.integers(1, 5), good=st.integers(0, 9))
    def step(self, data: st.DataObject, rows: int, good: int) -> None:
        run = data.draw(st.sampled_from(self.runs))
        if run.length < len(run.prompt):
            rows = self.cache.cut(run.chain, run.length, min(rows, len(run.prompt) - run.length))
        else:
            if len(run.output) == run.limit:
                return
            rows = 1
            run.output.append(data.draw(st.integers(0, 1)))
        end = run.length + rows
        missing = -(-end // PAGE) - len(run.row)
        fresh = self.cache.allocate(missing).tolist()
        for page in fresh:
            assert all(page not in other.row for other in self.runs), "handed out while somebody holds it"
        run.row += fresh
        for index in range(run.length // PAGE, -(-end // PAGE)):
            self.content[run.row[index]] = run.tokens[: min(end, (index + 1) * PAGE)]
        slot = self.cache.save(run.chain, end, 0) if end <= len(run.prompt) else -1
        if slot >= 0:
            self.state[slot] = run.tokens[:end]
        if good == 0:  # The step failed: nothing of it is published.
            self.cache.forget(run.chain)
            self.release(run)
            return
        run.length = end
        self.cache.publish(run.chain, end, 0, run.output, np.array(run.row, np.int32))

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.release(data.draw(st.sampled_from(self.runs)))

    def release(self, run: Run) -> None:
        self.runs.remove(run)
        self.reserved -= self.footprint(run)
        self.cache.end(run.chain)
        self.cache.release(run.row)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=3, max_size=12))
    def promote(self, prompt: list[int]) -> None:
        """A lower tier brings a chain; the bytes are written at once."""
        keys = self.cache.keys_of(np.array(prompt))
        adopted = self.cache.adopt(keys)
        if adopted is None:
            return
        fills, slot = adopted
        for index, page in fills:
            assert all(page not in run.row for run in self.runs)
            self.content[page] = tuple(prompt[: (index + 1) * PAGE])
        if slot >= 0:
            self.state[slot] = tuple(prompt[: len(keys) * PAGE])

    @invariant()
    def accounts(self) -> None:
        self.cache.check()
        owners: dict[int, int] = {}
        for run in self.runs:
            for page in run.row:
                owners[page] = owners.get(page, 0) + 1
        pool = self.cache.pages
        assert pool.num_used == len(owners)
        held = sorted(owners)
        assert pool.owners(held).tolist() == [owners[page] for page in held]
        assert self.cache.snapshots.num_pending == sum(len(run.chain.pending) for run in self.runs)

    def teardown(self) -> None:
        for run in list(self.runs):
            self.release(run)
        self.cache.assert_idle()
        pool = self.cache.pages
        assert pool.num_free + pool.num_cached == PAGES
        assert pool.num_cached == len(self.cache.index)


PrefixMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPrefix = PrefixMachine.TestCase


def drive(cache: PrefixCache, prompt: list[int], chunk: int = 100) -> tuple[int, list[int]]:
    """Run a prompt alone and release it; returns its hit and the ends of its chunks."""
    tokens = np.array(prompt)
    chain = cache.begin(tokens)
    length = hit = chain.pages.size * PAGE
    row, ends = chain.pages.tolist(), []
    while length < tokens.size:
        length += cache.cut(chain, length, min(chunk, tokens.size - length))
        row += cache.allocate(-(-length // PAGE) - len(row)).tolist()
        cache.save(chain, length, 0)
        cache.publish(chain, length, 0, [], np.array(row, np.int32))
        ends.append(length)
    cache.end(chain)
    cache.release(row)
    cache.assert_idle()
    return hit, ends


def test_the_second_time_a_prompt_resumes_one_page_before_its_end() -> None:
    cache = make()
    assert drive(cache, [1, 2, 3, 4, 5]) == (0, [4, 5])
    assert drive(cache, [1, 2, 3, 4, 5]) == (4, [5])
    assert drive(cache, [1, 2, 3, 4]) == (0, [2, 4]), "at 4 nothing would be left to run, and 2 had no snapshot"
    assert drive(cache, [1, 2, 3, 4]) == (2, [4])
    assert drive(cache, [1, 2, 3, 4, 5, 6, 7]) == (4, [6, 7])
    assert (cache.stats.lookups, cache.stats.hits, cache.stats.hit_tokens) == (5, 3, 10)


def test_one_page_is_the_smallest_prefix_that_is_reused() -> None:
    """H3: no least common multiple of anything; a page and one token are enough."""
    cache = make()
    assert drive(cache, [7, 8, 9])[0] == 0
    assert drive(cache, [7, 8, 5])[0] == PAGE
    assert drive(cache, [7])[0] == 0
    assert drive(cache, [7])[0] == 0


def test_long_prompts_take_snapshots_at_intervals() -> None:
    cache = make(interval=4, snapshots=9)
    assert drive(cache, list(range(11))) == (0, [4, 8, 10, 11])
    assert drive(cache, [*range(9), 50, 51]) == (8, [10, 11])
    assert drive(cache, [*range(5), 50, 51])[0] == 4


def test_chunks_end_at_snapshots_for_any_budget() -> None:
    cache = make(interval=4, snapshots=9)
    assert drive(cache, list(range(11)), chunk=3)[1] == [3, 4, 7, 8, 10, 11]


def test_the_second_parting_takes_a_snapshot() -> None:
    cache = make(pages=60, snapshots=9)
    shared = [1, 1, 2, 2]
    assert drive(cache, [*shared, 3, 3, 3]) == (0, [6, 7])
    assert drive(cache, [*shared, 4, 4, 4]) == (0, [6, 7])
    assert cache.stats.stranded_tokens == 4
    assert drive(cache, [*shared, 5, 5, 5]) == (0, [4, 6, 7])
    assert drive(cache, [*shared, 6, 6, 6]) == (4, [6, 7])


def test_too_few_snapshots_are_said_once_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    cache = make(pages=60, snapshots=2)
    with caplog.at_level(logging.WARNING, "deepinfer.cache"):
        for start in range(6):
            drive(cache, [start, start, start])
    assert [record.getMessage() for record in caplog.records] == [
        "all 2 snapshots are in use: the least recently used ones are replaced from now on, so prompts may find their "
        "pages but no place to resume from; raise DEEPINFER_PREFIX_SNAPSHOTS to keep more"
    ]
    assert cache.snapshots.evicted == 4
    assert drive(cache, [5, 5, 5])[0] == PAGE, "the newest are kept"
    assert drive(cache, [0, 0, 0])[0] == 0
    assert cache.stats.stranded_tokens == PAGE


def test_without_snapshots_nothing_is_cut_and_nothing_resumes() -> None:
    cache = make(snapshots=0)
    assert drive(cache, [1, 2, 3]) == (0, [3])
    assert drive(cache, [1, 2, 3]) == (0, [3])


def test_least_recently_used_ends_go_first() -> None:
    cache = make(pages=6, snapshots=4)
    drive(cache, [1, 1, 2, 2, 9])
    drive(cache, [5, 5, 6, 6, 9])
    assert cache.pages.num_cached == 4
    assert drive(cache, [1, 1, 2, 2, 9])[0] == 4
    held = cache.allocate(4)
    kept, _ = cache.index.match(np.array([1, 1, 2, 2]), 2)
    gone, _ = cache.index.match(np.array([5, 5, 6, 6]), 2)
    assert (len(kept), len(gone)) == (2, 0)
    held = np.concatenate((held, cache.allocate(1)))
    assert len(cache.index.match(np.array([1, 1, 2, 2]), 2)[0]) == 1, "the end goes before what it hangs on"
    cache.pages.free(held)
    cache.assert_idle()


def test_a_copy_that_was_published_twice_never_blocks_the_pool() -> None:
    """Two requests compute one page; the published copy loses its owner while the other still follows it."""
    cache = make(pages=4)
    prompt = np.array([1, 1, 2, 2, 3])
    first, second = cache.begin(prompt), cache.begin(prompt)
    mine, other = cache.allocate(1), cache.allocate(2)
    cache.publish(first, 2, 0, [], mine)
    cache.publish(second, 4, 0, [], other)
    cache.end(first)
    cache.release(mine)
    assert cache.pages.num_cached == 1
    rest = cache.allocate(2)
    cache.check()
    assert cache.pages.num_used == 4
    cache.publish(second, 4, 0, [], other)
    cache.end(second)
    cache.release(other)
    cache.pages.free(rest)
    cache.assert_idle()


def test_what_was_evicted_before_a_running_request_is_published_again() -> None:
    cache = make(pages=5)
    prompt = np.array([1, 1, 2, 2, 3, 3, 3])
    first, second = cache.begin(prompt), cache.begin(prompt)
    mine, other = cache.allocate(1), cache.allocate(3)
    cache.publish(first, 2, 0, [], mine)
    cache.publish(second, 2, 0, [], other)
    cache.end(first)
    cache.release(mine)
    rest = cache.allocate(2)
    assert cache.index.match(prompt, 3)[0] == []
    cache.publish(second, 6, 0, [], other)
    assert [node.page for node in cache.index.match(prompt, 3)[0]] == other.tolist()
    cache.end(second)
    cache.release(other)
    cache.pages.free(rest)
    cache.assert_idle()


def test_bad_rows_are_withdrawn() -> None:
    cache = make()
    prompt = np.array([1, 1, 2, 2, 3])
    chain = cache.begin(prompt)
    row = cache.allocate(3)
    cache.save(chain, 4, 0)
    cache.publish(chain, 4, 0, [], row)
    assert len(cache.index) == 2
    cache.forget(chain)
    assert len(cache.index) == 0
    assert cache.snapshots.num_kept == 0
    cache.end(chain)
    assert cache.release(row).size == 3
    cache.assert_idle()


KEY_PARTS = [(b"c", "n", 2, "l"), (b"d", "n", 2, "l"), (b"c", "m", 2, "l"), (b"c", "n", 4, "l"), (b"c", "n", 2, "k")]


def test_every_part_of_the_root_counts() -> None:
    assert len({root_key(*parts) for parts in KEY_PARTS}) == len(KEY_PARTS)
    assert root_key(b"ab", "c", 2, "l") != root_key(b"a", "bc", 2, "l")


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_keys_agree_exactly_as_far_as_the_tokens_do(left: list[int], right: list[int]) -> None:
    first, second = (list(page_keys(ROOT, np.array(tokens, np.int64), PAGE)) for tokens in (left, right))
    for page, (one, two) in enumerate(zip(first, second, strict=False)):
        end = (page + 1) * PAGE
        assert (one == two) == (left[:end] == right[:end])
    assert len(first) == len(left) // PAGE


def test_images_are_told_apart_by_content_and_place() -> None:
    tokens = np.full(6, 9)
    cases = [(), (ImageSpan(2, 2, b"x"),), (ImageSpan(2, 2, b"y"),), (ImageSpan(3, 2, b"x"),), (ImageSpan(2, 4, b"x"),)]
    keys = [list(page_keys(ROOT, tokens, PAGE, images=images)) for images in cases]
    assert len({pages[0] for pages in keys}) == 1, "the page before the image is the same"
    assert len({pages[1] for pages in keys}) == len(cases)


def test_snapshot_slots_are_accounted_for() -> None:
    gone: list[str] = []
    pool: SnapshotPool[str] = SnapshotPool(3, 2, on_evict=gone.append)
    first, second = pool.reserve(), pool.reserve()
    assert first is not None
    assert second is not None
    assert {first, second} == {3, 4}
    assert pool.reserve() is None
    assert pool.refused == 1
    with pytest.raises(PoolError, match=r"leaked snapshot slots at idle: \[3, 4\]"):
        pool.assert_idle()
    pool.keep(first, "a")
    pool.keep(second, "b")
    pool.touch(first)
    assert pool.reserve() == second
    assert gone == ["b"]
    with pytest.raises(PoolError, match=f"snapshot slot {second} is not kept"):
        pool.touch(second)
    with pytest.raises(PoolError, match=f"snapshot slot {first} is not pending"):
        pool.keep(first, "c")
    pool.free(second)
    pool.free(first)
    with pytest.raises(PoolError, match=f"snapshot slot {first} is not in use"):
        pool.free(first)
    pool.assert_idle()
    with pytest.raises(PoolError, match="overlap slot 0"):
        SnapshotPool(0, 2)


def test_a_page_is_published_under_one_key() -> None:
    pool = PagePool(4)
    index = PrefixIndex(ROOT, PAGE, pool)
    (page,) = pool.allocate(1).tolist()
    node = index.insert(None, b"a", page)
    with pytest.raises(PoolError, match=f"page {page} is published twice"):
        index.insert(None, b"b", page)
    index.remove(node)
    with pytest.raises(PoolError, match="follows a page that is no longer published"):
        index.insert(node, b"c", page)
    with pytest.raises(PoolError, match="1 pages to evict, 0 are cached"):
        index.evict(1)


def test_a_snapshot_is_found_only_when_the_step_that_fills_it_was_good() -> None:
    """Drafts may bring a sequence past a place before the step that copies its state there has been read."""
    cache = make(pages=5)
    prompt = np.array([1, 1, 2])
    chain = cache.begin(prompt)
    row = cache.allocate(3)
    assert cache.save_output(chain, 4, 8) >= 0
    cache.publish(chain, 6, 7, [5, 6, 7, 8], row)
    assert (cache.snapshots.num_pending, cache.snapshots.num_kept) == (1, 0)
    cache.publish(chain, 6, 8, [5, 6, 7, 8], row)
    assert (cache.snapshots.num_pending, cache.snapshots.num_kept) == (0, 1)
    cache.end(chain)
    cache.release(row)
    cache.assert_idle()

"""What the scheduler asks of the prefix cache: where a prompt may resume, where its chunks end, what it leaves behind.

A request resumes at the deepest page boundary whose pages are published and for which a snapshot of the state slot
exists: pages alone do not hold the window rings. The smallest prefix that can be reused is therefore one page, and a
hit always leaves at least one token of the prompt to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer.cache.chain import CacheExport, PrefixChain, PrefixStats
from deepinfer.cache.pool import PagePool
from deepinfer.cache.prefix import ImageSpan, PrefixIndex, PrefixNode, page_keys
from deepinfer.cache.snapshots import SnapshotPool

__all__ = ["DEFAULT_SNAPSHOT_INTERVAL", "PrefixCache"]

DEFAULT_SNAPSHOT_INTERVAL = 4096
"""Tokens between the snapshots of a long prompt."""

PARTINGS_FOR_SNAPSHOT = 2
"""The first request that leaves a known prefix is noted, the second one takes a snapshot there."""


class PrefixCache:
    """Index, snapshots and page pool of one device behind the few calls that a scheduler makes.

    Args:
        root: key of the empty prefix (`root_key`).
        page_size: tokens per page.
        pages: the pool.
        first_snapshot, num_snapshots: slots of the state storage that hold snapshots.
        snapshot_interval: tokens between snapshots inside a long prompt; rounded down to whole pages.
        keep_tokens: last tokens of a prompt that bounded replay keeps, and that must run after a hit; 0: no replay.
    """

    def __init__(
        self,
        root: bytes,
        page_size: int,
        pages: PagePool,
        *,
        first_snapshot: int,
        num_snapshots: int,
        snapshot_interval: int = DEFAULT_SNAPSHOT_INTERVAL,
        keep_tokens: int = 0,
    ) -> None:
        self.page_size = page_size
        self.keep_tokens = keep_tokens
        self.pages = pages
        self.index = PrefixIndex(root, page_size, pages, on_remove=self._drop_snapshot)
        self.snapshots: SnapshotPool[PrefixNode] = SnapshotPool(
            first_snapshot, num_snapshots, on_evict=self._forget_snapshot
        )
        self.interval = max(snapshot_interval // page_size, 1) * page_size
        self.stats = PrefixStats()
        self.on_evict: Callable[[NDArray[np.int32]], None] | None = None
        """Told of pages that nobody can find any more."""
        self.exports: list[CacheExport] | None = None
        """What was published since somebody emptied the list; None while no lower tier listens."""

    # ---- a request's way -----------------------------------------------------------------------------------------

    def begin(
        self,
        prompt: NDArray[np.int64],
        *,
        num_prompt_tokens: int | None = None,
        images: Sequence[ImageSpan] = (),
        reuse: bool = True,
    ) -> PrefixChain:
        """Admit a prompt: its hit pages get one more owner, and the ends of its snapshots are chosen.

        Args:
            prompt: int64 [L], L >= 1.
            num_prompt_tokens: where the prompt proper ends, if generated tokens follow; None: L.
            images: spans that show images.
            reuse: False for a request that needs every row of its prompt to run.
        """
        chain = PrefixChain(prompt, tuple(images))
        limit = self._limit(prompt.size, prompt.size if num_prompt_tokens is None else num_prompt_tokens)
        nodes, keys = self.index.match(prompt, limit, images)
        resumable = max((node.depth for node in nodes if node.snapshot >= 0), default=0)
        depth = resumable if reuse else 0
        if reuse:
            self.stats.lookups += 1
            self.stats.queried_tokens += prompt.size
            self.stats.hits += depth > 0
            self.stats.hit_tokens += depth * self.page_size
            self.stats.stranded_tokens += (len(nodes) - depth) * self.page_size
        if depth:
            hit = nodes[:depth]
            self.index.touch(hit)
            chain.pages = np.fromiter((node.page for node in hit), np.int32, depth)
            self.pages.share(chain.pages)
            chain.node, chain.keys, chain.restore = hit[-1], keys[:depth], hit[-1].snapshot
            self.snapshots.touch(chain.restore)
        chain.boundaries = self._boundaries(depth, limit, nodes)
        return chain

    def cut(self, chain: PrefixChain, start: int, rows: int) -> int:
        """Rows of a prefill chunk from `start`, at most `rows`, so that it does not run past a snapshot's place."""
        for boundary in chain.boundaries:
            if boundary > start:
                return min(rows, boundary - start)
        return rows

    def save(self, chain: PrefixChain, end: int, step: int) -> int:
        """Snapshot slot to copy the state slot into after a chunk that ends at `end`; -1 for none."""
        if chain.closed or end not in chain.boundaries or end in chain.pending:
            return -1
        depth = end // self.page_size
        key = chain.keys[depth - 1] if depth <= len(chain.keys) else self._key(chain, depth)
        node = self.index.find(key)
        if node is not None and node.snapshot >= 0:
            self.snapshots.touch(node.snapshot)
            return -1
        return self._reserve(chain, end, step)

    def save_output(self, chain: PrefixChain, end: int, step: int) -> int:
        """Snapshot slot to copy into when a page of output ends at `end`; -1 for none.

        The next turn of a conversation resumes there, so one request keeps only its latest; with bounded replay some
        more, since the next prompt must leave room for what it keeps.
        """
        return self._reserve(chain, end, step) if self.snapshots.capacity else -1

    def publish(
        self, chain: PrefixChain, length: int, step: int, output: Sequence[int], row: NDArray[np.int32]
    ) -> None:
        """Publish the pages and snapshots that lie within the first `length` tokens.

        Args:
            chain: of the request.
            length: tokens that were forwarded and accepted, as the host knows them after a good step.
            step: that step.
            output: generated tokens; prompt and output together hold at least `length` tokens.
            row: page ids of the request in order.
        """
        wanted = length // self.page_size
        if chain.closed or (wanted <= len(chain.keys) and not chain.pending):
            return
        if wanted > len(chain.keys):
            self._extend(chain, wanted, output, row)
        for boundary, (slot, filled) in list(chain.pending.items()):
            if boundary <= length and filled <= step:
                del chain.pending[boundary]
                self._attach(chain, boundary, slot, row)

    def forget(self, chain: PrefixChain) -> None:
        """Withdraw what a request published, whose rows turned out to be bad."""
        chain.closed = True
        for node in chain.own:
            self._told(self.index.remove(node))
        chain.own = []

    def conclude(self, chain: PrefixChain) -> None:
        """Note that a request has said all: lower tiers may have the latest snapshots of its output."""
        for node in chain.latest:
            if node.snapshot >= 0:
                self._export("snapshot", node.key, node.snapshot)

    def end(self, chain: PrefixChain) -> None:
        """Note that a request has ended: nothing more comes of it."""
        chain.closed = True
        for slot, _ in chain.pending.values():
            self.snapshots.free(slot)
        chain.pending = {}

    def release(self, pages: ArrayLike) -> NDArray[np.int32]:
        """Drop one owner of each page: published ones stay cached. Returns the freed ones."""
        return self.index.release(pages)

    def clear(self) -> None:
        """Forget everything; requests that run keep their pages."""
        for node in self.index.first_pages():
            self._told(self.index.remove(node))

    def allocate(self, count: int) -> NDArray[np.int32]:
        """Hand out pages, evicting cached ones where the free ones do not last.

        Raises:
            PoolError: free and cached pages together are fewer than `count`.
        """
        missing = count - self.pages.num_free
        if missing > 0:
            self._told(self.index.evict(missing))
        return self.pages.allocate(count)

    def counters(self) -> dict[str, int]:
        """Everything that is counted, by name, for whoever reports it; pages and snapshots apart."""
        pages, snapshots = self.pages, self.snapshots
        return {
            **asdict(self.stats),
            "cached_pages": pages.num_cached,
            "evicted_pages": self.index.evicted,
            "snapshot_slots": snapshots.capacity,
            "kept_snapshots": snapshots.num_kept,
            "taken_snapshots": snapshots.taken,
            "evicted_snapshots": snapshots.evicted,
            "refused_snapshots": snapshots.refused,
        }

    # ---- for lower tiers -----------------------------------------------------------------------------------------

    def keys_of(self, prompt: NDArray[np.int64], images: Sequence[ImageSpan] = ()) -> list[bytes]:
        """Keys of all pages from which a prompt could resume."""
        limit = self._limit(prompt.size, prompt.size)
        return list(islice(page_keys(self.index.root, prompt, self.page_size, images=images), limit))

    def resumable(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Of a chain of keys: pages that are here, and pages after which the device could resume."""
        present = depth = 0
        for key in keys:
            node = self.index.find(key)
            if node is None:
                break
            present += 1
            if node.snapshot >= 0:
                depth = present
        return present, depth

    def adopt(self, keys: Sequence[bytes]) -> tuple[list[tuple[int, int]], int] | None:
        """Make room for a chain that a lower tier brings: pages without an owner and a snapshot at its end.

        The caller fills them before the next plan runs; nothing of them is exported again.

        Args:
            keys: of the whole chain from the first page on.

        Returns:
            (position in `keys`, page id) of each page to fill, and the snapshot slot (-1: it is there already); None
            without room: requests hold too many pages.
        """
        nodes = []
        for key in keys:
            node = self.index.find(key)
            if node is None:
                break
            nodes.append(node)
        missing = len(keys) - len(nodes)
        here = np.fromiter((node.page for node in nodes), np.int32, len(nodes))
        self.pages.share(here)  # Not to be evicted while room is made for what follows.
        if missing > self.pages.num_free + self.pages.num_cached:
            self.index.release(here)
            return None
        fresh = self.allocate(missing)
        parent = nodes[-1] if nodes else None
        for key, page in zip(keys[len(nodes) :], fresh.tolist(), strict=True):
            parent = self.index.insert(parent, key, page)
        slot = -1
        if parent is not None and parent.snapshot < 0:
            reserved = self.snapshots.reserve()
            if reserved is not None:
                slot = reserved
                self.snapshots.keep(slot, parent)
                parent.snapshot = slot
        self.index.release(np.concatenate((here, fresh)))
        return list(zip(range(len(nodes), len(keys)), fresh.tolist(), strict=True)), slot

    # ---- invariants ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify index, snapshots and pool.

        Raises:
            PoolError: with what is wrong.
        """
        self.index.check()
        self.snapshots.check()

    def assert_idle(self) -> None:
        """Verify that without requests nothing is owned: free + cached pages = all pages.

        Raises:
            PoolError: with what leaked.
        """
        self.check()
        self.pages.assert_idle()
        self.snapshots.assert_idle()

    # ---- steps of the above --------------------------------------------------------------------------------------

    def _limit(self, length: int, num_prompt_tokens: int) -> int:
        """Pages after which a prefill could resume.

        What bounded replay keeps is counted from the end of the prompt proper: a snapshot behind that place holds the
        rows that another prompt kept.
        """
        end = num_prompt_tokens - self.keep_tokens if self.keep_tokens else length - 1
        return max(end, 0) // self.page_size

    def _boundaries(self, depth: int, limit: int, nodes: list[PrefixNode]) -> list[int]:
        """Where to take snapshots: inside a long prompt, where known prefixes end, and before the last token."""
        if not self.snapshots.capacity:
            return []
        last = limit * self.page_size
        ends = set(range(self.interval, last, self.interval)) | {last}
        if nodes and len(nodes) > depth and len(nodes) < limit:
            nodes[-1].partings += 1
            if nodes[-1].partings >= PARTINGS_FOR_SNAPSHOT:
                ends.add(len(nodes) * self.page_size)
        return sorted(end for end in ends if end > depth * self.page_size)

    def _extend(self, chain: PrefixChain, wanted: int, output: Sequence[int], row: NDArray[np.int32]) -> None:
        self._relink(chain, row)
        first = len(chain.keys)
        tokens = chain.prompt
        if wanted * self.page_size > tokens.size:
            tokens = np.concatenate((tokens, np.asarray(output, np.int64)))
        parent = chain.keys[-1] if chain.keys else self.index.root
        tokens = tokens[: wanted * self.page_size]
        for key in page_keys(parent, tokens, self.page_size, first=first, images=chain.images):
            self._link(chain, key, int(row[len(chain.keys)]))
            chain.keys.append(key)

    def _relink(self, chain: PrefixChain, row: NDArray[np.int32]) -> None:
        """Publish again what was evicted from before pages that the request still holds."""
        if chain.node is None or chain.node.alive:
            return
        chain.node = None
        for key, page in zip(chain.keys, row.tolist(), strict=False):
            self._link(chain, key, page)

    def _link(self, chain: PrefixChain, key: bytes, page: int) -> None:
        known = self.index.find(key)
        node = self.index.insert(chain.node, key, page)
        chain.node = node
        if known is None:
            chain.own.append(node)
            self.stats.published_pages += 1
            self._export("page", key, page)

    def _reserve(self, chain: PrefixChain, end: int, step: int) -> int:
        slot = self.snapshots.reserve()
        if slot is None:
            return -1
        chain.pending[end] = slot, step
        return slot

    def _attach(self, chain: PrefixChain, boundary: int, slot: int, row: NDArray[np.int32]) -> None:
        self._relink(chain, row)
        node = self.index.find(chain.keys[boundary // self.page_size - 1])
        if node is None or node.snapshot >= 0:
            self.snapshots.free(slot)
            return
        node.snapshot = slot
        self.snapshots.keep(slot, node)
        if boundary < chain.prompt.size:
            self._export("snapshot", node.key, slot)
            return
        chain.latest.append(node)
        if len(chain.latest) > 1 + -(-self.keep_tokens // self.page_size):
            oldest = chain.latest.pop(0)
            if oldest.depth * self.page_size % self.interval:  # Else a long text leaves it.
                self._drop_snapshot(oldest)

    def _key(self, chain: PrefixChain, depth: int) -> bytes:
        first = len(chain.keys)
        parent = chain.keys[-1] if chain.keys else self.index.root
        keys = page_keys(
            parent, chain.prompt[: depth * self.page_size], self.page_size, first=first, images=chain.images
        )
        return list(keys)[-1]

    def _export(self, kind: Literal["page", "snapshot"], key: bytes, index: int) -> None:
        if self.exports is not None:
            self.exports.append(CacheExport(kind, key, index))

    def _told(self, pages: NDArray[np.int32]) -> None:
        if pages.size and self.on_evict is not None:
            self.on_evict(pages)

    def _drop_snapshot(self, node: PrefixNode) -> None:
        if node.snapshot >= 0:
            self.snapshots.free(node.snapshot)
            node.snapshot = -1

    def _forget_snapshot(self, node: PrefixNode) -> None:
        node.snapshot = -1

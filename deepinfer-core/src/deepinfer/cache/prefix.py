"""Which page holds the tokens of which prefix: a tree of content keys over published pages (design 7).

The key of a page is a strong hash of its parent's key and its own tokens, from a root that names everything on which
the bytes depend. Equal keys therefore mean equal tokens, equal history and equal numerics; nothing else is compared.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer.cache.pool import PagePool, PoolError

__all__ = ["KEY_BYTES", "ImageSpan", "PrefixIndex", "PrefixNode", "page_keys", "root_key"]

KEY_BYTES = 32
"""Bytes of a key: with 256 bits two different prefixes never share one."""


@dataclass(frozen=True)
class ImageSpan:
    """Placeholder tokens of one image: equal ids say nothing about what they show, so the content's digest is hashed.

    Attributes:
        start, length: positions of the placeholders.
        digest: of the image's pixels and of how they were prepared.
    """

    start: int
    length: int
    digest: bytes


def root_key(checkpoint: bytes, numerics_id: str, page_size: int, layout_id: str) -> bytes:
    """Parent of every first page: two engines share keys only if all four agree."""
    parts = (checkpoint, numerics_id.encode(), page_size.to_bytes(8, "little"), layout_id.encode())
    digest = blake2b(digest_size=KEY_BYTES, person=b"deepinfer-root")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def page_keys(
    parent: bytes, tokens: NDArray[np.int64], page_size: int, *, first: int = 0, images: Sequence[ImageSpan] = ()
) -> Iterator[bytes]:
    """Keys of the full pages of `tokens` from page `first` on, made one at a time.

    Args:
        parent: key of page `first` - 1, or the root.
        tokens: int64 [L], from position 0.
        page_size: tokens per page.
        first: page to begin with.
        images: spans whose digests go into the keys of the pages that they touch.
    """
    for page in range(first, tokens.size // page_size):
        start, end = page * page_size, (page + 1) * page_size
        digest = blake2b(parent, digest_size=KEY_BYTES, person=b"deepinfer-page")
        digest.update(np.ascontiguousarray(tokens[start:end], dtype="<i8").tobytes())
        for image in images:
            if image.start < end and image.start + image.length > start:
                place = f"{image.start - start}:{image.length}:{len(image.digest)}:"
                digest.update(place.encode() + image.digest)
        parent = digest.digest()
        yield parent


@dataclass(eq=False, slots=True)
class PrefixNode:
    """A published page.

    Attributes:
        key: hash of everything up to the page's end.
        parent: the page before; None for the first.
        page: page id.
        depth: pages from the start, this one included.
        children: published pages that follow it.
        snapshot: slot that holds the state at the page's end; -1 without one.
        partings: requests that left the known prefixes here without a snapshot.
        last_use: tick of the last lookup or publication.
        alive: whether lookups can still find it.
    """

    key: bytes
    parent: PrefixNode | None
    page: int
    depth: int
    children: dict[bytes, PrefixNode] = field(default_factory=dict)
    snapshot: int = -1
    partings: int = 0
    last_use: int = 0
    alive: bool = True


class PrefixIndex:
    """Published pages by key. A published page without an owner stays cached in the pool until it is evicted.

    Args:
        root: key of the empty prefix.
        page_size: tokens per page.
        pages: the pool that owns the pages.
        on_remove: told of every node that lookups no longer find.
    """

    def __init__(
        self,
        root: bytes,
        page_size: int,
        pages: PagePool,
        *,
        on_remove: Callable[[PrefixNode], None] = lambda node: None,
    ) -> None:
        self.root = root
        self.page_size = page_size
        self.pages = pages
        self.on_remove = on_remove
        self.evicted = 0
        self._nodes: dict[bytes, PrefixNode] = {}
        self._by_page: dict[int, PrefixNode] = {}
        self._heap: list[tuple[int, int, int, PrefixNode]] = []
        self._ticks = count(1)
        self._entries = count()

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, key: bytes) -> PrefixNode | None:
        """The published page of a key."""
        return self._nodes.get(key)

    def first_pages(self) -> list[PrefixNode]:
        """Published pages that begin a chain."""
        return [node for node in self._nodes.values() if node.parent is None]

    def match(
        self, tokens: NDArray[np.int64], limit: int, images: Sequence[ImageSpan] = ()
    ) -> tuple[list[PrefixNode], list[bytes]]:
        """The longest chain of published pages that `tokens` begin with, and the keys that were made on the way.

        Args:
            tokens: int64 [L].
            limit: pages at most.
            images: as for `page_keys`.
        """
        nodes: list[PrefixNode] = []
        keys: list[bytes] = []
        for key in page_keys(self.root, tokens[: limit * self.page_size], self.page_size, images=images):
            keys.append(key)
            node = self._nodes.get(key)
            if node is None:
                break
            nodes.append(node)
        return nodes, keys

    def touch(self, nodes: Sequence[PrefixNode]) -> None:
        """Note a use of a chain."""
        tick = next(self._ticks)
        for node in nodes:
            node.last_use = tick
            self._note_idle(node)

    def insert(self, parent: PrefixNode | None, key: bytes, page: int) -> PrefixNode:
        """Publish a page behind its parent; a key that is already published keeps its page.

        Raises:
            PoolError: the parent is gone, or the page is published under another key.
        """
        known = self._nodes.get(key)
        if known is not None:
            self.touch((known,))
            return known
        if parent is not None and not parent.alive:
            raise PoolError(f"page {page} follows a page that is no longer published")
        if page in self._by_page:
            raise PoolError(f"page {page} is published twice")
        node = PrefixNode(key, parent, page, 1 if parent is None else parent.depth + 1, last_use=next(self._ticks))
        if parent is not None:
            parent.children[key] = node
        self._nodes[key] = self._by_page[page] = node
        return node

    def release(self, ids: ArrayLike) -> NDArray[np.int32]:
        """Drop one owner of each page; published ones stay cached, the others become free. Returns the freed ones."""
        pages = np.atleast_1d(np.asarray(ids, np.int32))
        published = np.fromiter((page in self._by_page for page in pages.tolist()), np.bool_, pages.size)
        for page in self.pages.free(pages[published], keep=True).tolist():
            self._note_idle(self._by_page[page])
        return self.pages.free(pages[~published])

    def remove(self, node: PrefixNode) -> NDArray[np.int32]:
        """Forget a page and all that follow it; those without an owner become free. Returns the freed ones."""
        if not node.alive:
            return np.empty(0, np.int32)
        gone = [node]
        for item in gone:
            gone.extend(item.children.values())
        if node.parent is not None:
            del node.parent.children[node.key]
        for item in gone:
            del self._nodes[item.key], self._by_page[item.page]
            item.alive = False
            item.children = {}
            self.on_remove(item)
        pages = np.array([item.page for item in gone], np.int32)
        idle = pages[self.pages.owners(pages) == 0]
        self.pages.evict(idle)
        if node.parent is not None:
            self._note_idle(node.parent)
        return idle

    def evict(self, wanted: int) -> NDArray[np.int32]:
        """Free cached pages: least recently used ends of chains first. Returns the freed ones, at least `wanted`.

        A page without an owner may lie before one that a request still holds (two requests computed the same page, and
        only one copy is published). Such pages go last; what follows them is forgotten, not freed.

        Raises:
            PoolError: fewer pages are cached.
        """
        if wanted > self.pages.num_cached:
            raise PoolError(f"{wanted} pages to evict, {self.pages.num_cached} are cached")
        freed: list[NDArray[np.int32]] = []
        missing = wanted
        while missing > 0:
            node = self._oldest_end() or self._oldest_idle()
            freed.append(self.remove(node))
            missing -= freed[-1].size
        pages = np.concatenate(freed) if freed else np.empty(0, np.int32)
        self.evicted += pages.size
        return pages

    def check(self) -> None:
        """Verify tree, keys and pool against each other.

        Raises:
            PoolError: with the pages concerned.
        """
        self.pages.check()
        for node in self._nodes.values():
            parent = node.parent
            linked = parent is None or (parent.alive and parent.children.get(node.key) is node)
            if not (node.alive and linked and self._by_page.get(node.page) is node):
                raise PoolError(f"page {node.page} is published but not linked")
        held = [node.page for node in self._nodes.values()]
        idle = int((self.pages.owners(held) == 0).sum()) if held else 0
        if len(self._by_page) != len(self._nodes) or idle != self.pages.num_cached:
            raise PoolError(f"{self.pages.num_cached} pages are cached, {idle} of the published ones have no owner")

    # ---- order of eviction ---------------------------------------------------------------------------------------

    def _note_idle(self, node: PrefixNode) -> None:
        """Make a page a candidate if it is the end of a chain and nobody owns it."""
        if node.alive and not node.children and self.pages.owners(node.page)[0] == 0:
            heapq.heappush(self._heap, (node.last_use, -node.depth, next(self._entries), node))
            if len(self._heap) > 4 * len(self._nodes) + 64:
                live = {entry[3].page: entry for entry in self._heap if self._is_end(entry)}
                self._heap = sorted(live.values())

    def _is_end(self, entry: tuple[int, int, int, PrefixNode]) -> bool:
        last_use, _, _, node = entry
        current = node.alive and not node.children and node.last_use == last_use
        return current and self.pages.owners(node.page)[0] == 0

    def _oldest_end(self) -> PrefixNode | None:
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_end(entry):
                return entry[3]
        return None

    def _oldest_idle(self) -> PrefixNode:
        idle = [node for node in self._nodes.values() if self.pages.owners(node.page)[0] == 0]
        return min(idle, key=lambda node: (node.last_use, -node.depth))

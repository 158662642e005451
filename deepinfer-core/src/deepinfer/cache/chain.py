"""One request's way through the prefix cache, what it leaves for lower tiers, and what is counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deepinfer.cache.prefix import ImageSpan, PrefixNode

__all__ = ["CacheExport", "PrefixChain", "PrefixStats"]


@dataclass
class PrefixStats:
    """Counts since the start; tokens unless they say otherwise.

    Attributes:
        lookups, hits: admitted requests that asked, and those that found something.
        queried_tokens: of the prompts that asked.
        hit_tokens: not computed again.
        stranded_tokens: found in pages but computed again, since no snapshot at or before their end was left. If it
            grows with the evictions of snapshots, there are too few of them.
        published_pages: pages that lookups could find.
    """

    lookups: int = 0
    hits: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    stranded_tokens: int = 0
    published_pages: int = 0


@dataclass(frozen=True)
class CacheExport:
    """Something that lower tiers may store: a published page, or a snapshot at a page's end.

    Attributes:
        kind: what `index` counts.
        key: of the page.
        index: page id or state slot, valid until the next plan.
    """

    kind: Literal["page", "snapshot"]
    key: bytes
    index: int


@dataclass(eq=False, slots=True)
class PrefixChain:
    """One request's way through the index, from admission to release.

    Attributes:
        prompt: int64 [L].
        images: spans of the prompt that show images.
        pages: shared page ids of the hit, in order.
        restore: snapshot slot to copy from before the first row; -1 without a hit.
        boundaries: positions, ascending, at which a prefill chunk must end so that a snapshot can be taken.
        keys: of the pages published or shared so far.
        node: the last of them.
        own: nodes that this request published.
        pending: (snapshot slot, step that fills it) by boundary, until that step is known to be good.
        latest: nodes with the latest snapshots of its output, oldest first.
        closed: nothing is published any more.
    """

    prompt: NDArray[np.int64]
    images: tuple[ImageSpan, ...] = ()
    pages: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    restore: int = -1
    boundaries: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    node: PrefixNode | None = None
    own: list[PrefixNode] = field(default_factory=list)
    pending: dict[int, tuple[int, int]] = field(default_factory=dict)
    latest: list[PrefixNode] = field(default_factory=list)
    closed: bool = False

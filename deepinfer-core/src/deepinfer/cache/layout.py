"""Byte layout of pages and state slots, and the storage that holds them (spec/model 2.3, 4.5; design 7).

A request's device state is its pages and one slot; both are plain bytes, contiguous per page and per slot, so that
moving a request is moving bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer.backend.numerics import Numerics
from deepinfer.errors import ConfigError
from deepinfer.ops.compress import EntryCache
from deepinfer.ops.quant import FP4_BLOCK16, FP4_BLOCK32, FP8_BLOCK32, RowFormat, plain_format

if TYPE_CHECKING:
    from deepinfer.models.deepseek_v41.config import ModelConfig
    from deepinfer.models.deepseek_v41.topology import Topology

__all__ = ["POISON", "CacheLayout", "CacheStorage", "SourceLayout", "ring_length"]

POISON = 0xFF
"""Byte of everything that was never written: NaN as e4m3, bfloat16, float32 and as an e8m0 exponent."""

PAGE_ALIGNMENT = 128
SLOT_ALIGNMENT = 256
RING_ROUNDING = 16


def ring_length(window: int, max_draft: int) -> int:
    """Entries of a window ring: W + 2 (N + 1) rounded up to 16, since the asynchronous loop may run 2 N rows ahead."""
    return -(-(window + 2 * (max_draft + 1)) // RING_ROUNDING) * RING_ROUNDING


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


@dataclass(frozen=True)
class SourceLayout:
    """One KV source's part of a page and of a slot.

    Attributes:
        layer: the source. ratio: tokens per entry. entries_per_page: page size / ratio.
        entries_offset, index_offset: bytes from the start of a page.
        state_offset: bytes from the start of a slot, or None at ratio 1.
    """

    layer: int
    ratio: int
    entries_per_page: int
    entries_offset: int
    index_offset: int
    state_offset: int | None


@dataclass(frozen=True)
class CacheLayout:
    """Where everything lies in a page and in a slot.

    Attributes:
        page_size: tokens per page. ring_length, state_length: entries per slot of the rings and compressor states.
        window_format, entry_format, index_format: row formats.
        state_dtype: of compressor states.
        ring_offsets: byte offset in a slot of every ring: backbone layers, then draft stages.
        sources: KV sources in layer order.
        page_bytes, slot_bytes: aligned sizes.
        layout_id: name of the byte formats; pages of another id must be converted before they are read.
    """

    page_size: int
    ring_length: int
    state_length: int
    window_format: RowFormat
    entry_format: RowFormat
    index_format: RowFormat
    state_dtype: torch.dtype
    ring_offsets: tuple[int, ...]
    sources: tuple[SourceLayout, ...]
    page_bytes: int
    slot_bytes: int
    layout_id: str

    @classmethod
    def build(
        cls, config: ModelConfig, topology: Topology, numerics: Numerics, page_size: int, max_draft: int
    ) -> CacheLayout:
        """Layout for a model.

        Args:
            page_size: tokens per page, a multiple of every ratio.
            max_draft: largest number of drafted tokens per step (N).

        Raises:
            ConfigError: the page size does not fit the ratios.
        """
        ratios = {topology.layers[source].ratio for source in topology.kv_sources}
        largest = max(ratios, default=1)
        if page_size < 1 or page_size % largest:
            raise ConfigError(
                f"{page_size} must be a positive multiple of the largest compression ratio, {largest}",
                field="page_size",
            )
        window, entry, index = _formats(config, numerics)
        length = ring_length(config.sliding_window, max_draft)
        rings = config.num_hidden_layers + topology.num_stages
        ring_bytes = length * window.row_bytes
        offsets, offset = [], 0
        for _ in range(rings):
            offsets.append(offset)
            offset = _aligned(offset + ring_bytes, 16)
        sources, page_offset = [], 0
        state_length = largest + max_draft
        for layer in topology.kv_sources:
            ratio = topology.layers[layer].ratio
            per_page = page_size // ratio
            index_offset = _aligned(page_offset + per_page * entry.row_bytes, 16)
            state_offset = offset if ratio > 1 else None
            sources.append(SourceLayout(layer, ratio, per_page, page_offset, index_offset, state_offset))
            page_offset = _aligned(index_offset + per_page * index.row_bytes, 16)
            if ratio > 1:
                state_bytes = state_length * 2 * config.head_dim * numerics.accumulate_dtype.itemsize
                offset = _aligned(offset + state_bytes, 16)
        return cls(
            page_size=page_size,
            ring_length=length,
            state_length=state_length,
            window_format=window,
            entry_format=entry,
            index_format=index,
            state_dtype=numerics.accumulate_dtype,
            ring_offsets=tuple(offsets),
            sources=tuple(sources),
            page_bytes=_aligned(page_offset, PAGE_ALIGNMENT),
            slot_bytes=_aligned(offset, SLOT_ALIGNMENT),
            layout_id=f"canonical/1:{window.name}+{entry.name}+{index.name}:page{page_size}:ring{length}",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for reports."""
        return {
            "layout_id": self.layout_id,
            "page_size": self.page_size,
            "page_bytes": self.page_bytes,
            "slot_bytes": self.slot_bytes,
            "ring_length": self.ring_length,
            "rings": len(self.ring_offsets),
            "kv_sources": [source.layer for source in self.sources],
        }


def _formats(config: ModelConfig, numerics: Numerics) -> tuple[RowFormat, RowFormat, RowFormat]:
    widths = (config.head_dim, config.head_dim, config.index_head_dim)
    if not numerics.cache_quant:
        window, entry, index = (plain_format(width, numerics.compute_dtype) for width in widths)
        return window, entry, index
    entry_name = FP4_BLOCK16 if config.use_fp4_sparse_kv else FP8_BLOCK32
    return RowFormat(FP8_BLOCK32, widths[0]), RowFormat(entry_name, widths[1]), RowFormat(FP4_BLOCK32, widths[2])


@dataclass(frozen=True)
class CacheStorage:
    """Memory of pages and slots with typed views for the graph.

    Attributes:
        pages: [num_pages, page_bytes] and slots: [num_slots, slot_bytes] uint8. Page 0 and slot 0 are never handed
            out and keep their poison.
        rings: one [num_slots, ring length, row bytes] uint8 view per backbone layer, then per draft stage.
        entry_caches: `EntryCache` views by KV source layer.
    """

    layout: CacheLayout
    pages: Tensor
    slots: Tensor
    rings: tuple[Tensor, ...] = field(repr=False)
    entry_caches: dict[int, EntryCache] = field(repr=False)

    @classmethod
    def allocate(
        cls,
        layout: CacheLayout,
        num_pages: int,
        num_slots: int,
        device: torch.device | str = "cpu",
        *,
        alloc: Callable[[int], Tensor] | None = None,
    ) -> CacheStorage:
        """Storage for `num_pages` pages and `num_slots` slots (reserved ones included), filled with poison.

        Args:
            alloc: a runtime's allocator of uint8 device memory; plain torch memory on `device` without it.
        """

        def memory(count: int, nbytes: int) -> Tensor:
            flat = alloc(count * nbytes) if alloc else torch.empty(count * nbytes, dtype=torch.uint8, device=device)
            return flat[: count * nbytes].view(count, nbytes).fill_(POISON)

        pages, slots = memory(num_pages, layout.page_bytes), memory(num_slots, layout.slot_bytes)
        row_bytes = layout.window_format.row_bytes
        rings = tuple(
            slots[:, offset : offset + layout.ring_length * row_bytes].unflatten(1, (layout.ring_length, row_bytes))
            for offset in layout.ring_offsets
        )
        caches = {source.layer: _entry_cache(layout, source, pages, slots) for source in layout.sources}
        return cls(layout, pages, slots, rings, caches)

    def poison(self, slot: int, pages: Tensor) -> None:
        """Forget what a slot and pages held, so that a read of something never written shows as NaN."""
        self.slots[slot] = POISON
        self.pages[pages] = POISON


def _entry_cache(layout: CacheLayout, source: SourceLayout, pages: Tensor, slots: Tensor) -> EntryCache:
    entry_bytes, index_bytes = layout.entry_format.row_bytes, layout.index_format.row_bytes
    count = source.entries_per_page
    entries = pages[:, source.entries_offset : source.entries_offset + count * entry_bytes]
    state = None
    if source.state_offset is not None:
        width = 2 * layout.entry_format.width
        nbytes = layout.state_length * width * layout.state_dtype.itemsize
        flat = slots[:, source.state_offset : source.state_offset + nbytes].view(layout.state_dtype)
        state = flat.unflatten(1, (layout.state_length, 2, width // 2))
    return EntryCache(
        entries=entries.unflatten(1, (count, entry_bytes)),
        index_keys=pages[:, source.index_offset : source.index_offset + count * index_bytes],
        state=state,
        ratio=source.ratio,
        entries_per_page=count,
        entry_format=layout.entry_format,
        index_format=layout.index_format,
    )

"""Pairs of (row, choice) in the order of their experts, cut into tiles that meet one expert each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["PAIR_TILE", "Tiles", "cut_tiles"]

PAIR_TILE = 16
MOST_SORTED = 1024
"""Pairs that one program sorts."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Work of a grouped product; all int32, on the device.

    Attributes:
        pairs: [P], pairs by expert, those without one at the end.
        expert: [tiles], -1 for a tile without work.
        first: [tiles], place of its first pair in `pairs`.
        end: [tiles], place behind the last pair of its expert.
        size: most pairs of a tile.
    """

    pairs: Tensor
    expert: Tensor
    first: Tensor
    end: Tensor
    size: int


@triton.jit
def _cut(
    ids, pairs, expert_of, first_of, end_of, count, bound, experts,
    SIZE: tl.constexpr, PAIRS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """One program sorts all pairs by expert; those without one come last."""
    pair = tl.arange(0, PAIRS)
    chosen = tl.load(ids + pair, mask=pair < count, other=-1).to(tl.int32)
    chosen = tl.where(chosen < 0, experts, chosen)
    order = tl.sort(chosen * PAIRS + pair) % PAIRS
    tl.store(pairs + pair, order, mask=pair < count)
    sizes = tl.histogram(chosen, EXPERTS)
    sizes = tl.where(tl.arange(0, EXPERTS) < experts, sizes, 0)
    ends, tiles = tl.cumsum(sizes, 0), (sizes + SIZE - 1) // SIZE
    last = tl.cumsum(tiles, 0)
    tile = tl.arange(0, PAIRS)
    expert = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    found = expert < EXPERTS
    safe = tl.minimum(expert, EXPERTS - 1)
    end = tl.gather(ends, safe, 0)
    number = tile - tl.gather(last, safe, 0) + tl.gather(tiles, safe, 0)
    tl.store(expert_of + tile, tl.where(found, expert, -1), mask=tile < bound)
    tl.store(first_of + tile, end - tl.gather(sizes, safe, 0) + number * SIZE, mask=tile < bound)
    tl.store(end_of + tile, end, mask=tile < bound)


def cut_tiles(ids: Tensor, experts: int, size: int) -> Tiles:
    """Cut the pairs of ids [T, k] into tiles; their number is bounded by sizes alone, so nothing is read back."""
    count = ids.numel()
    if count > MOST_SORTED:
        return _cut_many(ids, experts, size)
    bound = min(count, count // size + experts)
    pairs = torch.empty(count, dtype=torch.int32, device=ids.device)
    expert, first, end = torch.empty(3, bound, dtype=torch.int32, device=ids.device).unbind(0)
    _cut[(1,)](
        ids.contiguous(), pairs, expert, first, end, count, bound, experts, SIZE=size,
        PAIRS=max(triton.next_power_of_2(count), 16), EXPERTS=triton.next_power_of_2(experts + 1), num_warps=8,
    )  # fmt: skip
    return Tiles(pairs, expert, first, end, size)


def _cut_many(ids: Tensor, experts: int, size: int) -> Tiles:
    flat = torch.where(ids.flatten() >= 0, ids.flatten(), experts)
    count = flat.shape[0]
    pairs = flat.argsort(stable=True)
    sizes = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    sizes.scatter_add_(0, flat, torch.ones_like(flat))
    sizes = sizes[:experts]
    ends, tiles = sizes.cumsum(0), (sizes + size - 1) // size
    last_tile = tiles.cumsum(0)
    bound = min(count, count // size + experts)
    tile = torch.arange(bound, device=ids.device)
    expert = torch.searchsorted(last_tile, tile, right=True)
    safe = expert.clamp(max=experts - 1)
    first = ends[safe] - sizes[safe] + (tile - last_tile[safe] + tiles[safe]) * size
    expert = torch.where(expert < experts, expert, -1)
    pairs, expert, first, end = (part.to(torch.int32) for part in (pairs, expert, first, ends[safe]))
    return Tiles(pairs, expert, first, end, size)

"""Selection of compressed entries: scores, candidate blocks and exact top-k (spec/model 3.6, 3.7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.compress import EntryCache, sample_cache
from deepinfer.ops.contract import Determinism, Sample, SampleSize, Tolerance, composite, op
from deepinfer.ops.handles import Selection, accumulate_dtype
from deepinfer.ops.host_view import is_on_host
from deepinfer.ops.quant import FP4_BLOCK32, RowFormat, pack_rows
from deepinfer.ops.sample_inputs import normal, random_step, row_counts, step_shapes

__all__ = [
    "IndexParameters",
    "candidate_blocks",
    "index_scores",
    "index_select",
    "restrict_to_blocks",
    "select_topk",
    "visible_entries",
]

SCORE_TILE = 256
"""Entries scored at a time: a fixed tile, so that a row's scores do not depend on how many entries others have."""


@dataclass(frozen=True, slots=True)
class IndexParameters:
    """What an index source does with its scores.

    Attributes:
        top_k: entries kept per row.
        scale: of the head weights, Di ** -0.5 * Hi ** -0.5.
        is_candidate_source: publishes candidate blocks for later layers.
        uses_candidates: scores only entries of the published blocks.
        candidate_blocks, block_size: blocks kept and entries per block.
        query_format: quantiser of the index queries.
    """

    top_k: int
    scale: float
    is_candidate_source: bool
    uses_candidates: bool
    candidate_blocks: int
    block_size: int
    query_format: RowFormat


def visible_entries(positions: Tensor, ratio: int) -> Tensor:
    """Entries that a row at p sees: (p + 1) // ratio; 0 for padding rows (spec/model 2.4)."""
    return (positions + 1) // ratio


def _score_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    heads, width, per_page, pages = {"tiny": (2, 32, 4, 8), "odd": (3, 96, 3, 8), "real": (32, 128, 128, 8)}[size]
    row_format = RowFormat(FP4_BLOCK32, width)
    keys = pack_rows(normal(generator, (pages + 1) * per_page, width), row_format)
    codes, scales = keys.split((row_format.data_bytes, row_format.scale_bytes), dim=-1)
    grouped = [part.unflatten(0, (pages + 1, per_page)).flatten(1) for part in (codes, scales)]
    table = (1 + torch.randperm(pages, generator=generator)).view(2, pages // 2).to(torch.int32)
    for label, rows in row_counts(size):
        slots = torch.randint(0, 2, (rows,), generator=generator)
        arguments = {
            "query": normal(generator, rows, heads, width),
            "weights": normal(generator, rows, heads),
            "keys": torch.cat(grouped, dim=1),
            "key_format": row_format,
            "slots": slots,
            "visible": torch.randint(0, per_page * pages // 2 + 1, (rows,), generator=generator),
            "page_table": table,
            "entries_per_page": per_page,
        }
        unread = torch.ones(pages + 1, dtype=torch.bool)
        unread[table[slots.unique()].long()] = False
        yield Sample(label, arguments, ("query", "weights", "slots", "visible"), {"keys": unread})


@composite(
    uses=("resolve_entries", "gather_index_keys", "unpack_rows"),
    samples=_score_samples,
    determinism=Determinism.RUN_TO_RUN,
    tolerance=Tolerance(rtol=5e-6, bf16_rtol=8e-3),
    activations=("query",),
)
def index_scores(kernels: Any) -> Callable[..., Tensor]:
    """Scores sum_h w[h] relu(<q[h], key>) of every visible entry.

    Call: (query [T, Hi, Di], weights [T, Hi] accumulate dtype, keys [pages, bytes], key_format, slots [T],
    visible [T], page_table, entries_per_page) -> [T, n] accumulate dtype, -inf where not visible; n is a multiple of
    the score tile. In bfloat16 the sums are rounded to bfloat16, as the release ranks them.
    """
    resolve, gather, unpack = kernels.resolve_entries, kernels.gather_index_keys, kernels.unpack_rows

    def index_scores(
        query: Tensor,
        weights: Tensor,
        keys: Tensor,
        key_format: RowFormat,
        slots: Tensor,
        visible: Tensor,
        page_table: Tensor,
        entries_per_page: int,
    ) -> Tensor:
        accumulate = accumulate_dtype(query.dtype)
        wide = query.to(accumulate)
        longest = page_table.shape[1] * entries_per_page
        if is_on_host(visible):
            longest = int(visible.max()) if visible.numel() else 0
        tiles = []
        for start in range(0, max(longest, 1), SCORE_TILE):
            entries = torch.arange(start, start + SCORE_TILE, device=query.device).expand(query.shape[0], -1)
            entries = torch.where(entries < visible[:, None], entries, -1)
            packed = gather(keys, resolve(entries, slots, page_table, entries_per_page), key_format)
            products = torch.bmm(wide, unpack(packed, key_format, accumulate).transpose(1, 2)).relu_()
            scores = (products * weights[..., None]).sum(1)
            if query.dtype is torch.bfloat16:
                scores = scores.to(torch.bfloat16).to(accumulate)
            tiles.append(scores.masked_fill_(entries < 0, -torch.inf))
        return torch.cat(tiles, dim=1)

    return index_scores


def _ranked(generator: torch.Generator, rows: int, entries: int) -> tuple[Tensor, Tensor]:
    visible = torch.randint(0, entries + 1, (rows,), generator=generator)
    scores = normal(generator, rows, entries).mul(4).round().div(4)
    return scores.masked_fill(torch.arange(entries) >= visible[:, None], -torch.inf), visible


def _candidate_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    entries, block, blocks = {"tiny": (32, 4, 8), "odd": (37, 4, 8), "real": (4096, 8, 256)}[size]
    for label, rows in row_counts(size):
        scores, visible = _ranked(generator, rows, entries)
        arguments = {"scores": scores, "visible": visible, "block_size": block, "blocks": blocks}
        yield Sample(label, arguments, ("scores", "visible"))


@op(samples=_candidate_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0))
def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, blocks: int) -> Tensor:
    """Blocks with the largest entry score; the newest block is always kept, equal blocks go to the lower one.

    Args:
        scores: [T, n] with -inf where not visible; visible: [T] int64.

    Returns:
        [T, blocks] int64 block numbers, ascending, padded with -1 at the end.
    """
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % block_size), value=-torch.inf)
    best = padded.unflatten(1, (-1, block_size)).amax(-1)
    numbers = torch.arange(best.shape[1], device=scores.device)
    best = best.masked_fill(numbers == ((visible - 1) // block_size)[:, None], torch.inf)
    best = best.masked_fill(visible[:, None] <= 0, -torch.inf)
    return _best_ascending(best, blocks)


def _restrict_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for sample in _candidate_samples(size, generator):
        kept = candidate_blocks(**sample.kwargs)
        arguments = {"scores": sample.kwargs["scores"], "blocks": kept, "block_size": sample.kwargs["block_size"]}
        yield Sample(sample.label, arguments, ("scores", "blocks"))


@op(samples=_restrict_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0))
def restrict_to_blocks(scores: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """Scores with -inf outside the given blocks.

    Args:
        scores: [T, n], blocks: [T, b] int64 with -1 padding.
    """
    count = -(-scores.shape[1] // block_size)
    kept = torch.zeros(scores.shape[0], count + 1, dtype=torch.bool, device=scores.device)
    kept.scatter_(1, torch.where(blocks >= 0, blocks, count), True)
    inside = kept[:, :count].repeat_interleave(block_size, dim=1)[:, : scores.shape[1]]
    return scores.masked_fill(~inside, -torch.inf)


def _topk_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    entries, k = {"tiny": (32, 8), "odd": (37, 9), "real": (4096, 512)}[size]
    for label, rows in row_counts(size):
        yield Sample(label, {"scores": _ranked(generator, rows, entries)[0], "top_k": k}, ("scores",))
    yield Sample("all equal", {"scores": torch.zeros(2, entries), "top_k": k}, ("scores",))


@op(samples=_topk_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0))
def select_topk(scores: Tensor, top_k: int) -> Tensor:
    """The entries with the largest scores, lower entry first on ties; -inf is never chosen.

    Args:
        scores: [T, n].

    Returns:
        [T, top_k] int64, ascending, padded with -1 at the end.
    """
    return _best_ascending(scores, top_k)


def _best_ascending(scores: Tensor, count: int) -> Tensor:
    order = scores.sort(dim=-1, descending=True, stable=True)
    chosen = order.indices[:, :count].masked_fill(order.values[:, :count] == -torch.inf, scores.shape[1])
    chosen = torch.nn.functional.pad(chosen, (0, count - chosen.shape[1]), value=scores.shape[1]).sort(dim=-1).values
    return chosen.masked_fill(chosen == scores.shape[1], -1)


def _index_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    heads, width, rotated, top_k = {"tiny": (2, 32, 16, 3), "odd": (3, 64, 34, 7), "real": (32, 128, 64, 512)}[size]
    page_size, block_size = {"tiny": (4, 2), "odd": (6, 4), "real": (128, 8)}[size]
    for number, shape in enumerate(step_shapes(size, window=6)):
        modes = ("plain", "candidate source", "uses candidates")
        for mode in modes if shape.label in ("empty", "mixed", "many decode rows") else modes[number % 3 :][:1]:
            ratio = 1 + (number + len(mode)) % 2
            step = random_step(generator, shape, page_size=page_size, ring_length=16)
            sizes = {"width": width, "index_width": width, "ratio": ratio, "page_size": page_size}
            cache = sample_cache(generator, step, **sizes)
            rows, idle, visible = step.slots.shape[0], step.slots < 0, visible_entries(step.positions, ratio)
            angles = normal(generator, rows, rotated // 2, scale=10.0)
            parameters = IndexParameters(
                top_k=top_k,
                scale=width**-0.5 * heads**-0.5,
                is_candidate_source=mode == "candidate source",
                uses_candidates=mode == "uses candidates",
                candidate_blocks=2,
                block_size=block_size,
                query_format=RowFormat(FP4_BLOCK32, width),
            )
            most = max(block_size, int(visible.max()) if rows else 0)
            scores = normal(generator, rows, most).masked_fill(torch.arange(most) >= visible[:, None], -torch.inf)
            blocks = candidate_blocks(scores, visible, block_size, 2) if parameters.uses_candidates else None
            arguments = {
                "query": normal(generator, rows, heads, width),
                "weights": normal(generator, rows, heads),
                "step": step,
                "cache": cache,
                "parameters": parameters,
                "cos": angles.cos(),
                "sin": angles.sin(),
                "blocks": blocks,
            }
            unread = dict.fromkeys(("query", "weights", "cos", "sin"), idle)
            unread |= {"cache.entries": torch.ones(cache.entries.shape[0], dtype=torch.bool)}
            unread |= {"cache.index_keys": _foreign_pages(step.page_table, cache.index_keys.shape[0])}
            row_args = ("query", "weights", "step", "cos", "sin", "blocks")
            yield Sample(f"{shape.label}, {mode}, ratio {ratio}", arguments, row_args, unread, idle)


def _foreign_pages(page_table: Tensor, num_pages: int) -> Tensor:
    """Mask [pages] of the pages that no sequence owns."""
    foreign = torch.ones(num_pages, dtype=torch.bool)
    foreign[page_table[page_table >= 0].long()] = False
    return foreign


@composite(
    samples=_index_samples,
    uses=(
        "rope",
        "round_rows",
        "index_scores",
        "candidate_blocks",
        "restrict_to_blocks",
        "select_topk",
        "resolve_entries",
    ),
    determinism=Determinism.RUN_TO_RUN,
    tolerance=Tolerance(rtol=5e-6, bf16_rtol=8e-3),
    activations=("query", "weights"),
    aliases=("blocks",),
)
def index_select(kernels: Any) -> Callable[..., tuple[Selection, Tensor | None]]:
    """Entries that the rows of an index source attend to.

    Call: (query [T, Hi, Di] before rotation, weights [T, Hi] compute dtype, step: StepInputs, cache: EntryCache,
    parameters, cos, sin at each row's position, blocks [T, b] of the candidate source or None) ->
    (Selection, blocks to publish).
    """
    rope, round_rows, scores_of = kernels.rope, kernels.round_rows, kernels.index_scores
    blocks_of, restrict = kernels.candidate_blocks, kernels.restrict_to_blocks
    topk, resolve = kernels.select_topk, kernels.resolve_entries

    def index_select(
        query: Tensor,
        weights: Tensor,
        step: Any,
        cache: EntryCache,
        parameters: IndexParameters,
        cos: Tensor,
        sin: Tensor,
        blocks: Tensor | None,
    ) -> tuple[Selection, Tensor | None]:
        rounded = round_rows(rope(query, cos, sin), parameters.query_format)
        scaled = weights.to(accumulate_dtype(weights.dtype)) * parameters.scale
        visible = visible_entries(step.positions, cache.ratio)
        keys = (cache.index_keys, cache.index_format, step.slots, visible, step.page_table, cache.entries_per_page)
        scores = scores_of(rounded, scaled, *keys)
        if parameters.is_candidate_source:
            blocks = blocks_of(scores, visible, parameters.block_size, parameters.candidate_blocks)
        elif parameters.uses_candidates:
            scores = restrict(scores, blocks, parameters.block_size)
        entries = topk(scores, parameters.top_k)
        return Selection(entries, resolve(entries, step.slots, step.page_table, cache.entries_per_page)), blocks

    return index_select

"""Attention: projections, sparse attention over window and picked entries, output (spec/model 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.cache import resolve_entries
from deepinfer.ops.compress import EntryCache, sample_cache, unread_entries
from deepinfer.ops.contract import Determinism, Sample, SampleSize, Tolerance, composite, op
from deepinfer.ops.handles import DenseWeight, Rows, Selection, accumulate_dtype
from deepinfer.ops.quant import FP8_BLOCK32, RowFormat, pack_rows
from deepinfer.ops.sample_inputs import (
    RowsInput,
    fp8_weight,
    normal,
    plain_weight,
    random_step,
    row_counts,
    step_shapes,
    window_reads,
)
from deepinfer.ops.step import StepInputs

__all__ = [
    "AttentionWeights",
    "Projected",
    "attend",
    "attention_output",
    "qkv_project",
    "sample_attention",
    "sparse_attention",
]

ATTENTION_ROW_BLOCK = 64
"""Query rows whose keys are expanded at a time, so that workspace does not grow with the chunk."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Weights and sizes of one attention sub-layer.

    Attributes:
        qkv_a: fused linear: wq_a rows, then wkv rows, from the normed hidden.
        q_b: fused linear: wq_b rows, then the indexer's wq_b rows (index sources only), from the query latent.
        side: fused linear kept in fp32: compressor.wkv, compressor.wgate (ratio > 1), indexer.weights_proj rows, as
            far as the layer has them; None if it has none.
        q_norm, kv_norm: norm weights. wo_a, wo_b: output linears. sink: [H] float32.
        heads, head_dim, q_rank, groups: sizes. index_heads, index_dim: 0 where the layer has no indexer queries.
        latent_rows, gate_rows: rows of `side` that belong to the compressor.
        window: positions a row sees, its own included. window_format: of ring rows.
        quantise: whether inputs of quantised linears are FP8-rounded.
    """

    qkv_a: DenseWeight
    q_b: DenseWeight
    side: DenseWeight | None
    q_norm: Tensor
    kv_norm: Tensor
    wo_a: DenseWeight
    wo_b: DenseWeight
    sink: Tensor
    heads: int
    head_dim: int
    q_rank: int
    groups: int
    index_heads: int
    index_dim: int
    latent_rows: int
    gate_rows: int
    window: int
    window_format: RowFormat
    norm_eps: float
    quantise: bool

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class Projected:
    """What a layer computes from its normed input before it touches any cache.

    Attributes:
        query: [T, H, D] rotated, compute dtype.
        window_rows: [T, bytes] uint8, this step's rows of the window.
        index_query: [T, Hi, Di] not rotated, or None. index_weights: [T, Hi] compute dtype, or None.
        latent, gate: [T, D] accumulate dtype of the compressor, or None.
    """

    query: Tensor
    window_rows: Tensor
    index_query: Tensor | None
    index_weights: Tensor | None
    latent: Tensor | None
    gate: Tensor | None


@dataclass(frozen=True)
class _Sizes:
    """Sizes of sample attention layers."""

    hidden: int
    heads: int
    head_dim: int
    rotated: int
    q_rank: int
    groups: int
    o_rank: int
    index_heads: int
    index_dim: int
    window: int
    page_size: int
    picked: int


SAMPLE_SIZES = {
    "tiny": _Sizes(64, 4, 32, 16, 32, 2, 32, 2, 32, 4, 4, 3),
    "odd": _Sizes(160, 6, 96, 34, 64, 3, 32, 3, 64, 5, 6, 7),
    "real": _Sizes(5120, 64, 512, 64, 1280, 8, 1024, 32, 128, 128, 128, 512),
}


def sample_attention(
    generator: torch.Generator, size: SampleSize, *, indexes: bool = False, ratio: int = 0
) -> AttentionWeights:
    """Random weights of a layer with stored weights in checkpoint bytes; `ratio` > 0 makes it a KV source."""
    z = SAMPLE_SIZES[size]
    latent_rows, gate_rows = (z.head_dim if ratio else 0), (z.head_dim if ratio > 1 else 0)
    index_heads, index_dim = (z.index_heads, z.index_dim) if indexes else (0, 0)
    side_rows = latent_rows + gate_rows + index_heads
    query_parts = [(z.heads * z.head_dim, z.q_rank)]
    if indexes:
        query_parts.append((index_heads * index_dim, z.q_rank))
    stored: dict[str, Any] = {
        "qkv_a": fp8_weight(generator, (z.q_rank, z.hidden), (z.head_dim, z.hidden)),
        "q_b": fp8_weight(generator, *query_parts),
        "side": plain_weight(generator, "bf16", side_rows, z.hidden) if side_rows else None,
        "wo_a": fp8_weight(generator, (z.groups * z.o_rank, z.heads // z.groups * z.head_dim)),
        "wo_b": fp8_weight(generator, (z.hidden, z.groups * z.o_rank)),
    }
    return AttentionWeights(
        **stored,
        q_norm=1 + 0.1 * normal(generator, z.q_rank),
        kv_norm=1 + 0.1 * normal(generator, z.head_dim),
        sink=normal(generator, z.heads),
        heads=z.heads,
        head_dim=z.head_dim,
        q_rank=z.q_rank,
        groups=z.groups,
        index_heads=index_heads,
        index_dim=index_dim,
        latent_rows=latent_rows,
        gate_rows=gate_rows,
        window=z.window,
        window_format=RowFormat(FP8_BLOCK32, z.head_dim),
        norm_eps=1e-20,
        quantise=True,
    )


def _project_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    z = SAMPLE_SIZES[size]
    roles = {
        "window only": {},
        "index source": {"indexes": True},
        "ratio 1 source": {"indexes": True, "ratio": 1},
        "ratio 2 source": {"indexes": True, "ratio": 2},
    }
    for number, (role, options) in enumerate(roles.items()):
        weights = sample_attention(generator, size, **options)  # type: ignore[arg-type]
        for label, rows in row_counts(size):
            if number not in (0, 3) and rows not in (0, 1):
                continue
            angles = normal(generator, rows, z.rotated // 2, scale=10.0)
            arguments = {
                "rows": RowsInput(normal(generator, rows, z.hidden)),
                "weights": weights,
                "cos": angles.cos(),
                "sin": angles.sin(),
            }
            yield Sample(f"{label}, {role}", arguments, ("rows", "cos", "sin"))


@composite(
    samples=_project_samples,
    uses=("linear", "linear_accumulate", "rms_norm", "quantise_rows", "rope", "pack_rows"),
    tolerance=Tolerance(rtol=2e-5, flip_share=1e-3),
    activations=("rows",),
)
def qkv_project(kernels: Any) -> Callable[..., Projected]:
    """All projections of the normed hidden: queries, window row, indexer and compressor inputs.

    Call: (rows [T, d], weights: AttentionWeights, cos, sin at each row's position) -> Projected.
    """
    linear, linear_accumulate, rms_norm = kernels.linear, kernels.linear_accumulate, kernels.rms_norm
    quantise_rows, rope, pack = kernels.quantise_rows, kernels.rope, kernels.pack_rows

    def qkv_project(rows: Rows, weights: AttentionWeights, cos: Tensor, sin: Tensor) -> Projected:
        latent, key_value = linear(rows, weights.qkv_a).split((weights.q_rank, weights.head_dim), dim=-1)
        query_latent = quantise_rows(rms_norm(latent, weights.q_norm, weights.norm_eps), weights.quantise)
        index_width = weights.index_heads * weights.index_dim
        widths = (weights.heads * weights.head_dim, index_width)
        query, index_query = linear(query_latent, weights.q_b).split(widths, dim=-1)
        query = rope(query.unflatten(-1, (weights.heads, weights.head_dim)), cos, sin)
        key_value = rope(rms_norm(key_value, weights.kv_norm, weights.norm_eps), cos, sin)
        compress_latent = compress_gate = index_weights = None
        if weights.side is not None:
            parts = (weights.latent_rows, weights.gate_rows, weights.index_heads)
            compress_latent, compress_gate, raw_weights = linear_accumulate(rows, weights.side).split(parts, dim=-1)
            index_weights = raw_weights.to(rows.values.dtype)
        return Projected(
            query=query,
            window_rows=pack(key_value, weights.window_format),
            index_query=index_query.unflatten(-1, (weights.index_heads, -1)) if index_width else None,
            index_weights=index_weights if index_width else None,
            latent=compress_latent if weights.latent_rows else None,
            gate=compress_gate if weights.gate_rows else None,
        )

    return qkv_project


def _attend_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    heads, width, keys = {"tiny": (4, 32, 12), "odd": (3, 37, 29), "real": (64, 512, 640)}[size]
    for label, rows in row_counts(size):
        valid = torch.rand(rows, keys, generator=generator) < 0.8
        arguments = {
            "query": normal(generator, rows, heads, width),
            "keys": normal(generator, rows, keys, width),
            "valid": valid,
            "sink": normal(generator, heads),
            "scale": width**-0.5,
        }
        yield Sample(label, arguments, ("query", "keys", "valid"))
        if rows == 1:
            yield Sample("nothing visible", {**arguments, "valid": torch.zeros_like(valid)}, ("query", "keys", "valid"))
            # Small integers, so that the large scores themselves are exact.
            exact = {name: arguments[name].mul(2).round() for name in ("query", "keys")}
            yield Sample("large scores", {**arguments, **exact, "scale": 8.0}, ("query", "keys", "valid"))


@op(
    samples=_attend_samples,
    determinism=Determinism.RUN_TO_RUN,
    tolerance=Tolerance(rtol=5e-6, bf16_rtol=1.6e-2),
    activations=("query", "keys"),
)
def attend(query: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float) -> Tensor:
    """One softmax over a row's keys, which are values too; the sink joins the denominator only.

    In bfloat16 the probabilities meet the values rounded to bfloat16, sums stay fp32.

    Args:
        query: [T, H, D]; keys: [T, K, D] compute dtype; valid: [T, K] bool; sink: [H] logits, not scaled.

    Returns:
        [T, H, D] compute dtype; zeros for a row that sees nothing.
    """
    accumulate = accumulate_dtype(query.dtype)
    wide = keys.to(accumulate)
    scores = torch.bmm(query.to(accumulate), wide.transpose(1, 2)) * scale
    scores = scores.masked_fill_(~valid[:, None, :], -torch.inf)
    sink = sink.to(accumulate)[None, :, None]
    largest = torch.maximum(scores.amax(-1, keepdim=True), sink)
    shares = torch.exp(scores - largest)
    denominator = shares.sum(-1, keepdim=True) + torch.exp(sink - largest)
    return (torch.bmm(shares.to(query.dtype).to(accumulate), wide) / denominator).to(query.dtype)


def _sparse_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    z = SAMPLE_SIZES[size]
    weights = sample_attention(generator, size)
    ring_length = z.window + 3
    for shape in step_shapes(size, z.window):
        for ratio in (0, 1, 2):
            step = random_step(generator, shape, page_size=z.page_size, ring_length=ring_length)
            rows, idle, slots = step.slots.shape[0], step.slots < 0, step.page_table.shape[0]
            needed = window_reads(step.slots, step.first_positions, slots, ring_length, z.window)
            arguments = {
                "query": normal(generator, rows, z.heads, z.head_dim),
                "window_rows": pack_rows(normal(generator, rows, z.head_dim), weights.window_format),
                "ring": pack_rows(normal(generator, slots, ring_length, z.head_dim), weights.window_format),
                "step": step,
                "weights": weights,
                "selection": None,
                "cache": None,
            }
            unread = {"query": idle, "window_rows": idle, "ring": ~needed}
            if ratio:
                sizes = {"width": z.head_dim, "index_width": z.index_dim, "ratio": ratio, "page_size": z.page_size}
                cache = sample_cache(generator, step, **sizes)
                selection = _random_selection(generator, step, cache, z.picked)
                arguments |= {"selection": selection, "cache": cache}
                unread["cache.entries"] = unread_entries(cache, selection.physical)
            row_args = ("query", "window_rows", "step", "selection")
            yield Sample(f"{shape.label}, ratio {ratio}", arguments, row_args, unread, idle)


def _random_selection(generator: torch.Generator, step: StepInputs, cache: EntryCache, picked: int) -> Selection:
    """Some of the entries that each row sees."""
    visible = (step.positions + 1) // cache.ratio
    count = max(picked, int(visible.max()) if visible.numel() else 0)
    order = torch.rand(visible.shape[0], count, generator=generator)
    order = order.masked_fill(torch.arange(count) >= visible[:, None], 2.0)
    ranked = order.sort(dim=-1)
    chosen = ranked.indices[:, :picked].masked_fill(ranked.values[:, :picked] > 1, count).sort(dim=-1).values
    entries = chosen.masked_fill(chosen == count, -1)
    return Selection(entries, resolve_entries(entries, step.slots, step.page_table, cache.entries_per_page))


@composite(
    samples=_sparse_samples,
    uses=("gather_window", "unpack_rows", "gather_entries", "attend"),
    determinism=Determinism.RUN_TO_RUN,
    tolerance=Tolerance(rtol=5e-6, bf16_rtol=1.6e-2),
    activations=("query",),
)
def sparse_attention(kernels: Any) -> Callable[..., Tensor]:
    """Attention of each row over its window and its picked entries.

    Call: (query [T, H, D], window_rows [T, bytes], ring [slots, length, bytes], step: StepInputs,
    weights: AttentionWeights, selection or None, cache: EntryCache or None) -> [T, H, D] compute dtype.
    """
    gather_window, gather_entries = kernels.gather_window, kernels.gather_entries
    unpack, attend = kernels.unpack_rows, kernels.attend

    def block(
        span: slice,
        query: Tensor,
        window_rows: Tensor,
        ring: Tensor,
        step: Any,
        weights: AttentionWeights,
        selection: Selection | None,
        cache: EntryCache | None,
    ) -> Tensor:
        rows = (step.slots[span], step.positions[span], step.first_positions[span], step.first_rows[span])
        packed, valid = gather_window(ring, window_rows, *rows, step.window_low[span], weights.window)
        keys = unpack(packed, weights.window_format, query.dtype)
        if selection is not None and cache is not None:
            physical = selection.physical[span]
            picked = unpack(gather_entries(cache.entries, physical), cache.entry_format, query.dtype)
            keys = torch.cat((keys, picked), dim=1)
            valid = torch.cat((valid, physical >= 0), dim=1)
        return attend(query[span], keys, valid, weights.sink, weights.scale)

    def sparse_attention(
        query: Tensor,
        window_rows: Tensor,
        ring: Tensor,
        step: Any,
        weights: AttentionWeights,
        selection: Selection | None,
        cache: EntryCache | None,
    ) -> Tensor:
        arguments = (query, window_rows, ring, step, weights, selection, cache)
        spans = [slice(start, start + ATTENTION_ROW_BLOCK) for start in range(0, query.shape[0], ATTENTION_ROW_BLOCK)]
        if len(spans) <= 1:
            return block(slice(None), *arguments)
        return torch.cat([block(span, *arguments) for span in spans])

    return sparse_attention


def _output_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    z = SAMPLE_SIZES[size]
    weights = sample_attention(generator, size)
    for label, rows in row_counts(size):
        angles = normal(generator, rows, z.rotated // 2, scale=10.0)
        attended = normal(generator, rows, z.heads, z.head_dim)
        arguments = {"attended": attended, "weights": weights, "cos": angles.cos(), "sin": angles.sin()}
        yield Sample(label, arguments, ("attended", "cos", "sin"))


@composite(
    samples=_output_samples,
    uses=("rope", "grouped_linear", "quantise_rows", "linear"),
    tolerance=Tolerance(rtol=2e-5, flip_share=1e-3),
    activations=("attended",),
)
def attention_output(kernels: Any) -> Callable[..., Tensor]:
    """Undo the rotation that rides in the values, then the grouped and the final output linear.

    Call: (attended [T, H, D], weights: AttentionWeights, cos, sin at each row's position) -> [T, d] compute dtype.
    """
    rope, grouped_linear = kernels.rope, kernels.grouped_linear
    quantise_rows, linear = kernels.quantise_rows, kernels.linear

    def attention_output(attended: Tensor, weights: AttentionWeights, cos: Tensor, sin: Tensor) -> Tensor:
        plain = rope(attended, cos, sin, inverse=True).flatten(1).unflatten(-1, (weights.groups, -1))
        return linear(quantise_rows(grouped_linear(plain, weights.wo_a), weights.quantise), weights.wo_b)

    return attention_output

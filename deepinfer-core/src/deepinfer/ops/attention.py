"""Attention: projections, sparse attention over window and picked entries, output (spec/model 3.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.compress import EntryCache
from deepinfer.ops.contract import Determinism, Sample, SampleSize, Tolerance, composite, op
from deepinfer.ops.handles import DenseWeight, Rows, Selection, accumulate_dtype
from deepinfer.ops.quant import RowFormat
from deepinfer.ops.sample_inputs import normal, row_counts

__all__ = [
    "AttentionWeights",
    "Projected",
    "attend",
    "attention_output",
    "qkv_project",
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


@composite(
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
            yield Sample("large scores", {**arguments, "scale": 30.0}, ("query", "keys", "valid"))


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


@composite(
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


@composite(
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

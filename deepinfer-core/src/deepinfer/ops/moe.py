"""Mixture of experts: routing, expert feed-forward and combination (spec/model 3.10)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, Tolerance, composite, op
from deepinfer.ops.elementary import silu, softplus
from deepinfer.ops.handles import DenseWeight, ExpertWeights, Rows, accumulate_dtype
from deepinfer.ops.quant import FP8_BLOCK32, RowFormat
from deepinfer.ops.sample_inputs import RawWeight, RowsInput, fp4_bytes, fp8_weight, normal, plain_weight, row_counts

__all__ = [
    "MoeWeights",
    "expert_ffn",
    "gated_activation",
    "moe_block",
    "moe_combine",
    "moe_dispatch",
    "route",
    "sample_moe",
]

ROUTER_SUM_GUARD = 1e-20

_BLOCK_SIZES = {"tiny": (4, 64, 64, 2), "odd": (5, 96, 160, 3), "real": (8, 2304, 5120, 6)}
"""Experts, their width, hidden size and choices per token of samples."""


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Weights of one mixture-of-experts block.

    Attributes:
        gate: linear [E, d]; bias, image_bias: [E] float32, for selection only.
        experts: routed experts.
        shared_gate_up: fused linear [2 I, d] (w1 rows, then w3 rows), shared_down: linear [d, I].
        top_k, scale, limit: experts per token, routed scaling factor, SwiGLU clamp.
        quantise: whether inputs of quantised linears are FP8-rounded.
    """

    gate: DenseWeight
    bias: Tensor
    image_bias: Tensor
    experts: ExpertWeights
    shared_gate_up: DenseWeight
    shared_down: DenseWeight
    top_k: int
    scale: float
    limit: float
    quantise: bool


def _route_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    experts, k = {"tiny": (8, 2), "odd": (17, 3), "real": (384, 6)}[size]
    fixed = {"bias": normal(generator, experts, scale=0.1), "image_bias": normal(generator, experts, scale=0.1)}
    for label, rows in row_counts(size):
        is_image = torch.rand(rows, generator=generator) < 0.3
        arguments = {"logits": normal(generator, rows, experts, scale=2.0), "is_image": is_image, **fixed}
        yield Sample(label, {**arguments, "top_k": k, "scale": 1.5}, ("logits", "is_image"))
    ties = {"logits": torch.zeros(3, experts), "is_image": torch.zeros(3, dtype=torch.bool)}
    zero = {"bias": torch.zeros(experts), "image_bias": torch.zeros(experts)}
    yield Sample("all equal", {**ties, **zero, "top_k": k, "scale": 1.5}, ("logits", "is_image"))
    # Below -40 the scores of all chosen experts may be subnormal numbers, whose few bits say nothing about a kernel.
    logits = (60 * normal(generator, 5, experts)).clamp(min=-40)
    large = {"logits": logits, "is_image": torch.zeros(5, dtype=torch.bool), **fixed}
    yield Sample("large logits", {**large, "top_k": k, "scale": 1.5}, ("logits", "is_image"))


@op(samples=_route_samples, tolerance=Tolerance(rtol=1e-5, bf16_rtol=1e-5))
def route(
    logits: Tensor, bias: Tensor, image_bias: Tensor, is_image: Tensor, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Experts with the largest sqrt(softplus(logit)) + bias, lower index first on ties, and their weights.

    The bias decides the selection only; weights are the chosen scores, normalised and times `scale`.

    Args:
        logits: [T, E] accumulate dtype.
        bias, image_bias: [E]; image positions use the latter.
        is_image: [T] bool.

    Returns:
        ids [T, k] int64 in descending order of score + bias, weights [T, k] in the dtype of logits.
    """
    scores = torch.sqrt(softplus(logits))
    ranked = scores + torch.where(is_image[:, None], image_bias, bias).to(scores.dtype)
    ids = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = scores.gather(-1, ids)
    return ids, chosen / (chosen.sum(-1, keepdim=True) + ROUTER_SUM_GUARD) * scale


def _activation_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    width = {"tiny": 64, "odd": 96, "real": 2304}[size]
    for label, rows in row_counts(size):
        arguments = {"gate_up": normal(generator, rows, 2 * width, scale=8.0), "limit": 10.0}
        yield Sample(label, {**arguments, "weights": torch.rand(rows, generator=generator)}, ("gate_up", "weights"))
        yield Sample(f"{label}, no weights", {**arguments, "weights": None}, ("gate_up",))


@op(samples=_activation_samples, activations=("gate_up",))
def gated_activation(gate_up: Tensor, limit: float, weights: Tensor | None) -> Tensor:
    """Clamped SwiGLU: silu(min(gate, limit)) * clamp(up, -limit, limit), times the routing weight if given.

    Args:
        gate_up: [T, 2 I] compute dtype, gate channels first.
        weights: [T] accumulate dtype, or None for the shared expert.

    Returns:
        [T, I] compute dtype, one rounding.
    """
    gate, up = gate_up.to(accumulate_dtype(gate_up.dtype)).chunk(2, dim=-1)
    hidden = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    if weights is not None:
        hidden = weights[:, None].to(hidden.dtype) * hidden
    return hidden.to(gate_up.dtype)


def _raw_experts(generator: torch.Generator, experts: int, width: int, d: int) -> RawWeight:
    tensors: dict[str, Tensor] = {}
    for expert in range(experts):
        for name, (n, k) in (("w1", (width, d)), ("w3", (width, d)), ("w2", (d, width))):
            packed, scales = fp4_bytes(generator, n, k)
            tensors |= {f"{expert}.{name}.weight": packed, f"{expert}.{name}.scale": scales}
    return RawWeight("fp4_experts", tensors, ((width, d), (width, d), (d, width)))


def _expert_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    experts, width, d, k = _BLOCK_SIZES[size]
    raw = _raw_experts(generator, experts, width, d)
    for label, rows in row_counts(size):
        ids = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(rows)]) if rows else None
        arguments = {
            "rows": RowsInput(normal(generator, rows, d)),
            "ids": ids if ids is not None else torch.zeros(0, k, dtype=torch.int64),
            "weights": torch.rand(rows, k, generator=generator),
            "experts": raw,
            "limit": 10.0,
            "quantise": True,
        }
        yield Sample(label, arguments, ("rows", "ids", "weights"))


def _dispatch_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    experts, k = {"tiny": (4, 2), "odd": (17, 3), "real": (384, 6)}[size]
    for label, rows in row_counts(size):
        ids = torch.rand(rows, experts, generator=generator).argsort(dim=1)[:, :k]
        ids = ids.masked_fill(torch.rand(rows, 1, generator=generator) < 0.2, -1)
        yield Sample(label, {"ids": ids, "experts": experts})
    yield Sample("one expert", {"ids": torch.full((5, 1), experts - 1), "experts": experts})
    yield Sample("nothing chosen", {"ids": torch.full((3, k), -1), "experts": experts})


@op(samples=_dispatch_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0))
def moe_dispatch(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs (row, choice) in the order of their experts, so that each expert meets one run of rows.

    Args:
        ids: [T, k] int64; -1 chooses nothing. experts: E.

    Returns:
        pairs [T k] int64, row * k + choice, by expert, then by pair, -1 at the end for those without an expert;
        counts [E] int64 of pairs per expert.
    """
    flat = ids.flatten()
    pairs = torch.where(flat >= 0, flat, experts).argsort(stable=True)
    counts = (flat[:, None] == torch.arange(experts, device=ids.device)).sum(0)
    kept = torch.arange(flat.shape[0], device=ids.device) < counts.sum()
    return torch.where(kept, pairs, -1), counts


@composite(
    uses=("moe_dispatch", "linear", "gated_activation", "round_rows"),
    samples=_expert_samples,
    determinism=Determinism.RUN_TO_RUN,
    tolerance=Tolerance(rtol=5e-6, flip_share=1e-3),
    activations=("rows",),
)
def expert_ffn(kernels: Any) -> Callable[..., Tensor]:
    """Outputs of the chosen experts, one per (row, choice); the routing weight is applied before the down product.

    Call: (rows [T, d], ids [T, k] int64 where -1 chooses nothing and gives zeros, weights [T, k], experts, limit,
    quantise: round the hidden activation to FP8 per 32 channels before the down product) -> [T, k, d] compute dtype.
    """
    dispatch, linear = kernels.moe_dispatch, kernels.linear
    activation, round_rows = kernels.gated_activation, kernels.round_rows

    def product(x: Tensor, values: Tensor) -> Tensor:
        result: Tensor = linear(Rows(x, x), DenseWeight(values, quantised=True))
        return result

    def expert_ffn(
        rows: Rows, ids: Tensor, weights: Tensor, experts: ExpertWeights, limit: float, quantise: bool
    ) -> Tensor:
        x = rows.quantised
        out = x.new_zeros(ids.numel(), x.shape[1])
        order, counts = dispatch(ids, experts.down.shape[0])
        for expert, pairs in enumerate(order.split([*counts.tolist(), int((order < 0).sum())])[:-1]):
            if pairs.shape[0] == 0:
                continue
            gate_up = product(x[pairs // ids.shape[1]], experts.gate_up[expert])
            hidden = activation(gate_up, limit, weights.flatten()[pairs])
            if quantise:
                hidden = round_rows(hidden, RowFormat(FP8_BLOCK32, hidden.shape[-1]))
            out[pairs] = product(hidden, experts.down[expert])
        return out.view(*ids.shape, x.shape[1])

    return expert_ffn


def _combine_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    k, d = {"tiny": (2, 64), "odd": (3, 67), "real": (6, 5120)}[size]
    for label, rows in row_counts(size):
        arguments = {"routed": normal(generator, rows, k, d), "shared": normal(generator, rows, d)}
        yield Sample(label, arguments, ("routed", "shared"))


@op(samples=_combine_samples, activations=("routed", "shared"))
def moe_combine(routed: Tensor, shared: Tensor) -> Tensor:
    """Sum of expert outputs in choice order, then the shared expert, with one rounding.

    Args:
        routed: [T, k, d], shared: [T, d], compute dtype.

    Returns:
        [T, d].
    """
    accumulate = accumulate_dtype(shared.dtype)
    total = routed[:, 0].to(accumulate)
    for choice in range(1, routed.shape[1]):
        total = total + routed[:, choice].to(accumulate)
    return (total + shared.to(accumulate)).to(shared.dtype)


def sample_moe(generator: torch.Generator, size: SampleSize) -> MoeWeights:
    """Random weights of a block, stored weights in checkpoint bytes."""
    experts, width, d, k = _BLOCK_SIZES[size]
    stored: dict[str, Any] = {
        "gate": plain_weight(generator, "bf16", experts, d),
        "experts": _raw_experts(generator, experts, width, d),
        "shared_gate_up": fp8_weight(generator, (width, d), (width, d)),
        "shared_down": fp8_weight(generator, (d, width)),
    }
    return MoeWeights(
        **stored,
        bias=normal(generator, experts, scale=0.1),
        image_bias=normal(generator, experts, scale=0.1),
        top_k=k,
        scale=1.5,
        limit=10.0,
        quantise=True,
    )


def _block_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    weights, d = sample_moe(generator, size), _BLOCK_SIZES[size][2]
    for label, rows in row_counts(size):
        arguments = {
            "rows": RowsInput(normal(generator, rows, d)),
            "weights": weights,
            "is_image": torch.rand(rows, generator=generator) < 0.3,
        }
        live = torch.rand(rows, generator=generator) < 0.9
        idle = ~live
        yield Sample(label, {**arguments, "live": live}, ("rows", "is_image", "live"), {"rows.values": idle}, idle)


@composite(
    uses=("linear_accumulate", "route", "expert_ffn", "linear", "gated_activation", "quantise_rows", "moe_combine"),
    samples=_block_samples,
    tolerance=Tolerance(rtol=1e-5, flip_share=1e-3),
    activations=("rows",),
)
def moe_block(kernels: Any) -> Callable[[Rows, MoeWeights, Tensor, Tensor], Tensor]:
    """Routed and shared experts of a block: (rows [T, d], weights, is_image, live [T] bool) -> [T, d] compute dtype.

    A row that is not live (padding of a captured graph) chooses no expert, so it costs no weight reads.
    """
    linear_accumulate, linear, quantise_rows = kernels.linear_accumulate, kernels.linear, kernels.quantise_rows
    route, expert_ffn = kernels.route, kernels.expert_ffn
    activation, combine = kernels.gated_activation, kernels.moe_combine

    def moe_block(rows: Rows, weights: MoeWeights, is_image: Tensor, live: Tensor) -> Tensor:
        logits = linear_accumulate(rows, weights.gate)
        ids, shares = route(logits, weights.bias, weights.image_bias, is_image, weights.top_k, weights.scale)
        ids = torch.where(live[:, None], ids, -1)
        routed = expert_ffn(rows, ids, shares, weights.experts, weights.limit, weights.quantise)
        hidden = activation(linear(rows, weights.shared_gate_up), weights.limit, None)
        shared = linear(quantise_rows(hidden, weights.quantise), weights.shared_down)
        return combine(routed, shared)

    return moe_block

"""Manifold-constrained hyper-connections in their shifted, single-pass form (spec/model 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.contract import Sample, SampleSize, Tolerance, composite, op
from deepinfer.ops.elementary import sigmoid
from deepinfer.ops.handles import DenseWeight, Mixes, Rows, accumulate_dtype
from deepinfer.ops.sample_inputs import RawWeight, normal, row_counts

__all__ = [
    "HyperConnectionWeights",
    "hyper_connection_boundary",
    "hyper_connection_collapse",
    "hyper_connection_expand",
    "hyper_connection_head",
    "hyper_connection_mixes",
    "initial_mixes",
    "mixes_from_logits",
    "sample_boundary",
]

POST_MULTIPLIER = 2.0


@dataclass(frozen=True, slots=True)
class HyperConnectionWeights:
    """Parameters of one sub-layer's boundary.

    Attributes:
        fn: linear [(2 + m) m, m d] float32 from flattened streams to mix logits.
        base: [(2 + m) m] and scale: [3] (pre, post, comb), float32.
        norm: [d] weight of the RMS norm in front of the sub-layer.
        iterations: Sinkhorn iterations; eps: added to pre mixes and in Sinkhorn; norm_eps: of both norms.
        quantise: whether the normed rows are also needed in quantised form.
    """

    fn: DenseWeight
    base: Tensor
    scale: Tensor
    norm: Tensor
    iterations: int
    eps: float
    norm_eps: float
    quantise: bool

    @property
    def streams(self) -> int:
        """Number of residual streams m, from the (2 + m) m mix logits."""
        return round((1 + self.base.shape[0]) ** 0.5) - 1


def initial_mixes(rows: int, streams: int, dtype: torch.dtype, device: torch.device) -> Mixes:
    """Mixes before the first sub-layer: it reads stream 0, and expanding with them changes nothing."""
    pre = torch.zeros(rows, streams, dtype=dtype, device=device)
    pre[:, 0] = 1.0
    identity = torch.eye(streams, dtype=dtype, device=device).expand(rows, -1, -1).contiguous()
    return Mixes(pre, torch.zeros_like(pre), identity)


def _logit_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for label, rows in row_counts(size):
        arguments = {"logits": normal(generator, rows, 24), "base": normal(generator, 24, scale=0.5)}
        yield Sample(label, {**arguments, "scale": torch.ones(3), "iterations": 20, "eps": 1e-6}, ("logits",))
    hard = normal(generator, 9, 24, scale=8.0)
    flat = {"logits": hard, "base": torch.zeros(24), "scale": torch.ones(3)}
    yield Sample("hard logits", {**flat, "iterations": 20, "eps": 1e-6}, ("logits",))


@op(samples=_logit_samples, tolerance=Tolerance(rtol=2e-5, bf16_rtol=2e-5))
def mixes_from_logits(logits: Tensor, base: Tensor, scale: Tensor, iterations: int, eps: float) -> Mixes:
    """Pre, post and Sinkhorn-normalised comb mixes of scaled logits.

    One softmax and column step, then `iterations - 1` row and column steps; the last step normalises columns.

    Args:
        logits: [T, (2 + m) m] accumulate dtype, in the order pre, post, comb (row-major source, destination).
        base: [(2 + m) m], scale: [3].
    """
    m = round((1 + logits.shape[-1]) ** 0.5) - 1
    base, scale = base.to(logits.dtype), scale.to(logits.dtype)
    pre = sigmoid(logits[:, :m] * scale[0] + base[:m]) + eps
    post = POST_MULTIPLIER * sigmoid(logits[:, m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = (logits[:, 2 * m :] * scale[2] + base[2 * m :]).unflatten(-1, (m, m))
    comb = torch.softmax(comb, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return Mixes(pre, post, comb)


def _raw_fn(generator: torch.Generator, d: int) -> RawWeight:
    fn = normal(generator, 24, 4 * d, scale=(4 * d) ** -0.5)
    return RawWeight("float32", {"fn": fn}, ((24, 4 * d),))


def _mixes_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    d = {"tiny": 64, "odd": 96, "real": 5120}[size]
    fixed = {"base": normal(generator, 24, scale=0.5), "scale": torch.ones(3), "iterations": 20, "eps": 1e-6}
    for label, rows in row_counts(size):
        arguments = {"streams": normal(generator, rows, 4, d), "fn": _raw_fn(generator, d), **fixed}
        yield Sample(label, {**arguments, "norm_eps": 1e-20}, ("streams",))


@composite(
    uses=("linear_accumulate", "mixes_from_logits"),
    samples=_mixes_samples,
    tolerance=Tolerance(rtol=2e-5, bf16_rtol=2e-5),
    activations=("streams",),
)
def hyper_connection_mixes(kernels: Any) -> Callable[..., Mixes]:
    """Mixes of a sub-layer from the streams before it: one norm and one linear over all streams, then Sinkhorn."""
    linear_accumulate, from_logits = kernels.linear_accumulate, kernels.mixes_from_logits

    def hyper_connection_mixes(
        streams: Tensor, fn: DenseWeight, base: Tensor, scale: Tensor, iterations: int, eps: float, norm_eps: float
    ) -> Mixes:
        flat = streams.flatten(1).to(accumulate_dtype(streams.dtype))
        normaliser = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
        logits = linear_accumulate(Rows(flat, flat), fn) * normaliser
        return from_logits(logits, base, scale, iterations, eps)

    return hyper_connection_mixes


def _random_mixes(generator: torch.Generator, rows: int) -> Mixes:
    comb = torch.softmax(normal(generator, rows, 4, 4), dim=-1)
    return Mixes(torch.rand(rows, 4, generator=generator), 2 * torch.rand(rows, 4, generator=generator), comb)


def _stream_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    d = {"tiny": 64, "odd": 67, "real": 5120}[size]
    for label, rows in row_counts(size):
        arguments = {"streams": normal(generator, rows, 4, d), "branch": normal(generator, rows, d)}
        yield Sample(label, {**arguments, "mixes": _random_mixes(generator, rows)}, ("streams", "branch", "mixes"))


@op(samples=_stream_samples, activations=("streams", "branch"))
def hyper_connection_expand(streams: Tensor, branch: Tensor, mixes: Mixes) -> Tensor:
    """Spread a sub-layer's output: new stream j = post[j] branch + sum_i comb[i, j] stream[i], one rounding.

    Args:
        streams: [T, m, d] before the sub-layer, branch: [T, d], both in the compute dtype.

    Returns:
        [T, m, d].
    """
    wide = streams.to(mixes.comb.dtype)
    spread = mixes.post[:, :, None] * branch.to(wide.dtype)[:, None, :]
    for shares, stream in zip(mixes.comb[..., None].unbind(1), wide[:, :, None].unbind(1), strict=True):
        spread += shares * stream
    return spread.to(streams.dtype)


def _collapse_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for sample in _stream_samples(size, generator):
        pre = sample.kwargs["mixes"].pre
        yield Sample(sample.label, {"streams": sample.kwargs["streams"], "pre": pre}, ("streams", "pre"))


@op(samples=_collapse_samples, activations=("streams",))
def hyper_connection_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Input of a sub-layer: sum_i pre[i] stream[i], one rounding.

    Args:
        streams: [T, m, d] compute dtype.
        pre: [T, m] mixes of the *previous* sub-layer.

    Returns:
        [T, d].
    """
    first, *others = (pre[:, :, None] * streams.to(pre.dtype)).unbind(1)
    collapsed = first
    for share in others:
        collapsed = collapsed + share
    return collapsed.to(streams.dtype)


def sample_boundary(generator: torch.Generator, d: int) -> HyperConnectionWeights:
    """Random weights of a boundary, the linear in checkpoint bytes."""
    fn: Any = _raw_fn(generator, d)
    return HyperConnectionWeights(
        fn=fn,
        base=normal(generator, 24, scale=0.5),
        scale=torch.ones(3),
        norm=1 + 0.1 * normal(generator, d),
        iterations=20,
        eps=1e-6,
        norm_eps=1e-20,
        quantise=True,
    )


def _boundary_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    d = {"tiny": 64, "odd": 96, "real": 5120}[size]
    weights = sample_boundary(generator, d)
    for sample in _stream_samples(size, generator):
        rows = sample.kwargs["streams"].shape[0]
        arguments = {"streams": normal(generator, rows, 4, d), "previous": sample.kwargs["mixes"], "weights": weights}
        row_args = ("streams", "branch", "previous")
        yield Sample(sample.label, {**arguments, "branch": normal(generator, rows, d)}, row_args)
        yield Sample(f"{sample.label}, no branch", {**arguments, "branch": None}, row_args)


@composite(
    uses=(
        "hyper_connection_expand",
        "hyper_connection_mixes",
        "hyper_connection_collapse",
        "rms_norm",
        "quantise_rows",
    ),
    samples=_boundary_samples,
    tolerance=Tolerance(rtol=2e-5, flip_share=1e-3),
    activations=("streams", "branch"),
    aliases=("streams",),
)
def hyper_connection_boundary(kernels: Any) -> Callable[..., tuple[Tensor, Rows, Mixes]]:
    """Everything between two sub-layers: expand the last one, mix, collapse, norm and quantise for the next.

    Call: (streams [T, m, d], branch [T, d] or None, previous: Mixes, weights) ->
    (streams [T, m, d] before the next sub-layer, its input Rows [T, d], its Mixes).
    The collapse uses the *previous* sub-layer's pre mix; the new pre mix is for the sub-layer after.
    """
    expand, mixes_of = kernels.hyper_connection_expand, kernels.hyper_connection_mixes
    collapse, rms_norm, quantise = kernels.hyper_connection_collapse, kernels.rms_norm, kernels.quantise_rows

    def hyper_connection_boundary(
        streams: Tensor, branch: Tensor | None, previous: Mixes, weights: HyperConnectionWeights
    ) -> tuple[Tensor, Rows, Mixes]:
        if branch is not None:
            streams = expand(streams, branch, previous)
        mixes = mixes_of(
            streams, weights.fn, weights.base, weights.scale, weights.iterations, weights.eps, weights.norm_eps
        )
        normed = rms_norm(collapse(streams, previous.pre), weights.norm, weights.norm_eps)
        return streams, quantise(normed, weights.quantise), mixes

    return hyper_connection_boundary


def _head_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for sample in _stream_samples(size, generator):
        d = sample.kwargs["streams"].shape[-1]
        arguments = {**sample.kwargs, "norm": 1 + 0.1 * normal(generator, d), "norm_eps": 1e-20}
        yield Sample(sample.label, {**arguments, "rows": None}, sample.row_args)
        if count := sample.kwargs["streams"].shape[0]:
            picked = torch.tensor([count - 1, -1, 0])
            yield Sample(f"{sample.label}, picked rows", {**arguments, "rows": picked})


@composite(
    uses=("hyper_connection_expand", "hyper_connection_collapse", "rms_norm"),
    samples=_head_samples,
    activations=("streams", "branch"),
)
def hyper_connection_head(kernels: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """After the last sub-layer: expand, collapse with its own pre mix, norm, for the rows that are asked for.

    Call: (streams [T, m, d], branch [T, d], mixes, rows [S] int64 or None for all, norm [d], norm_eps) ->
    (collapsed [S, d], normed [S, d]). A row of -1 gives what row 0 gives; nobody may use it.
    """
    expand, collapse, rms_norm = (
        kernels.hyper_connection_expand,
        kernels.hyper_connection_collapse,
        kernels.rms_norm,
    )

    def hyper_connection_head(
        streams: Tensor, branch: Tensor, mixes: Mixes, rows: Tensor | None, norm: Tensor, norm_eps: float
    ) -> tuple[Tensor, Tensor]:
        if rows is not None:
            index = rows.clamp(min=0)
            streams, branch = streams[index], branch[index]
            mixes = Mixes(mixes.pre[index], mixes.post[index], mixes.comb[index])
        collapsed = collapse(expand(streams, branch, mixes), mixes.pre)
        return collapsed, rms_norm(collapsed, norm, norm_eps)

    return hyper_connection_head

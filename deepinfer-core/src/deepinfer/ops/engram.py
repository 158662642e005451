"""N-gram hash memory (spec/model 3.9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, Tolerance, composite, op
from deepinfer.ops.elementary import sigmoid
from deepinfer.ops.handles import DenseWeight, EngramTable, accumulate_dtype
from deepinfer.ops.quant import exponent_values
from deepinfer.ops.sample_inputs import RawWeight, fp8_weight, normal, row_counts, uniform_ids

__all__ = ["EngramHash", "EngramWeights", "engram_gate", "engram_gather", "engram_hash", "engram_inject"]

GATE_FLOOR = 1e-6


@dataclass(frozen=True, slots=True)
class EngramHash:
    """Hash constants of one n-gram layer, int64.

    Attributes:
        token_map: [V] raw id -> compressed id.
        multipliers: [G] odd multipliers, one per look-back distance 0 .. G - 1.
        primes, offsets: [(G - 1) heads] bucket count and first row of each sub-table, (n, head) order.
        pad: compressed id that fills slots before the sequence start or behind an image.
    """

    token_map: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor
    pad: int


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """Weights of one n-gram layer: where its table lies, the projection, the per-channel gate product, eps."""

    table: EngramTable
    projection: DenseWeight
    gate: Tensor
    norm_eps: float
    quantise: bool


def _hash(generator: torch.Generator, vocab: int, grams: int, heads: int) -> EngramHash:
    primes = torch.tensor([1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069])
    primes = primes[: (grams - 1) * heads]
    multipliers = 2 * uniform_ids(generator, (2**63 - 1) // vocab // 2, grams) + 1
    token_map = uniform_ids(generator, vocab, vocab)
    return EngramHash(token_map, multipliers, primes, torch.cumsum(primes, 0) - primes, pad=2)


def _hash_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    vocab, heads = {"tiny": (64, 2), "odd": (97, 3), "real": (99092, 4)}[size]
    constants = _hash(generator, vocab, 4, heads)
    for label, rows in row_counts(size):
        depth = torch.randint(0, 4, (rows, 1), generator=generator)
        history = torch.where(torch.arange(3) < depth, uniform_ids(generator, vocab, rows, 3), -1)
        live = torch.rand(rows, generator=generator) < 0.8
        arguments = {"tokens": uniform_ids(generator, vocab, rows), "history": history, "live": live}
        yield Sample(label, {**arguments, "constants": constants}, ("tokens", "history", "live"))
    padding = {"tokens": torch.tensor([-1, 3]), "history": torch.full((2, 3), -1), "live": torch.tensor([False, True])}
    yield Sample("padding rows", {**padding, "constants": constants}, ("tokens", "history", "live"))


@op(samples=_hash_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0))
def engram_hash(tokens: Tensor, history: Tensor, live: Tensor, constants: EngramHash) -> Tensor:
    """Table rows of every n-gram that ends at a row, in (n, head) order.

    Args:
        tokens: [T] int64 raw ids.
        history: [T, G - 1] int64 raw ids at distance 1 .. G - 1; -1 before the sequence start or at an image token.
            A -1 blocks everything behind it too.
        live: [T] bool; False for image and padding rows, whose slots are all pad.

    Returns:
        [T, (G - 1) heads] int64.
    """
    grams = constants.multipliers.shape[0]
    known = torch.cumprod((torch.cat((live[:, None], history >= 0), dim=1) & live[:, None]).to(torch.int64), dim=1)
    raw = torch.cat((tokens[:, None], history), dim=1).clamp(min=0)
    compressed = torch.where(known.bool(), constants.token_map[raw], constants.pad)
    products = compressed * constants.multipliers
    mixed, columns = products[:, 0], []
    heads = constants.primes.shape[0] // (grams - 1)
    for n in range(1, grams):
        mixed = mixed ^ products[:, n]
        span = slice((n - 1) * heads, n * heads)
        columns.append(mixed[:, None] % constants.primes[span] + constants.offsets[span])
    return torch.cat(columns, dim=1)


def _table(generator: torch.Generator, rows: int, width: int) -> Any:
    codes = normal(generator, rows, width, scale=64.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.randint(118, 122, (rows, width // 32), generator=generator, dtype=torch.uint8)
    return RawWeight("fp8_rows", {"weight": codes, "scale": scales}, ((rows, width),))


def _gather_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    entries, width, columns = {"tiny": (50, 32, 6), "odd": (53, 96, 5), "real": (4096, 256, 24)}[size]
    table = _table(generator, entries, width)
    for label, rows in row_counts(size):
        ids = uniform_ids(generator, entries, rows, columns)
        yield Sample(label, {"table": table, "ids": ids, "dtype": torch.float32}, ("ids",))


@op(samples=_gather_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0), activations=("dtype",))
def engram_gather(table: EngramTable, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Exact values of table rows, side by side.

    Args:
        table: codes [rows, De] and scales [rows, De / 32], possibly memory-mapped.
        ids: [T, columns] int64.

    Returns:
        [T, columns De] in `dtype`.
    """
    codes = table.codes.view(torch.uint8)[ids].view(torch.float8_e4m3fn).to(torch.float32)
    scales = exponent_values(table.scales[ids])
    return (codes.unflatten(-1, (-1, 32)) * scales[..., None]).flatten(1).to(dtype)


def _gate_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    d = {"tiny": 64, "odd": 67, "real": 5120}[size]
    fixed = {"gate": normal(generator, 4, d), "norm_eps": 1e-20}
    for label, rows in row_counts(size):
        arguments = {"streams": normal(generator, rows, 4, d), "key_value": normal(generator, rows, 5 * d)}
        live = torch.rand(rows, generator=generator) < 0.8
        yield Sample(label, {**arguments, "live": live, **fixed}, ("streams", "key_value", "live"))
    zero_key = {"streams": normal(generator, 2, 4, d), "key_value": torch.zeros(2, 5 * d)}
    live = torch.ones(2, dtype=torch.bool)
    yield Sample("zero key", {**zero_key, "live": live, **fixed}, ("streams", "key_value", "live"))


@op(samples=_gate_samples, tolerance=Tolerance(rtol=1e-5), activations=("streams", "key_value"))
def engram_gate(streams: Tensor, key_value: Tensor, gate: Tensor, live: Tensor, norm_eps: float) -> Tensor:
    """Add the looked-up value to every stream, gated by a normalised dot product of stream and key.

    Args:
        streams: [T, m, d], key_value: [T, (m + 1) d] (m keys, then one value), compute dtype.
        gate: [m, d] float32 product of the query and key weights.
        live: [T] bool; elsewhere the gate is 0.

    Returns:
        [T, m, d] with one rounding.
    """
    accumulate = accumulate_dtype(streams.dtype)
    m, d = streams.shape[1:]
    wide = streams.to(accumulate)
    key, value = key_value.to(accumulate).split((m * d, d), dim=-1)
    key = key.unflatten(-1, (m, d))
    dot = (wide * gate.to(accumulate) * key).sum(-1)
    dot = dot * torch.rsqrt(wide.square().mean(-1) + norm_eps) * torch.rsqrt(key.square().mean(-1) + norm_eps)
    dot = dot * d**-0.5
    root = dot.abs().clamp(min=GATE_FLOOR).sqrt()
    strength = sigmoid(torch.where(torch.signbit(dot), -root, root))
    strength = strength.masked_fill(~live[:, None], 0.0)
    return (wide + strength[..., None] * value[:, None, :]).to(streams.dtype)


def _inject_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    d, entries, width, columns = {"tiny": (64, 50, 32, 6), "odd": (96, 53, 32, 5), "real": (1024, 4096, 256, 24)}[size]
    projection: Any = fp8_weight(generator, (5 * d, width * columns))
    weights = EngramWeights(
        table=_table(generator, entries, width),
        projection=projection,
        gate=normal(generator, 4, d),
        norm_eps=1e-20,
        quantise=True,
    )
    for label, rows in row_counts(size):
        arguments = {"streams": normal(generator, rows, 4, d), "ids": uniform_ids(generator, entries, rows, columns)}
        live = torch.rand(rows, generator=generator) < 0.8
        yield Sample(label, {**arguments, "live": live, "weights": weights}, ("streams", "ids", "live"))


@composite(
    uses=("engram_gather", "quantise_rows", "linear", "engram_gate"),
    samples=_inject_samples,
    tolerance=Tolerance(rtol=2e-5, flip_share=1e-3),
    activations=("streams",),
)
def engram_inject(kernels: Any) -> Callable[[Tensor, Tensor, Tensor, EngramWeights], Tensor]:
    """Add n-gram memory to the streams: (streams [T, m, d], ids [T, columns], live [T], weights) -> [T, m, d]."""
    gather, quantise_rows = kernels.engram_gather, kernels.quantise_rows
    linear, gate = kernels.linear, kernels.engram_gate

    def engram_inject(streams: Tensor, ids: Tensor, live: Tensor, weights: EngramWeights) -> Tensor:
        rows = quantise_rows(gather(weights.table, ids, streams.dtype), weights.quantise)
        return gate(streams, linear(rows, weights.projection), weights.gate, live, weights.norm_eps)

    return engram_inject

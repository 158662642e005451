"""DSpark drafting: main keys, block attention, Markov head and confidences (spec/model 3.11)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.attention import SAMPLE_SIZES, AttentionWeights, sample_attention
from deepinfer.ops.contract import Determinism, Sample, SampleSize, Tolerance, composite, op
from deepinfer.ops.elementary import sigmoid
from deepinfer.ops.handles import DenseWeight, Rows, accumulate_dtype
from deepinfer.ops.hyper_connection import HyperConnectionWeights, initial_mixes, sample_boundary
from deepinfer.ops.moe import MoeWeights, sample_moe
from deepinfer.ops.quant import FP8_BLOCK32, RowFormat, pack_rows, plain_format
from deepinfer.ops.rope import plain_frequencies
from deepinfer.ops.sample_inputs import (
    fp8_weight,
    normal,
    plain_weight,
    random_step,
    row_counts,
    step_shapes,
    uniform_ids,
    window_reads,
)

__all__ = [
    "Choose",
    "DraftResult",
    "DraftWeights",
    "StageWeights",
    "argmax_lowest",
    "draft_block",
    "draft_confidence",
    "draft_main_keys",
    "draft_markov",
    "stream_mean",
]


Choose = Callable[[Tensor, int], Tensor]
"""(logits [S, V] of draft number k, k) -> ids int64 [S]; must leave the logits as they are."""


@dataclass(frozen=True, slots=True)
class StageWeights:
    """One draft stage: an ordinary window-only block."""

    attention: AttentionWeights
    attention_boundary: HyperConnectionWeights
    ffn_boundary: HyperConnectionWeights
    moe: MoeWeights


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """Weights of the drafter.

    Attributes:
        main_proj: linear [d, K d] from target features; main_norm: [d].
        stages: draft stages. norm: [d] before the head.
        embedding: [V, d] and head: linear [V, d], the target's.
        markov_embedding: [V, r] compute dtype, markov_head: linear [V, r]; confidence: [d + r].
        block_size: drafted tokens; noise_token: filler id of the block.
        temperature: [block_size] of the confidences.
    """

    main_proj: DenseWeight
    main_norm: Tensor
    stages: tuple[StageWeights, ...]
    norm: Tensor
    embedding: Tensor
    head: DenseWeight
    markov_embedding: Tensor
    markov_head: DenseWeight
    confidence: Tensor
    block_size: int
    noise_token: int
    temperature: Tensor
    norm_eps: float
    quantise: bool


@dataclass(frozen=True, slots=True)
class DraftResult:
    """Drafts of S sequences.

    Attributes:
        ids: [S, n] int64, the guess for positions p + 2 .. p + 1 + n.
        confidence_logits: [S, n] before temperature and sigmoid; confidences: [S, n].
        logits: [S, n, V] with the Markov term, that the drafts were chosen from.
    """

    ids: Tensor
    confidence_logits: Tensor
    confidences: Tensor
    logits: Tensor


def _mean_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    d = {"tiny": 64, "odd": 67, "real": 5120}[size]
    for label, rows in row_counts(size):
        yield Sample(label, {"streams": normal(generator, rows, 4, d)}, ("streams",))


@op(samples=_mean_samples, activations=("streams",))
def stream_mean(streams: Tensor) -> Tensor:
    """Mean over the streams, the drafter's view of a target layer: [T, m, d] -> [T, d], one rounding."""
    wide = streams.to(accumulate_dtype(streams.dtype))
    total = wide[:, 0]
    for stream in range(1, streams.shape[1]):
        total = total + wide[:, stream]
    return (total / streams.shape[1]).to(streams.dtype)


def _argmax_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    vocab = {"tiny": 64, "odd": 97, "real": 129280}[size]
    for label, rows in row_counts(size):
        yield Sample(label, {"logits": normal(generator, rows, vocab).mul(2).round()}, ("logits",))
    bad = normal(generator, 3, vocab)
    bad[0, vocab // 2], bad[1] = torch.nan, -torch.inf
    yield Sample("NaN, nothing allowed", {"logits": bad}, ("logits",))


@op(samples=_argmax_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0))
def argmax_lowest(logits: Tensor) -> Tensor:
    """Index of the largest logit, the lowest index on ties; 0 where a logit is NaN: [S, V] -> [S] int64."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    largest = logits.amax(-1, keepdim=True) if logits.shape[0] else logits[:, :1]
    first = torch.where(logits == largest, ids, logits.shape[-1]).amin(-1)
    return first.masked_fill(first == logits.shape[-1], 0)


def _confidence_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    d, r = {"tiny": (64, 32), "odd": (67, 33), "real": (5120, 256)}[size]
    fixed = {"weight": normal(generator, d + r, scale=(d + r) ** -0.5)}
    for label, rows in row_counts(size):
        arguments = {"hidden": normal(generator, rows, d), "markov": normal(generator, rows, r), **fixed}
        yield Sample(label, arguments, ("hidden", "markov"))


@op(samples=_confidence_samples, tolerance=Tolerance(rtol=5e-6, bf16_rtol=5e-6), activations=("hidden", "markov"))
def draft_confidence(hidden: Tensor, markov: Tensor, weight: Tensor) -> Tensor:
    """Confidence logit of a draft: <weight, hidden ++ markov> in the accumulate dtype.

    Args:
        hidden: [S, d] before the head's norm; markov: [S, r] embedding of the previous token; weight: [d + r].

    Returns:
        [S].
    """
    accumulate = accumulate_dtype(hidden.dtype)
    return (torch.cat((hidden, markov), dim=-1).to(accumulate) * weight.to(accumulate)).sum(-1)


SAMPLE_STAGES, SAMPLE_TARGETS, SAMPLE_VOCAB, SAMPLE_MARKOV, SAMPLE_BLOCK = 2, 3, 97, 32, 3


def _sample_drafter(generator: torch.Generator, size: SampleSize) -> DraftWeights:
    """Random weights of a small drafter with stored weights in checkpoint bytes."""
    d = SAMPLE_SIZES[size].hidden
    stages = tuple(
        StageWeights(
            attention=sample_attention(generator, size),
            attention_boundary=sample_boundary(generator, d),
            ffn_boundary=sample_boundary(generator, d),
            moe=sample_moe(generator, size),
        )
        for _ in range(SAMPLE_STAGES)
    )
    stored: dict[str, Any] = {
        "main_proj": fp8_weight(generator, (d, SAMPLE_TARGETS * d)),
        "head": plain_weight(generator, "bf16", SAMPLE_VOCAB, d),
        "markov_head": plain_weight(generator, "bf16", SAMPLE_VOCAB, SAMPLE_MARKOV),
    }
    return DraftWeights(
        **stored,
        main_norm=1 + 0.1 * normal(generator, d),
        stages=stages,
        norm=1 + 0.1 * normal(generator, d),
        embedding=normal(generator, SAMPLE_VOCAB, d),
        markov_embedding=normal(generator, SAMPLE_VOCAB, SAMPLE_MARKOV),
        confidence=normal(generator, d + SAMPLE_MARKOV, scale=d**-0.5),
        block_size=SAMPLE_BLOCK,
        noise_token=SAMPLE_VOCAB - 1,
        temperature=0.5 + torch.rand(SAMPLE_BLOCK, generator=generator),
        norm_eps=1e-20,
        quantise=True,
    )


def _unquantised(weights: DraftWeights) -> DraftWeights:
    """The same drafter without any quantiser inside, so that no code can flip."""
    stages = []
    for stage in weights.stages:
        window = plain_format(stage.attention.window_format.width, torch.float32)
        stages.append(
            StageWeights(
                attention=replace(stage.attention, quantise=False, window_format=window),
                attention_boundary=replace(stage.attention_boundary, quantise=False),
                ffn_boundary=replace(stage.ffn_boundary, quantise=False),
                moe=replace(stage.moe, quantise=False),
            )
        )
    return replace(weights, stages=tuple(stages), quantise=False)


def _sample_rings(generator: torch.Generator, slots: int, length: int, row_format: RowFormat) -> tuple[Tensor, ...]:
    width = row_format.width
    return tuple(pack_rows(normal(generator, slots, length, width), row_format) for _ in range(SAMPLE_STAGES))


def _main_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    z = SAMPLE_SIZES[size]
    weights = _sample_drafter(generator, size)
    for shape in step_shapes(size, z.window):
        ring_length = z.window + 3
        step = random_step(generator, shape, page_size=z.page_size, ring_length=ring_length)
        rows, idle = step.slots.shape[0], step.slots < 0
        angles = normal(generator, rows, z.rotated // 2, scale=10.0)
        arguments = {
            "features": normal(generator, rows, SAMPLE_TARGETS * z.hidden),
            "step": step,
            "rings": _sample_rings(
                generator, step.page_table.shape[0], ring_length, RowFormat(FP8_BLOCK32, z.head_dim)
            ),
            "weights": weights,
            "cos": angles.cos(),
            "sin": angles.sin(),
        }
        unread = {"features": idle, "cos": idle, "sin": idle}
        unread |= {f"rings.{stage}": torch.ones(step.page_table.shape[0]).bool() for stage in range(SAMPLE_STAGES)}
        yield Sample(shape.label, arguments, ("features", "step", "cos", "sin"), unread, idle)


@composite(
    samples=_main_samples,
    uses=("linear", "rms_norm", "quantise_rows", "rope", "pack_rows", "commit_window"),
    tolerance=Tolerance(rtol=2e-5, flip_share=1e-3),
    mutates=("rings",),
    activations=("features",),
)
def draft_main_keys(kernels: Any) -> Callable[..., None]:
    """Feed target features into the stage rings.

    Call: (features [T, K d] compute dtype, step: StepInputs, rings: one [slots, length, bytes] per stage, weights:
    DraftWeights, cos, sin of the plain table at each row's position).
    """
    linear, rms_norm, quantise_rows = kernels.linear, kernels.rms_norm, kernels.quantise_rows
    rope, pack, commit = kernels.rope, kernels.pack_rows, kernels.commit_window

    def draft_main_keys(
        features: Tensor, step: Any, rings: tuple[Tensor, ...], weights: DraftWeights, cos: Tensor, sin: Tensor
    ) -> None:
        main = linear(quantise_rows(features, weights.quantise), weights.main_proj)
        rows = quantise_rows(rms_norm(main, weights.main_norm, weights.norm_eps), weights.quantise)
        for stage, ring in zip(weights.stages, rings, strict=True):
            attention = stage.attention
            key_value = linear(rows, attention.qkv_a)[:, attention.q_rank :]
            key_value = rope(rms_norm(key_value, attention.kv_norm, attention.norm_eps), cos, sin)
            commit(ring, pack(key_value, attention.window_format), step.slots, step.commit_rows)

    return draft_main_keys


def _block_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    z = SAMPLE_SIZES[size]
    drafter = _sample_drafter(generator, size)
    for label, count in {
        "empty": 0,
        "one sequence": 1,
        "with padding": 5,
        "unquantised": 4,
        **({"many": 34} if size == "odd" else {}),
    }.items():
        weights = _unquantised(drafter) if label == "unquantised" else drafter
        ring_length = z.window + 3
        slots = 1 + torch.randperm(count, generator=generator)
        if label == "with padding":
            slots[3:] = -1
        positions = torch.where(slots >= 0, torch.randint(0, 3 * z.window, (count,), generator=generator), -1)
        needed = window_reads(slots, positions + 1, count + 2, ring_length, z.window + 1)
        arguments = {
            "anchors": torch.where(slots >= 0, uniform_ids(generator, SAMPLE_VOCAB, count), -1),
            "positions": positions,
            "slots": slots,
            "rings": _sample_rings(generator, count + 2, ring_length, weights.stages[0].attention.window_format),
            "weights": weights,
            "frequencies": plain_frequencies(z.rotated, 10000.0),
        }
        unread = {f"rings.{stage}": ~needed for stage in range(SAMPLE_STAGES)}
        row_args = ("anchors", "positions", "slots")
        forced = uniform_ids(generator, SAMPLE_VOCAB, SAMPLE_BLOCK)
        for choose, how in ((_Forced(forced), "forced"), (None, "free"))[
            : 1 if count > 3 and label != "with padding" else 2
        ]:
            yield Sample(f"{label}, {how}", {**arguments, "choose": choose}, row_args, unread, slots < 0)


class _Forced:
    """Chooses given ids whatever the logits say, so that later drafts can be compared."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def __call__(self, logits: Tensor, step: int) -> Tensor:
        return self.ids[step].expand(logits.shape[0]).to(logits.device)


def _markov_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    vocab, rank = {"tiny": (32, 32), "odd": (97, 37), "real": (129_280, 256)}[size]
    fixed = {
        "embedding": normal(generator, vocab, rank),
        "head": plain_weight(generator, "bf16", vocab, rank),
    }
    for label, rows in row_counts(size):
        previous = uniform_ids(generator, vocab, rows).masked_fill(torch.rand(rows, generator=generator) < 0.1, -1)
        arguments = {"logits": normal(generator, rows, vocab), "previous": previous, **fixed}
        yield Sample(label, arguments, ("logits", "previous"))


@composite(samples=_markov_samples, uses=("embedding", "linear_accumulate"), activations=("embedding",))
def draft_markov(kernels: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Add the Markov term of the previous token to draft logits.

    Call: (logits [S, V] accumulate dtype, previous [S] int64 where -1 is padding, embedding [V, r] compute dtype, head:
    linear [V, r]) -> (logits [S, V], embedding rows [S, r] of the previous tokens, for the confidence).
    """
    rows_of, linear_accumulate = kernels.embedding, kernels.linear_accumulate

    def draft_markov(logits: Tensor, previous: Tensor, embedding: Tensor, head: DenseWeight) -> tuple[Tensor, Tensor]:
        markov = rows_of(previous, embedding)
        return logits + linear_accumulate(Rows(markov, markov), head), markov

    return draft_markov


@composite(
    samples=_block_samples,
    uses=(
        "embedding",
        "hyper_connection_boundary",
        "qkv_project",
        "gather_window",
        "unpack_rows",
        "attend",
        "attention_output",
        "moe_block",
        "hyper_connection_head",
        "lm_head",
        "draft_markov",
        "draft_confidence",
        "argmax_lowest",
        "rope_angles",
    ),
    determinism=Determinism.RUN_TO_RUN,
    tolerance=Tolerance(rtol=5e-5, bf16_rtol=3e-2, flip_share=1e-3),
    activations=("weights.embedding", "weights.markov_embedding"),
)
def draft_block(kernels: Any) -> Callable[..., DraftResult]:
    """Draft one block per sequence.

    Call: (anchors [S] int64 newly sampled tokens, positions [S] int64 of the last accepted row, slots [S] int64,
    rings: one per stage, weights: DraftWeights, frequencies of the plain table, choose: (logits [S, V], step k) ->
    ids [S] or None for the argmax) -> DraftResult. A sequence with slot -1 is padding.

    Every draft row sees the same main keys, the window that ends at `positions`, and all rows of its own block.
    """
    embedding, boundary, project = kernels.embedding, kernels.hyper_connection_boundary, kernels.qkv_project
    gather_window, unpack, attend = kernels.gather_window, kernels.unpack_rows, kernels.attend
    output, moe, head_of = kernels.attention_output, kernels.moe_block, kernels.hyper_connection_head
    lm_head, markov_of = kernels.lm_head, kernels.draft_markov
    confidence_of, argmax, angles = kernels.draft_confidence, kernels.argmax_lowest, kernels.rope_angles

    def stage_attention(
        query: Tensor,
        block_rows: Tensor,
        ring: Tensor,
        positions: Tensor,
        slots: Tensor,
        weights: AttentionWeights,
        n: int,
    ) -> Tensor:
        """Attention of S blocks of n rows over the ring up to `positions` and the block itself."""
        nowhere = torch.full_like(positions, -1)
        past = positions + 1
        packed, valid = gather_window(
            ring, block_rows[:1], slots, positions, past, nowhere, torch.zeros_like(positions), weights.window
        )
        main = unpack(packed, weights.window_format, query.dtype)
        block = unpack(block_rows, weights.window_format, query.dtype).unflatten(0, (-1, n))
        keys = torch.cat((main, block), dim=1)
        valid = torch.cat((valid, (slots >= 0)[:, None].expand(-1, n)), dim=1)
        return attend(query, keys.repeat_interleave(n, 0), valid.repeat_interleave(n, 0), weights.sink, weights.scale)

    def hidden_rows(
        anchors: Tensor,
        positions: Tensor,
        slots: Tensor,
        rings: tuple[Tensor, ...],
        weights: DraftWeights,
        frequencies: Tensor,
    ) -> tuple[Tensor, Tensor]:
        n = weights.block_size
        ids = torch.full((anchors.shape[0], n), weights.noise_token, device=anchors.device, dtype=torch.int64)
        ids[:, 0] = anchors
        ids = ids.masked_fill((slots < 0)[:, None], -1).flatten()
        row_positions = (positions[:, None] + torch.arange(1, n + 1, device=positions.device)).flatten()
        cos, sin = angles(row_positions, frequencies)
        embedded = embedding(ids, weights.embedding)
        accumulate = accumulate_dtype(embedded.dtype)
        m = weights.stages[0].attention_boundary.streams
        streams = embedded[:, None].expand(-1, m, -1).contiguous()
        mixes = initial_mixes(ids.shape[0], m, accumulate, ids.device)
        live = ids >= 0
        no_image = torch.zeros_like(live)
        branch: Tensor | None = None
        for stage, ring in zip(weights.stages, rings, strict=True):
            streams, rows, mixes = boundary(streams, branch, mixes, stage.attention_boundary)
            projected = project(rows, stage.attention, cos, sin)
            attended = stage_attention(
                projected.query, projected.window_rows, ring, positions, slots, stage.attention, n
            )
            branch = output(attended, stage.attention, cos, sin)
            streams, rows, mixes = boundary(streams, branch, mixes, stage.ffn_boundary)
            branch = moe(rows, stage.moe, no_image, live)
        hidden, normed = head_of(streams, branch, mixes, None, weights.norm, weights.norm_eps)
        return hidden.unflatten(0, (-1, n)), normed.unflatten(0, (-1, n))

    def draft_block(
        anchors: Tensor,
        positions: Tensor,
        slots: Tensor,
        rings: tuple[Tensor, ...],
        weights: DraftWeights,
        frequencies: Tensor,
        choose: Choose | None = None,
    ) -> DraftResult:
        hidden, normed = hidden_rows(anchors, positions, slots, rings, weights, frequencies)
        base = lm_head(normed.flatten(0, 1), weights.head).unflatten(0, (-1, weights.block_size))
        previous, ids, logits, confidences = anchors, [], [], []
        for k in range(weights.block_size):
            chosen_from, markov = markov_of(base[:, k], previous, weights.markov_embedding, weights.markov_head)
            logits.append(chosen_from)
            confidences.append(confidence_of(hidden[:, k], markov, weights.confidence))
            previous = argmax(logits[k]) if choose is None else choose(logits[k], k)
            ids.append(previous)
        confidence_logits = torch.stack(confidences, dim=1)
        return DraftResult(
            ids=torch.stack(ids, dim=1),
            confidence_logits=confidence_logits,
            confidences=sigmoid(confidence_logits / weights.temperature.to(confidence_logits.dtype)),
            logits=torch.stack(logits, dim=1),
        )

    return draft_block

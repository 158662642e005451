"""Compression of token groups into cache entries and index keys (spec/model 3.5, 3.6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, Tolerance, composite, op
from deepinfer.ops.handles import DenseWeight, Rows
from deepinfer.ops.quant import FP4_BLOCK16, FP4_BLOCK32, RowFormat, pack_rows
from deepinfer.ops.sample_inputs import StepShape, normal, plain_weight, random_step, step_shapes
from deepinfer.ops.step import StepInputs

__all__ = [
    "CompressorWeights",
    "EntryCache",
    "commit_compress_state",
    "compress_entries",
    "group_entries",
    "pool_groups",
    "sample_cache",
    "unread_entries",
]


@dataclass(frozen=True, slots=True)
class EntryCache:
    """Views of one KV source's part of the caches.

    Attributes:
        entries: [pages, entries per page, bytes] uint8; index_keys: [pages, entries per page * bytes] uint8.
        state: [slots, state length, 2, D] accumulate dtype ring of (latent, gate) rows, or None at ratio 1.
        ratio: tokens per entry; entries_per_page: page size / ratio.
        entry_format, index_format: row formats.
    """

    entries: Tensor
    index_keys: Tensor
    state: Tensor | None
    ratio: int
    entries_per_page: int
    entry_format: RowFormat
    index_format: RowFormat


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """Norms and index-key projection of a KV source: norm [D], key: linear [Di, D], key_norm [Di]."""

    norm: Tensor
    key: DenseWeight
    key_norm: Tensor
    norm_eps: float


def _token_arguments(
    size: SampleSize, generator: torch.Generator, shape: StepShape
) -> tuple[StepInputs, dict[str, Any], Tensor]:
    """A step, its (latent, gate) rows with a state ring, and which state rows an open group of 2 reaches back to."""
    width = {"tiny": 32, "odd": 37, "real": 512}[size]
    step = random_step(generator, shape, page_size=4, ring_length=16)
    rows, slots = step.slots.shape[0], step.page_table.shape[0]
    arguments = {
        "latent": normal(generator, rows, width),
        "gate": normal(generator, rows, width, scale=2.0),
        "state": normal(generator, slots, 7, 2, width),
        "slots": step.slots,
        "positions": step.positions,
    }
    return step, arguments, _carried(step, slots, 7, 2)


def _carried(step: StepInputs, slots: int, length: int, ratio: int) -> Tensor:
    """Mask [slots, length] of the state rows of groups that an earlier step has begun."""
    carried = torch.zeros(slots, length, dtype=torch.bool)
    for slot, first in zip(step.slots.tolist(), step.first_positions.tolist(), strict=True):
        for position in range(first - first % ratio, first) if slot >= 0 else ():
            carried[slot, position % length] = True
    return carried


def _pool_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for shape in step_shapes(size, window=4):
        step, arguments, carried = _token_arguments(size, generator, shape)
        arguments |= {"first_positions": step.first_positions, "first_rows": step.first_rows}
        row_args = tuple(name for name in arguments if name != "state")
        idle = step.slots < 0
        # Rows that complete no group read what an earlier step left, but nobody uses what they make of it.
        unused = idle | (step.positions % 2 == 0)
        unread = {"latent": idle, "gate": idle, "state": ~carried}
        yield Sample(shape.label, {**arguments, "ratio": 2}, row_args, unread, unused)


@op(samples=_pool_samples, tolerance=Tolerance(rtol=5e-6, bf16_rtol=5e-6))
def pool_groups(
    latent: Tensor,
    gate: Tensor,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    first_positions: Tensor,
    first_rows: Tensor,
    ratio: int,
) -> Tensor:
    """Softmax-weighted mean, per channel, of the `ratio` tokens that end at each row.

    Tokens before the sequence's first row of this step come from the state ring. Rows that do not complete a group
    get a value that nobody may use.

    Args:
        latent, gate: [T, D] accumulate dtype of this step.
        state: [slots, state length, 2, D]; token p lies at p mod state length.
        slots, positions, first_positions, first_rows: [T] int64, -1 for padding rows.

    Returns:
        [T, D] accumulate dtype.
    """
    wanted = (positions[:, None] + torch.arange(1 - ratio, 1, device=positions.device)).clamp(min=0)
    in_step = wanted >= first_positions[:, None]
    step_index = torch.where(
        in_step & (positions >= 0)[:, None], first_rows[:, None] + wanted - first_positions[:, None], 0
    )
    carried = state[slots.clamp(min=0)[:, None], wanted % state.shape[1]]
    latents = torch.where(in_step[..., None], latent[step_index], carried[:, :, 0])
    gates = torch.where(in_step[..., None], gate[step_index], carried[:, :, 1])
    # Not torch.softmax over dim 1: where the width is odd, its bits depend on the row's place in the tensor.
    shares = torch.exp(gates - gates.amax(1, keepdim=True))
    total = shares[:, 0]
    for token in range(1, ratio):
        total = total + shares[:, token]
    shares = shares / total[:, None]
    pooled = shares[:, 0] * latents[:, 0]
    for token in range(1, ratio):
        pooled = pooled + shares[:, token] * latents[:, token]
    return pooled


def _state_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for shape in step_shapes(size, window=4):
        step, arguments, carried = _token_arguments(size, generator, shape)
        arguments["last_positions"] = step.last_positions
        row_args = tuple(name for name in arguments if name != "state")
        unread = {"latent": step.slots < 0, "gate": step.slots < 0, "state": torch.ones_like(carried)}
        yield Sample(shape.label, arguments, row_args, unread)


@op(samples=_state_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0), mutates=("state",))
def commit_compress_state(
    state: Tensor, latent: Tensor, gate: Tensor, slots: Tensor, positions: Tensor, last_positions: Tensor
) -> None:
    """Keep the newest tokens' (latent, gate) rows, so that a group may continue in a later step.

    Args:
        state: [slots, state length, 2, D], written in place.
        latent, gate: [T, D].
        slots, positions: [T] int64; last_positions: [T] the sequence's last position of this step. Padding is -1.
    """
    live = (slots >= 0) & (positions > last_positions - state.shape[1])
    place = torch.where(live, slots, 0), torch.where(live, positions % state.shape[1], 0)
    rows = torch.stack((latent, gate), dim=1).to(state.dtype)
    state[place] = torch.where(live[:, None, None], rows, state[place])


def _group_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    positions = torch.tensor([-1, *range({"tiny": 6, "odd": 40, "real": 300}[size])])
    yield Sample("empty", {"positions": positions[:0], "ratio": 2}, ("positions",))
    for ratio in (1, 2, 4):
        yield Sample(f"ratio {ratio}", {"positions": positions, "ratio": ratio}, ("positions",))


@op(samples=_group_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0))
def group_entries(positions: Tensor, ratio: int) -> Tensor:
    """Entry that each row completes: (p + 1) / ratio - 1, or -1 [T] int64."""
    complete = (positions >= 0) & ((positions + 1) % ratio == 0)
    return torch.where(complete, (positions + 1) // ratio - 1, -1)


def sample_cache(
    generator: torch.Generator, step: StepInputs, *, width: int, index_width: int, ratio: int, page_size: int
) -> EntryCache:
    """A cache full of random valid rows, as views of pages and with the state ring of a source of this ratio."""
    entry_format, index_format = RowFormat(FP4_BLOCK16, width), RowFormat(FP4_BLOCK32, index_width)
    per_page, num_pages = page_size // ratio, 2 + max(0, int(step.page_table.max()))
    entries = pack_rows(normal(generator, num_pages, per_page, width), entry_format)
    keys = pack_rows(normal(generator, num_pages, per_page, index_width), index_format)
    codes, scales = keys.split((index_format.data_bytes, index_format.scale_bytes), dim=-1)
    pages = torch.cat([part.flatten(1) for part in (entries, codes, scales)], dim=1)
    split = per_page * entry_format.row_bytes
    state = normal(generator, step.page_table.shape[0], ratio + 5, 2, width) if ratio > 1 else None
    return EntryCache(
        entries=pages[:, :split].unflatten(1, (per_page, entry_format.row_bytes)),
        index_keys=pages[:, split:],
        state=state,
        ratio=ratio,
        entries_per_page=per_page,
        entry_format=entry_format,
        index_format=index_format,
    )


def unread_entries(cache: EntryCache, physical: Tensor) -> Tensor:
    """Mask [pages, entries per page] of the entries that `physical` places do not name."""
    unread = torch.ones(cache.entries.shape[0] * cache.entries_per_page, dtype=torch.bool)
    unread[physical[physical >= 0]] = False
    return unread.view(-1, cache.entries_per_page)


def _compress_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    width, index_width, rotated = {"tiny": (32, 32, 16), "odd": (96, 64, 34), "real": (512, 128, 64)}[size]
    page_size = {"tiny": 4, "odd": 6, "real": 128}[size]
    for shape in step_shapes(size, window=4):
        for ratio in (1, 2):
            step = random_step(generator, shape, page_size=page_size, ring_length=16)
            yield _compress_sample(generator, shape, step, width, index_width, rotated, ratio, page_size)


def _compress_sample(
    generator: torch.Generator,
    shape: StepShape,
    step: StepInputs,
    width: int,
    index_width: int,
    rotated: int,
    ratio: int,
    page_size: int,
) -> Sample:
    rows, idle = step.slots.shape[0], step.slots < 0
    cache = sample_cache(generator, step, width=width, index_width=index_width, ratio=ratio, page_size=page_size)
    angles = normal(generator, rows, rotated // 2, scale=10.0)
    arguments = {
        "latent": normal(generator, rows, width),
        "gate": normal(generator, rows, width, scale=2.0) if ratio > 1 else None,
        "dtype": torch.float32,
        "step": step,
        "cache": cache,
        "weights": CompressorWeights(
            norm=1 + 0.1 * normal(generator, width),
            key=plain_weight(generator, "bf16", index_width, width),  # type: ignore[arg-type]
            key_norm=1 + 0.1 * normal(generator, index_width),
            norm_eps=1e-20,
        ),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }
    unread = {"latent": idle, "cos": idle, "sin": idle}
    if cache.state is not None:
        carried = _carried(step, cache.state.shape[0], cache.state.shape[1], ratio)
        unread |= {"gate": idle, "cache.state": ~carried}
    row_args = ("latent", "gate", "step", "cos", "sin")
    return Sample(f"{shape.label}, ratio {ratio}", arguments, row_args, unread, idle)


@composite(
    uses=(
        "pool_groups",
        "commit_compress_state",
        "group_entries",
        "resolve_entries",
        "rms_norm",
        "linear",
        "rope",
        "pack_rows",
        "store_entries",
        "store_index_keys",
    ),
    samples=_compress_samples,
    tolerance=Tolerance(rtol=2e-5, flip_share=1e-3),
    mutates=("cache",),
    activations=("dtype",),
)
def compress_entries(kernels: Any) -> Callable[..., None]:
    """Turn completed groups into entries and index keys and store them.

    Call: (latent [T, D] and gate [T, D] or None, accumulate dtype; compute dtype; step: StepInputs; cache: EntryCache;
    weights: CompressorWeights; cos, sin [T, R / 2] of each group's *first* token).
    The index key is projected from the latent before its rotation.
    """
    pool, commit_state, entries_of = kernels.pool_groups, kernels.commit_compress_state, kernels.group_entries
    resolve, rms_norm, linear, rope = kernels.resolve_entries, kernels.rms_norm, kernels.linear, kernels.rope
    pack, store, store_keys = kernels.pack_rows, kernels.store_entries, kernels.store_index_keys

    def compress_entries(
        latent: Tensor,
        gate: Tensor | None,
        dtype: torch.dtype,
        step: Any,
        cache: EntryCache,
        weights: CompressorWeights,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        pooled = latent
        if gate is not None:
            rows = (step.slots, step.positions, step.first_positions, step.first_rows)
            pooled = pool(latent, gate, cache.state, *rows, cache.ratio)
            commit_state(cache.state, latent, gate, step.slots, step.positions, step.last_positions)
        normed = rms_norm(pooled.to(dtype), weights.norm, weights.norm_eps)
        key = rms_norm(linear(Rows(normed, normed), weights.key), weights.key_norm, weights.norm_eps)
        entries = entries_of(step.positions, cache.ratio)
        place = resolve(entries[:, None], step.slots, step.page_table, cache.entries_per_page).squeeze(1)
        store_keys(cache.index_keys, pack(rope(key, cos, sin), cache.index_format), place, cache.index_format)
        store(cache.entries, pack(rope(normed, cos, sin), cache.entry_format), place)

    return compress_entries

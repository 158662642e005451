"""Compression of token groups into cache entries and index keys (spec/model 3.5, 3.6)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, Tolerance, composite, op
from deepinfer.ops.handles import DenseWeight, Rows
from deepinfer.ops.quant import RowFormat
from deepinfer.ops.sample_inputs import normal

__all__ = [
    "CompressorWeights",
    "EntryCache",
    "commit_compress_state",
    "compress_entries",
    "group_entries",
    "pool_groups",
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


def _pool_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    width = {"tiny": 32, "odd": 37, "real": 512}[size]
    state = normal(generator, 5, 7, 2, width)
    for label, starts, counts in (
        ("one chunk", [0], [9]),
        ("carried groups", [3, 8, 1], [4, 1, 1]),
        ("decode rows", [5, 6, 7], [1, 1, 1]),
    ):
        repeats = torch.tensor(counts)
        positions = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
        rows = positions.shape[0]
        yield Sample(
            label,
            {
                "latent": normal(generator, rows, width),
                "gate": normal(generator, rows, width, scale=2.0),
                "state": state,
                "slots": torch.tensor([1, 2, 4])[: len(counts)].repeat_interleave(repeats),
                "positions": positions,
                "first_positions": torch.tensor(starts).repeat_interleave(repeats),
                "first_rows": (torch.cumsum(repeats, 0) - repeats).repeat_interleave(repeats),
                "ratio": 2,
            },
        )


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
    shares = torch.softmax(gates, dim=1)
    pooled = shares[:, 0] * latents[:, 0]
    for token in range(1, ratio):
        pooled = pooled + shares[:, token] * latents[:, token]
    return pooled


def _state_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    width = {"tiny": 32, "odd": 37, "real": 512}[size]
    slots, positions = torch.tensor([1, 1, 2, -1]), torch.tensor([8, 9, 3, -1])
    arguments = {"latent": normal(generator, 4, width), "gate": normal(generator, 4, width)}
    last = torch.tensor([9, 9, 3, -1])
    state = normal(generator, 5, 7, 2, width)
    yield Sample(
        "some rows", {"state": state, **arguments, "slots": slots, "positions": positions, "last_positions": last}
    )


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
    positions = torch.tensor([-1, *range({"tiny": 6, "odd": 13, "real": 300}[size])])
    for ratio in (1, 2):
        yield Sample(f"ratio {ratio}", {"positions": positions, "ratio": ratio}, ("positions",))


@op(samples=_group_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0))
def group_entries(positions: Tensor, ratio: int) -> Tensor:
    """Entry that each row completes: (p + 1) / ratio - 1, or -1 [T] int64."""
    complete = (positions >= 0) & ((positions + 1) % ratio == 0)
    return torch.where(complete, (positions + 1) // ratio - 1, -1)


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

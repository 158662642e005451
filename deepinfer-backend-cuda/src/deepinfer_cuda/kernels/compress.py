"""Pooling of token groups that end at a row, and the ring that carries an open group to the next step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer_cuda.kernels.launch import EXACT, warps_for

__all__ = ["kernels"]

ROWS = 256
"""Rows that a program of `group_entries` takes."""


@triton.jit
def _token(
    part, state, member: tl.constexpr, wanted, first, first_row, slot, channel, live, part_stride, slot_stride,
    token_stride, member_stride, length: tl.constexpr,
):  # fmt: skip
    """Latent (member 0) or gate (member 1) of the token at position `wanted`, of this step or of an earlier one."""
    fresh = part + (first_row + wanted - first) * part_stride
    kept = state + slot * slot_stride + (wanted % length) * token_stride + member * member_stride
    return tl.load(tl.where(wanted >= first, fresh, kept) + channel, mask=live, other=0.0)


@triton.jit
def _pool(
    latent, gate, state, slots, positions, firsts, first_rows, out, width, latent_stride, gate_stride, slot_stride,
    token_stride, member_stride, length: tl.constexpr, RATIO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row; a second pass over the group's gates instead of keeping them."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    first, first_row = tl.load(firsts + row), tl.load(first_rows + row)
    live = (channel < width) & (position >= 0) & (slot >= 0)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for back in tl.static_range(RATIO):
        wanted = tl.maximum(position - (RATIO - 1 - back), 0)
        largest = tl.maximum(
            largest,
            _token(
                gate, state, 1, wanted, first, first_row, slot, channel, live, gate_stride, slot_stride, token_stride,
                member_stride, length,
            ),
        )  # fmt: skip
    total, pooled = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for back in tl.static_range(RATIO):
        wanted = tl.maximum(position - (RATIO - 1 - back), 0)
        logits = _token(
            gate, state, 1, wanted, first, first_row, slot, channel, live, gate_stride, slot_stride, token_stride,
            member_stride, length,
        )  # fmt: skip
        values = _token(
            latent, state, 0, wanted, first, first_row, slot, channel, live, latent_stride, slot_stride, token_stride,
            member_stride, length,
        )  # fmt: skip
        share = tl.exp(logits - largest)
        total += share
        pooled += share * values
    tl.store(out + row * width + channel, pooled / total, mask=channel < width)


@triton.jit
def _commit(
    state, latent, gate, slots, positions, last_positions, width, latent_stride, gate_stride, slot_stride,
    token_stride, member_stride, length: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if (slot >= 0) & (position > tl.load(last_positions + row) - length):
        channel = tl.arange(0, BLOCK)
        to = state + slot * slot_stride + (position % length) * token_stride + channel
        live = channel < width
        tl.store(to, tl.load(latent + row * latent_stride + channel, mask=live), mask=live)
        tl.store(to + member_stride, tl.load(gate + row * gate_stride + channel, mask=live), mask=live)


@triton.jit
def _groups(positions, out, rows, ratio: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + row, mask=row < rows, other=-1)
    complete = (position >= 0) & ((position + 1) % ratio == 0)
    tl.store(out + row, tl.where(complete, (position + 1) // ratio - 1, -1), mask=row < rows)


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
    """See the contract `pool_groups`."""
    rows, width = latent.shape
    out = torch.empty(rows, width, dtype=latent.dtype, device=latent.device)
    if rows:
        _pool[(rows,)](
            latent, gate, state, slots, positions, first_positions, first_rows, out, width, latent.stride(0),
            gate.stride(0), *state.stride()[:3], length=state.shape[1], RATIO=ratio,
            BLOCK=triton.next_power_of_2(width), num_warps=warps_for(width), **EXACT,
        )  # fmt: skip
    return out


def commit_compress_state(
    state: Tensor, latent: Tensor, gate: Tensor, slots: Tensor, positions: Tensor, last_positions: Tensor
) -> None:
    """See the contract `commit_compress_state`."""
    rows, width = latent.shape
    if rows:
        _commit[(rows,)](
            state, latent, gate, slots, positions, last_positions, width, latent.stride(0), gate.stride(0),
            *state.stride()[:3], length=state.shape[1], BLOCK=triton.next_power_of_2(width),
            num_warps=warps_for(width), **EXACT,
        )  # fmt: skip


def group_entries(positions: Tensor, ratio: int) -> Tensor:
    """See the contract `group_entries`."""
    rows = positions.shape[0]
    out = torch.empty(rows, dtype=torch.int64, device=positions.device)
    if rows:
        _groups[(triton.cdiv(rows, ROWS),)](positions, out, rows, ratio=ratio, BLOCK=ROWS, num_warps=2, **EXACT)
    return out


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family."""
    return {
        "commit_compress_state": Kernel(commit_compress_state, Determinism.EXACT),
        "group_entries": Kernel(group_entries, Determinism.EXACT),
        "pool_groups": Kernel(pool_groups, Determinism.ROW_INVARIANT),
    }

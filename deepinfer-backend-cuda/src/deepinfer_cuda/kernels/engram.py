"""N-gram memory: hashes of the newest tokens, exact table rows, and the gate that adds them to the streams."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer.api.ops import EngramHash, EngramTable
from deepinfer_cuda.kernels.codes import as_dtype, e4m3_values, exponent_values
from deepinfer_cuda.kernels.launch import EXACT, warps_for

__all__ = ["kernels"]


@triton.jit
def _hash(
    tokens, history, live, token_map, multipliers, primes, offsets, out, pad, columns, history_stride,
    heads: tl.constexpr, GRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All columns of one row; column c mixes the products of tokens 0 .. c // heads + 1."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    known = tl.load(live + row) != 0
    mixed = tl.zeros((BLOCK,), tl.int64)
    for back in tl.static_range(GRAMS):
        if back == 0:
            token = tl.load(tokens + row)
        else:
            token = tl.load(history + row * history_stride + back - 1)
            known = known & (token >= 0)
        compressed = tl.load(token_map + tl.maximum(token, 0), mask=known, other=0)
        product = tl.where(known, compressed, pad) * tl.load(multipliers + back)
        mixed = tl.where(column // heads + 1 >= back, mixed ^ product, mixed)
    prime = tl.load(primes + column, mask=column < columns, other=1)
    rest = mixed % prime
    rest = tl.where(rest < 0, rest + prime, rest)
    offset = tl.load(offsets + column, mask=column < columns, other=0)
    tl.store(out + row * columns + column, rest + offset, mask=column < columns)


@triton.jit
def _gather(codes, scales, ids, out, width, code_stride, scale_stride, BLOCK: tl.constexpr):
    """One table row."""
    number = tl.program_id(0).to(tl.int64)
    entry = tl.load(ids + number)
    channel = tl.arange(0, BLOCK)
    live = channel < width
    values = e4m3_values(tl.load(codes + entry * code_stride + channel, mask=live, other=0))
    scale = tl.load(scales + entry * scale_stride + channel // 32, mask=live, other=0)
    values = values * tl.where(scale == 255, float("nan"), exponent_values(scale))
    tl.store(out + number * width + channel, as_dtype(values, out.dtype.element_ty), mask=live)


@triton.jit
def _gate(streams, key_value, gate, live, out, width, eps, root, STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    """One stream of one row."""
    row, stream = (tl.program_id(0) // STREAMS).to(tl.int64), tl.program_id(0) % STREAMS
    channel = tl.arange(0, BLOCK)
    used = channel < width
    at = (row * STREAMS + stream) * width + channel
    x = tl.load(streams + at, mask=used, other=0.0).to(tl.float32)
    source = key_value + row * ((STREAMS + 1) * width) + channel
    key = tl.load(source + stream * width, mask=used, other=0.0).to(tl.float32)
    value = tl.load(source + STREAMS * width, mask=used, other=0.0).to(tl.float32)
    dot = tl.sum(x * tl.load(gate + stream * width + channel, mask=used, other=0.0) * key)
    dot = dot * tl.rsqrt(tl.sum(x * x) / width + eps) * tl.rsqrt(tl.sum(key * key) / width + eps) * root
    strength = tl.sqrt_rn(tl.maximum(tl.abs(dot), 1e-6))
    strength = tl.where(dot.to(tl.int32, bitcast=True) < 0, -strength, strength)
    share = tl.where(tl.load(live + row) != 0, 1.0 / (1.0 + tl.exp(-strength)), 0.0)
    tl.store(out + at, as_dtype(x + share * value, out.dtype.element_ty), mask=used)


def engram_hash(tokens: Tensor, history: Tensor, live: Tensor, constants: EngramHash) -> Tensor:
    """See the contract `engram_hash`."""
    rows, columns, grams = tokens.shape[0], constants.primes.shape[0], constants.multipliers.shape[0]
    out = torch.empty(rows, columns, dtype=torch.int64, device=tokens.device)
    if rows:
        _hash[(rows,)](
            tokens, history, live, constants.token_map, constants.multipliers, constants.primes, constants.offsets,
            out, constants.pad, columns, history.stride(0), heads=columns // (grams - 1), GRAMS=grams,
            BLOCK=triton.next_power_of_2(columns), num_warps=1, **EXACT,
        )  # fmt: skip
    return out


def engram_gather(table: EngramTable, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """See the contract `engram_gather`; the table lies in device memory."""
    (rows, columns), width = ids.shape, table.codes.shape[1]
    out = torch.empty(rows, columns * width, dtype=dtype, device=ids.device)
    if rows:
        codes = table.codes.view(torch.uint8)
        _gather[(rows * columns,)](
            codes, table.scales, ids.contiguous(), out, width, codes.stride(0), table.scales.stride(0),
            BLOCK=triton.next_power_of_2(width), num_warps=1, **EXACT,
        )  # fmt: skip
    return out


def engram_gate(streams: Tensor, key_value: Tensor, gate: Tensor, live: Tensor, norm_eps: float) -> Tensor:
    """See the contract `engram_gate`."""
    rows, count, width = streams.shape
    out = torch.empty(rows, count, width, dtype=streams.dtype, device=streams.device)
    if rows:
        _gate[(rows * count,)](
            streams.contiguous(), key_value.contiguous(), gate, live, out, width, norm_eps, width**-0.5, STREAMS=count,
            BLOCK=triton.next_power_of_2(width), num_warps=warps_for(width), **EXACT,
        )  # fmt: skip
    return out


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family."""
    return {
        "engram_gate": Kernel(engram_gate, Determinism.ROW_INVARIANT),
        "engram_gather": Kernel(engram_gather, Determinism.EXACT),
        "engram_hash": Kernel(engram_hash, Determinism.EXACT),
    }

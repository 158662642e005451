"""Quantisers and byte-exact row formats: one program a row, which writes codes, packed bytes or rounded values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer.api.ops import FP4_BLOCK16, FP4_BLOCK32, FP8_BLOCK32, RowFormat, Rows
from deepinfer_cuda.handles import QuantisedRows
from deepinfer_cuda.kernels.codes import (
    ceil_power_of_two,
    e2m1_codes,
    e4m3_bytes,
    e4m3_values,
    exponent_bytes,
    exponent_values,
    fp4_values,
    nearest_bf16,
    reciprocal_power,
)
from deepinfer_cuda.kernels.launch import EXACT, rows_of, warps_for

__all__ = ["kernels"]

FP8_32, FP4_16, FP4_32 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FORMATS = {FP8_BLOCK32: 0, FP4_BLOCK16: 1, FP4_BLOCK32: 2}
CODES, PACKED, ROUNDED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def quantise_groups(x, FORMAT: tl.constexpr):
    """Codes (int32) and scale bytes of groups [G, size] in the compute dtype, and their values after rounding."""
    amax = tl.max(tl.abs(x.to(tl.float32)), axis=1)
    if FORMAT == FP4_16:
        largest = tl.minimum(tl.div_rn(tl.maximum(amax, 6.0 * 0.001953125), 6.0), 448.0)
        scale_bytes = e4m3_bytes(largest)
        scale = e4m3_values(scale_bytes)
        scaled = tl.div_rn(x.to(tl.float32), tl.broadcast_to(scale[:, None], x.shape))
        if x.dtype == tl.bfloat16:
            scaled = nearest_bf16(scaled)  # the quotient has the compute dtype, as in the release
    else:
        if FORMAT == FP8_32:
            scale = ceil_power_of_two(tl.div_rn(tl.maximum(amax, 1e-4), 448.0))
        else:
            # The floor is 6 * 2 ** -126.
            scale = ceil_power_of_two(tl.div_rn(tl.maximum(amax, 7.052966104933725e-38), 6.0))
        scale_bytes = exponent_bytes(scale)
        scaled = x.to(tl.float32) * reciprocal_power(scale)[:, None]
    if FORMAT == FP8_32:
        codes = e4m3_bytes(tl.minimum(tl.maximum(scaled, -448.0), 448.0)).to(tl.int32)
        values = e4m3_values(codes) * scale[:, None]
    else:
        codes = e2m1_codes(tl.minimum(tl.maximum(scaled, -6.0), 6.0))
        values = fp4_values(codes) * scale[:, None]
    return codes, scale_bytes, values


@triton.jit
def _quantise(
    x, out, scales, width, x_stride, out_stride,
    FORMAT: tl.constexpr, OUTPUT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    channel = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + row * x_stride + channel, mask=channel < width, other=0.0)
    codes, scale_bytes, rounded = quantise_groups(values, FORMAT)
    to = out + row * out_stride
    if OUTPUT == ROUNDED:
        tl.store(to + channel, rounded.to(out.dtype.element_ty), mask=channel < width)
    else:
        if OUTPUT == PACKED and FORMAT != FP8_32:
            low, high = tl.split(tl.reshape(codes, (GROUPS, GROUP // 2, 2)))
            byte = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
            tl.store(to + byte, (low | (high << 4)).to(tl.uint8), mask=byte < width // 2)
        else:
            tl.store(to + channel, codes.to(tl.uint8), mask=channel < width)
        into = scales + row * (width // GROUP)
        if OUTPUT == PACKED:
            into = to + (width if FORMAT == FP8_32 else width // 2)
        tl.store(into + group, scale_bytes, mask=group < width // GROUP)


@triton.jit
def _unpack(packed, out, width, stride, FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    live = channel < width
    source = packed + row * stride
    if FORMAT == FP8_32:
        values = e4m3_values(tl.load(source + channel, mask=live, other=0))
        data = width
    else:
        byte = tl.load(source + channel // 2, mask=live, other=0).to(tl.int32)
        values = fp4_values((byte >> ((channel & 1) * 4)) & 15)
        data = width // 2
    scale = tl.load(source + data + channel // GROUP, mask=live, other=0)
    if FORMAT == FP4_16:
        values = values * e4m3_values(scale)
    else:
        values = values * tl.where(scale == 255, float("nan"), exponent_values(scale))
    tl.store(out + row * width + channel, values.to(out.dtype.element_ty), mask=live)


def _group(name: str) -> int:
    return 16 if name == FP4_BLOCK16 else 32


def _run(x: Tensor, name: str, out: Tensor, scales: Tensor, output: tl.constexpr) -> None:
    rows, target = rows_of(x), out.view(-1, out.shape[-1])
    count, width = rows.shape
    if count:
        group = _group(name)
        _quantise[(count,)](
            rows, target, scales, width, rows.stride(0), target.stride(0),
            FORMAT=FORMATS[name], OUTPUT=output, GROUP=group, GROUPS=triton.next_power_of_2(width // group),
            num_warps=warps_for(width), **EXACT,
        )  # fmt: skip


def _codes(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // _group(name), dtype=torch.uint8, device=x.device)
    _run(x, name, codes, scales, CODES)
    return codes, scales


def fp8_block32_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """See the contract `fp8_block32_quantise`."""
    codes, scales = _codes(x, FP8_BLOCK32)
    return codes.view(torch.float8_e4m3fn), scales


def fp4_block32_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """See the contract `fp4_block32_quantise`."""
    return _codes(x, FP4_BLOCK32)


def fp4_block16_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """See the contract `fp4_block16_quantise`."""
    return _codes(x, FP4_BLOCK16)


def pack_rows(x: Tensor, row_format: RowFormat) -> Tensor:
    """See the contract `pack_rows`."""
    if row_format.name not in FORMATS:
        return x.to(row_format.plain_dtype).contiguous().view(torch.uint8)
    out = torch.empty(*x.shape[:-1], row_format.row_bytes, dtype=torch.uint8, device=x.device)
    _run(x, row_format.name, out, out, PACKED)
    return out


def unpack_rows(packed: Tensor, row_format: RowFormat, dtype: torch.dtype) -> Tensor:
    """See the contract `unpack_rows`."""
    if row_format.name not in FORMATS:
        return packed.contiguous().view(row_format.plain_dtype).to(dtype)
    rows, width = rows_of(packed), row_format.width
    out = torch.empty(*packed.shape[:-1], width, dtype=dtype, device=packed.device)
    if rows.shape[0]:
        _unpack[(rows.shape[0],)](
            rows, out, width, rows.stride(0), FORMAT=FORMATS[row_format.name], GROUP=_group(row_format.name),
            BLOCK=triton.next_power_of_2(width), num_warps=warps_for(width), **EXACT,
        )  # fmt: skip
    return out


def round_rows(x: Tensor, row_format: RowFormat) -> Tensor:
    """See the contract `round_rows`."""
    if row_format.name not in FORMATS:
        return x.to(row_format.plain_dtype).to(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(x, row_format.name, out, out, ROUNDED)
    return out


def quantise_rows(x: Tensor, enabled: bool) -> Rows | QuantisedRows:
    """See the contract `quantise_rows`."""
    if not enabled:
        return Rows(x, x)
    codes, scales = _codes(x, FP8_BLOCK32)
    return QuantisedRows(x, codes, scales)


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family."""
    quantisers = (fp8_block32_quantise, fp4_block32_quantise, fp4_block16_quantise)
    found = (*quantisers, pack_rows, unpack_rows, round_rows, quantise_rows)
    return {function.__name__: Kernel(function, Determinism.EXACT) for function in found}

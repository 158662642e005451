"""Dense products with stored weights: FP8 with a scale for every 32 inputs, or plain values.

A program computes a tile of rows and outputs over a part of the inputs, chunk by chunk in ascending order; parts are
added up in their order by a second kernel. How many parts there are follows from the weight's shape alone, so a row's
sum does not depend on other rows as long as a tile has a fixed number of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer.api.ops import DenseWeight, Rows, accumulate_dtype
from deepinfer_cuda.handles import Fp8Weight, QuantisedRows
from deepinfer_cuda.kernels.codes import INTERPRETED, as_dtype, exponent_values
from deepinfer_cuda.kernels.launch import EXACT

__all__ = ["Products", "kernels"]

ROW_TILE, MOST_ROWS = 16, 64
"""Rows of a tile: the fewest that matrix units take, and what tiles grow to with the batch."""

OUTPUT_TILE, INPUT_CHUNK = 64, 64
FP8_CHUNK = 128
"""Inputs whose four scale bytes are one word."""

ENOUGH_PROGRAMS = 128
LEAST_INPUTS = 512
"""A part of the inputs is no shorter than this."""

MERGE_BLOCK = 1024


@triton.jit
def _product(
    x, codes, scales, out, rows, x_stride, x_group,
    outputs: tl.constexpr, inputs: tl.constexpr, GROUPS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    FP8: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[part, t, g outputs + n] = sum over k of x[t, g, k] * w[g outputs + n, k]; ids: outputs, rows, g / part."""
    group, part = tl.program_id(2) // PARTS, tl.program_id(2) % PARTS
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.program_id(1) * TILE + tl.arange(0, TILE)
    chunk = tl.arange(0, BK)
    weight_row = (group * outputs + n).to(tl.int64)
    sums, lost = tl.zeros((TILE, BN), tl.float32), tl.zeros((TILE, BN), tl.float32)
    for step in range(0, PART, BK):
        k = part * PART + step + chunk
        live = k < inputs
        a = tl.load(
            x + t.to(tl.int64)[:, None] * x_stride + group * x_group + k[None, :],
            mask=(t < rows)[:, None] & live[None, :],
            other=0.0,
        )
        here = (n < outputs)[:, None] & live[None, :]
        w = tl.load(codes + weight_row[:, None] * inputs + k[None, :], mask=here, other=0.0)
        if FP8:
            scale_row = weight_row[:, None] * ((inputs + 31) // 32)
            scale = tl.load(scales + scale_row + (k // 32)[None, :], mask=here, other=0)
            w = w.to(tl.float32) * exponent_values(scale)
        if WIDE:
            # Compensated: what an addition rounds off goes into the next one.
            chunk_sum = tl.dot(a.to(tl.float32), tl.trans(w.to(tl.float32)), input_precision="ieee") - lost
            total = sums + chunk_sum
            lost = (total - sums) - chunk_sum
            sums = total
        else:
            sums += tl.dot(a, tl.trans(w.to(tl.bfloat16)))
    place = (part * rows + t).to(tl.int64)[:, None] * (GROUPS * outputs) + (group * outputs + n)[None, :]
    mask = (t < rows)[:, None] & (n < outputs)[None, :]
    tl.store(out + place, as_dtype(sums, out.dtype.element_ty), mask=mask)


@triton.jit
def _fp8_product(
    x, x_scales, codes, scales, out, rows,
    outputs: tl.constexpr, inputs: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out[part, t, n] with both operands in FP8; the scales of 32 inputs meet the sums of these inputs."""
    part = tl.program_id(2)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    t = tl.program_id(1) * TILE + tl.arange(0, TILE)
    words: tl.constexpr = inputs // 128
    n_safe, t_safe = tl.minimum(n, outputs - 1), tl.minimum(t, rows - 1)
    k = tl.arange(0, 32)
    weight = codes + n_safe.to(tl.int64)[:, None] * inputs + k[None, :]
    source = x + t_safe.to(tl.int64)[None, :] * inputs + k[:, None]
    sums = tl.zeros((BN, TILE), tl.float32)
    for step in tl.range(0, PART // 128, num_stages=STAGES):
        word = part * (PART // 128) + step
        w_scale, x_scale = tl.load(scales + n_safe * words + word), tl.load(x_scales + t_safe * words + word)
        for quarter in tl.static_range(4):
            at = word * 128 + quarter * 32
            products = tl.dot(tl.load(weight + at), tl.load(source + at))
            w_power = (((w_scale >> (8 * quarter)) & 255) << 23).to(tl.float32, bitcast=True)
            x_power = (((x_scale >> (8 * quarter)) & 255) << 23).to(tl.float32, bitcast=True)
            sums += products * (w_power[:, None] * x_power[None, :])
    place = (part * rows + t).to(tl.int64)[None, :] * outputs + n[:, None]
    mask = (t < rows)[None, :] & (n < outputs)[:, None]
    tl.store(out + place, as_dtype(sums, out.dtype.element_ty), mask=mask)


@triton.jit
def _merge(parts, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + place, mask=place < count, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * count + place, mask=place < count, other=0.0)
    tl.store(out + place, as_dtype(total, out.dtype.element_ty), mask=place < count)


def _parts(outputs: int, inputs: int, groups: int) -> int:
    """Equal parts that the inputs are cut into, so that few outputs still keep the device busy."""
    parts, programs = 1, triton.cdiv(outputs, OUTPUT_TILE) * groups
    while (
        programs * parts < ENOUGH_PROGRAMS
        and inputs >= 2 * parts * LEAST_INPUTS
        and inputs % (2 * parts * FP8_CHUNK) == 0
    ):
        parts *= 2
    return parts


class Products:
    """The dense operations.

    Args:
        fixed_tile: a tile always has `ROW_TILE` rows, whatever the batch.
    """

    def __init__(self, fixed_tile: bool) -> None:
        self.fixed_tile = fixed_tile

    def linear(self, rows: Rows, weight: DenseWeight) -> Tensor:
        """See the contract `linear`."""
        return self._of_rows(rows, weight, rows.values.dtype)

    def linear_accumulate(self, rows: Rows, weight: DenseWeight) -> Tensor:
        """See the contract `linear_accumulate`."""
        return self._of_rows(rows, weight, accumulate_dtype(rows.values.dtype))

    def grouped_linear(self, x: Tensor, weight: DenseWeight) -> Tensor:
        """See the contract `grouped_linear`."""
        return self._plain(x, weight, x.dtype)

    def _of_rows(self, rows: Rows | QuantisedRows, weight: DenseWeight | Fp8Weight, dtype: torch.dtype) -> Tensor:
        if isinstance(rows, QuantisedRows) and isinstance(weight, Fp8Weight) and self._on_fp8_units(rows):
            return self._fp8(rows, weight, dtype)
        x = rows.quantised if weight.quantised else rows.values
        return self._plain(x[:, None], weight, dtype)

    def _on_fp8_units(self, rows: QuantisedRows) -> bool:
        whole = rows.codes.shape[1] % FP8_CHUNK == 0
        return whole and rows.values.dtype is torch.bfloat16 and not INTERPRETED

    def _tile(self, rows: int) -> int:
        return ROW_TILE if self.fixed_tile else min(max(triton.next_power_of_2(rows), ROW_TILE), MOST_ROWS)

    def _fp8(self, rows: QuantisedRows, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
        count, inputs = rows.codes.shape
        outputs, tile = weight.codes.shape[0], self._tile(count)
        parts = _parts(outputs, inputs, 1)

        def run(out: Tensor) -> None:
            _fp8_product[(triton.cdiv(outputs, OUTPUT_TILE), triton.cdiv(count, tile), parts)](
                rows.codes.view(torch.float8_e4m3fn), rows.scales.view(torch.int32), weight.codes,
                weight.scales.view(torch.int32), out, count, outputs=outputs, inputs=inputs, PART=inputs // parts,
                TILE=tile, BN=OUTPUT_TILE, STAGES=4, num_warps=4, **EXACT,
            )  # fmt: skip

        return self._merged(run, count, outputs, parts, dtype, rows.codes.device)

    def _plain(self, x: Tensor, weight: DenseWeight | Fp8Weight, dtype: torch.dtype) -> Tensor:
        """x [T, G, K] -> [T, G N]."""
        x = x if x.stride(2) == 1 else x.contiguous()
        is_fp8 = isinstance(weight, Fp8Weight)
        stored, scales = (
            (weight.codes, weight.scales) if isinstance(weight, Fp8Weight) else (weight.values, weight.values)
        )
        (count, groups, inputs), total = x.shape, stored.shape[0]
        outputs, tile = total // groups, self._tile(count)
        parts = _parts(outputs, inputs, groups)
        part = inputs // parts
        wide = INTERPRETED or x.dtype is torch.float32 or stored.dtype is torch.float32

        def run(out: Tensor) -> None:
            _product[(triton.cdiv(outputs, OUTPUT_TILE), triton.cdiv(count, tile), groups * parts)](
                x, stored, scales, out, count, x.stride(0), x.stride(1),
                outputs=outputs, inputs=inputs, GROUPS=groups, PARTS=parts, PART=part, FP8=is_fp8, WIDE=wide,
                TILE=tile, BN=OUTPUT_TILE, BK=INPUT_CHUNK, num_warps=4, **EXACT,
            )  # fmt: skip

        return self._merged(run, count, total, parts, dtype, x.device)

    def _merged(
        self,
        run: Callable[[Tensor], None],
        rows: int,
        outputs: int,
        parts: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Result of a product that writes its parts."""
        out = torch.empty(rows, outputs, dtype=dtype, device=device)
        if not rows:
            return out
        if parts == 1:
            run(out)
            return out
        partial = torch.empty(parts, rows, outputs, dtype=torch.float32, device=device)
        run(partial)
        count = rows * outputs
        _merge[(triton.cdiv(count, MERGE_BLOCK),)](
            partial, out, count, PARTS=parts, BLOCK=MERGE_BLOCK, num_warps=4, **EXACT
        )
        return out


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family."""
    products = Products(fixed_tile=numerics.batch_invariant)
    promise = Determinism.ROW_INVARIANT if numerics.batch_invariant else Determinism.RUN_TO_RUN
    found = (products.linear, products.linear_accumulate, products.grouped_linear)
    return {function.__name__: Kernel(function, promise) for function in found}

"""Weights of the CPU backend: exact values in the dtype that its matrix products read.

Quantised weights become values of the compute dtype (every one is exact in bfloat16); plain ones become float32, so
that products that keep fp32 sums need no conversion per call. Engram tables stay memory-mapped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deepinfer.api.backend import Numerics, Placement, Shard, WeightGroup
from deepinfer.api.errors import CapabilityError
from deepinfer.api.formats import dequantise_fp4, dequantise_fp8, pack_fp4, scale_values
from deepinfer.api.ops import DenseWeight, EngramTable, ExpertWeights

__all__ = ["load", "plan_weights", "product_shapes", "unpack"]

LAYOUT = "dense:{dtype}"
E2M1_CODES = {0.0: 0, 0.5: 1, 1.0: 2, 1.5: 3, 2.0: 4, 3.0: 5, 4.0: 6, 6.0: 7}


def plan_weights(groups: Sequence[WeightGroup], shard: Shard, numerics: Numerics) -> list[Placement]:
    """Placement of every group; the layout names the dtype of its values.

    Raises:
        CapabilityError: more than one shard was asked for.
    """
    if shard.size != 1:
        raise CapabilityError(f"the CPU backend holds whole weights; got shard {shard.rank} of {shard.size}")
    return [_plan(group, numerics) for group in groups]


def product_shapes(groups: Sequence[WeightGroup]) -> tuple[tuple[int, int], ...]:
    """Distinct (outputs, inputs) of the matrix products with these groups, fused parts as one matrix."""
    shapes: set[tuple[int, int]] = set()
    for group in groups:
        parts = [part.shape for part in group.parts if part.dtype != "F8_E8M0" and len(part.shape) == 2]
        if group.kind == "fp4_experts":
            up, _, down = parts[:3]
            shapes |= {(2 * up[0], 2 * up[1]), (down[0], 2 * down[1])}
        elif group.kind != "fp8_rows" and parts:
            shapes.add((sum(shape[0] for shape in parts), parts[0][1]))
    return tuple(sorted(shapes))


def _plan(group: WeightGroup, numerics: Numerics) -> Placement:
    if group.kind == "fp8_rows":
        return Placement(group, sum(math.prod(part.shape) for part in group.parts), memory="mmap", layout="mmap")
    dtype = numerics.compute_dtype
    if group.kind in ("bf16", "float32"):
        dtype = numerics.accumulate_dtype
    per_byte = 2 if group.kind == "fp4_experts" else 1
    values = sum(per_byte * math.prod(part.shape) for part in group.parts if part.dtype != "F8_E8M0")
    scales = sum(math.prod(part.shape) for part in group.parts if part.dtype == "F8_E8M0")
    name = str(dtype).removeprefix("torch.")
    return Placement(group, values * dtype.itemsize + scales, layout=LAYOUT.format(dtype=name))


def _dtype(placement: Placement) -> torch.dtype:
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
    return names[placement.layout.removeprefix("dense:")]


def load(placement: Placement, raw: Mapping[str, Tensor]) -> DenseWeight | ExpertWeights | EngramTable:
    """Bring one group into its form; see `Backend.load`."""
    names = [part.name for part in placement.group.parts]
    if placement.group.kind == "fp8_rows":
        return EngramTable(raw[names[0]], raw[names[1]])
    dtype = _dtype(placement)
    if placement.group.kind == "fp8_block32":
        pairs = list(zip(names[0::2], names[1::2], strict=True))
        values = torch.cat([dequantise_fp8(raw[weight], raw[scale], weight).to(dtype) for weight, scale in pairs])
        return DenseWeight(values, quantised=True, scales=tuple(raw[scale].clone() for _, scale in pairs))
    if placement.group.kind == "fp4_experts":
        return _load_experts(names, raw, dtype)
    return DenseWeight(torch.cat([raw[name].to(dtype) for name in names]))


def _load_experts(names: list[str], raw: Mapping[str, Tensor], dtype: torch.dtype) -> ExpertWeights:
    """Experts from parts in the order (w1, scale, w3, scale, w2, scale) per expert."""
    count = len(names) // 6
    width, half = raw[names[0]].shape
    gate_up = torch.empty(count, 2 * width, 2 * half, dtype=dtype)
    down = torch.empty(count, raw[names[4]].shape[0], width, dtype=dtype)
    scales: list[tuple[Tensor, ...]] = []
    for expert in range(count):
        w1, s1, w3, s3, w2, s2 = names[6 * expert : 6 * expert + 6]
        gate_up[expert, :width] = dequantise_fp4(raw[w1], raw[s1], w1)
        gate_up[expert, width:] = dequantise_fp4(raw[w3], raw[s3], w3)
        down[expert] = dequantise_fp4(raw[w2], raw[s2], w2)
        scales.append((raw[s1], raw[s3], raw[s2]))
    up_scales = torch.stack([torch.cat(entry[:2]) for entry in scales])
    return ExpertWeights(gate_up, down, up_scales, torch.stack([entry[2] for entry in scales]))


def unpack(placement: Placement, handle: DenseWeight | ExpertWeights | EngramTable) -> dict[str, Tensor]:
    """The checkpoint's tensors again, byte for byte; see `Backend.unpack`."""
    parts = placement.group.parts
    if isinstance(handle, EngramTable):
        return {parts[0].name: handle.codes, parts[1].name: handle.scales}
    if isinstance(handle, ExpertWeights):
        return _unpack_experts([part.name for part in parts], handle)
    out: dict[str, Tensor] = {}
    row = 0
    for index, part in enumerate(part for part in parts if part.dtype != "F8_E8M0"):
        values = handle.values[row : row + part.shape[0]]
        row += part.shape[0]
        if handle.scales is None:
            out[part.name] = values.to(torch.bfloat16 if part.dtype == "BF16" else torch.float32)
            continue
        scale = handle.scales[index]
        grid = scale_values(scale).repeat_interleave(32, 0).repeat_interleave(32, 1)
        codes = values.to(torch.float32) / grid[: part.shape[0], : part.shape[1]]
        out[part.name] = codes.to(torch.float8_e4m3fn)
        out[parts[2 * index + 1].name] = scale
    return out


def _unpack_experts(names: list[str], experts: ExpertWeights) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    width = experts.down.shape[2]
    if experts.gate_up_scales is None or experts.down_scales is None:
        raise CapabilityError("these experts were not loaded from packed weights, so they have no stored bytes")
    for expert in range(experts.down.shape[0]):
        matrices = (experts.gate_up[expert, :width], experts.gate_up[expert, width:], experts.down[expert])
        scales = (*experts.gate_up_scales[expert].split(width), experts.down_scales[expert])
        for index, (values, scale) in enumerate(zip(matrices, scales, strict=True)):
            weight_name, scale_name = names[6 * expert + 2 * index : 6 * expert + 2 * index + 2]
            out[weight_name] = pack_fp4(_e2m1_codes(values.to(torch.float32), scale))
            out[scale_name] = scale
    return out


def _e2m1_codes(values: Tensor, scale: Tensor) -> Tensor:
    """e2m1 codes of values that are exact multiples of their group scale."""
    units = values / scale_values(scale).repeat_interleave(32, 1)
    codes = torch.zeros(units.shape, dtype=torch.uint8)
    for magnitude, code in E2M1_CODES.items():
        codes[units.abs() == magnitude] = code
    return codes | (torch.signbit(units).to(torch.uint8) << 3)

"""Weights as the reference handles hold them: exact values of the stored bytes, scales kept for the way back.

A real board would keep the packed bytes and hand out handles of its own that only its kernels can read. The values fit
the compute dtype, because every stored value is exact in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer.api.backend import Numerics, Placement, WeightGroup
from deepinfer.api.formats import dequantise_fp4, dequantise_fp8, pack_fp4, scale_values
from deepinfer.api.ops import DenseWeight, EngramTable, ExpertWeights

CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes of the e2m1 codes 0 to 7; the sign is bit 3."""


def plan(group: WeightGroup, numerics: Numerics) -> Placement:
    """Bytes and form of one group; n-gram tables stay in the checkpoint's files."""
    stored = sum(math.prod(part.shape) for part in group.parts)
    if group.kind == "fp8_rows":
        return Placement(group, stored, memory="mmap", layout="files")
    dtype = torch.float32 if group.kind in ("bf16", "float32") else numerics.compute_dtype
    scales = sum(math.prod(part.shape) for part in group.parts if part.dtype == "F8_E8M0")
    values = (stored - scales) * (2 if group.kind == "fp4_experts" else 1)
    return Placement(group, values * dtype.itemsize + scales, layout=str(dtype).removeprefix("torch."))


def load(placement: Placement, raw: Mapping[str, Tensor]) -> DenseWeight | ExpertWeights | EngramTable:
    """Handle of one group from the checkpoint's tensors, in the order of its parts."""
    tensors = [raw[part.name] for part in placement.group.parts]
    kind = placement.group.kind
    if kind == "fp8_rows":
        return EngramTable(*tensors)
    dtype = getattr(torch, placement.layout)
    if kind == "fp8_block32":
        pairs = list(zip(tensors[0::2], tensors[1::2], strict=True))
        values = torch.cat([dequantise_fp8(codes, scales) for codes, scales in pairs])
        return DenseWeight(values.to(dtype), quantised=True, scales=tuple(scales for _, scales in pairs))
    if kind == "fp4_experts":
        w1, s1, w3, s3, w2, s2 = (torch.stack(tensors[part::6]) for part in range(6))
        gate_up, gate_up_scales = torch.cat([w1, w3], 1), torch.cat([s1, s3], 1)
        return ExpertWeights(_experts(gate_up, gate_up_scales, dtype), _experts(w2, s2, dtype), gate_up_scales, s2)
    return DenseWeight(torch.cat(tensors).to(dtype))


def _experts(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    pairs = zip(codes, scales, strict=True)
    return torch.stack([dequantise_fp4(code, scale).to(dtype) for code, scale in pairs])


def unpack(placement: Placement, handle: Any) -> dict[str, Tensor]:
    """The checkpoint's tensors again, byte for byte."""
    parts = placement.group.parts
    if isinstance(handle, EngramTable):
        return {parts[0].name: handle.codes, parts[1].name: handle.scales}
    if isinstance(handle, ExpertWeights):
        return dict(zip((part.name for part in parts), _expert_tensors(handle), strict=True))
    rows = [part.shape[0] for part in parts if part.dtype != "F8_E8M0"]
    blocks = handle.values.split(rows)
    if handle.scales is None:
        dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
        return {part.name: block.to(dtypes[part.dtype]) for part, block in zip(parts, blocks, strict=True)}
    tensors = []
    for values, scales in zip(blocks, handle.scales, strict=True):
        grid = scale_values(scales).repeat_interleave(32, 0).repeat_interleave(32, 1)
        codes = values.float() / grid[: values.shape[0], : values.shape[1]]
        tensors += [codes.to(torch.float8_e4m3fn), scales]
    return dict(zip((part.name for part in parts), tensors, strict=True))


def _expert_tensors(experts: Any) -> Iterator[Tensor]:
    """Codes and scales of w1, w3 and w2, expert by expert."""
    for gate_up, up_scales, down, down_scales in zip(
        experts.gate_up, experts.gate_up_scales, experts.down, experts.down_scales, strict=True
    ):
        pairs = zip((*gate_up.chunk(2), down), (*up_scales.chunk(2), down_scales), strict=True)
        for values, scales in pairs:
            yield from (_fp4_codes(values, scales), scales)


def _fp4_codes(values: Tensor, scales: Tensor) -> Tensor:
    """Packed nibbles of exact values [N, K] under scales [N, K / 32]."""
    magnitudes = values.float() / scale_values(scales).repeat_interleave(32, 1)
    codes = torch.searchsorted(CODES, magnitudes.abs()) + 8 * torch.signbit(magnitudes)
    return pack_fp4(codes.to(torch.uint8))

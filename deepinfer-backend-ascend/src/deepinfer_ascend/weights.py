"""Which form each weight group has on the device, and its bytes again.

Quantised weights keep their codes where a product of torch_npu reads them as they are (layout `mx`: release numerics,
sums of a multiple of 64 terms, quantised rows); elsewhere they become exact values of the compute dtype (layout
`values`), once instead of in every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from deepinfer.api.backend import Numerics, Placement, Shard, WeightGroup
from deepinfer.api.errors import CapabilityError
from deepinfer.api.formats import dequantise_fp4, dequantise_fp8, pack_fp4
from deepinfer.api.ops import DenseWeight, EngramTable
from deepinfer_ascend.handles import GROUP, MxExperts, MxWeight, ValueExperts, exponents, mx_width

__all__ = ["Weight", "load", "plan_weights", "unpack"]

Weight = DenseWeight | MxWeight | ValueExperts | MxExperts | EngramTable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def plan_weights(groups: Sequence[WeightGroup], shard: Shard, numerics: Numerics) -> list[Placement]:
    """Placement of every group; the layout names form and dtype.

    Raises:
        CapabilityError: more than one shard was asked for.
    """
    if shard.size != 1:
        raise CapabilityError(f"the Ascend backend holds whole weights so far; got shard {shard.rank} of {shard.size}")
    return [_plan(group, numerics) for group in groups]


def _plan(group: WeightGroup, numerics: Numerics) -> Placement:
    sizes = {part.name: math.prod(part.shape) for part in group.parts}
    codes = [part for part in group.parts if part.dtype != "F8_E8M0"]
    if group.kind == "fp8_rows":
        return Placement(group, sum(sizes.values()), layout="rows")
    values = sum(sizes[part.name] for part in codes) * (2 if group.kind == "fp4_experts" else 1)
    scales = sum(sizes.values()) - sum(sizes[part.name] for part in codes)
    if group.kind in ("bf16", "float32"):
        return Placement(group, values * numerics.accumulate_dtype.itemsize, layout="values:float32")
    if _takes_mx(group, numerics):
        if group.kind == "fp8_block32":
            scales = sum(part.shape[0] * (part.shape[1] // GROUP) for part in codes)
        return Placement(group, values + scales, layout="mx")
    dtype = numerics.compute_dtype
    name = str(dtype).removeprefix("torch.")
    return Placement(group, values * dtype.itemsize + scales, layout=f"values:{name}")


def _takes_mx(group: WeightGroup, numerics: Numerics) -> bool:
    if numerics.compute_dtype is not torch.bfloat16 or not numerics.activation_quant or group.plain_rows:
        return False
    packed = 2 if group.kind == "fp4_experts" else 1
    return all(mx_width(packed * part.shape[1]) for part in group.parts if part.dtype != "F8_E8M0")


def load(placement: Placement, raw: Mapping[str, Tensor], device: torch.device) -> Weight:
    """Bring one group to the device; see `Backend.load`. Values are made on the host, one group at a time."""
    names = [part.name for part in placement.group.parts]
    form, _, dtype = placement.layout.partition(":")
    if form == "rows":
        return EngramTable(raw[names[0]].to(device), raw[names[1]].to(device))
    if placement.group.kind == "fp4_experts":
        return _load_experts(names, raw, form, dtype, device)
    if placement.group.kind != "fp8_block32":
        return DenseWeight(torch.cat([raw[name].to(DTYPES[dtype]) for name in names]).to(device))
    pairs = list(zip(names[0::2], names[1::2], strict=True))
    if form == "mx":
        codes = torch.cat([raw[code].view(torch.uint8) for code, _ in pairs]).to(device).view(torch.float8_e4m3fn)
        scales = torch.cat([raw[scale].repeat_interleave(GROUP, 0)[: raw[code].shape[0]] for code, scale in pairs])
        return MxWeight(codes.T, _paired(scales.to(device)), tuple(raw[code].shape[0] for code, _ in pairs))
    values = torch.cat([dequantise_fp8(raw[code], raw[scale], code).to(DTYPES[dtype]) for code, scale in pairs])
    return DenseWeight(values.to(device), quantised=True, scales=tuple(raw[scale].to(device) for _, scale in pairs))


def _paired(scales: Tensor) -> Tensor:
    """[..., N, K / 32] scale bytes as torch_npu reads them: [..., K / 64, N, 2]."""
    return scales.unflatten(-1, (-1, 2)).transpose(-3, -2).contiguous()


def _unpaired(scales: Tensor) -> Tensor:
    return scales.transpose(-3, -2).flatten(-2)


def _load_experts(
    names: list[str], raw: Mapping[str, Tensor], form: str, dtype: str, device: torch.device
) -> MxExperts | ValueExperts:
    """Experts from parts in the order (w1, scale, w3, scale, w2, scale) of each."""
    kept = torch.float8_e4m3fn if form == "mx" else DTYPES[dtype]
    matrices: dict[str, list[Tensor]] = {"gate_up": [], "down": []}
    scales: dict[str, list[Tensor]] = {"gate_up": [], "down": []}
    for start in range(0, len(names), 6):
        for key, part in (("gate_up", names[start : start + 4]), ("down", names[start + 4 : start + 6])):
            codes = torch.cat([_stored(raw, code, scale, form) for code, scale in _pairs(part)])
            matrices[key].append(codes.to(kept).to(device))
            scales[key].append(torch.cat([raw[scale] for _, scale in _pairs(part)]).to(device))
    up, down = (torch.stack(matrices[key]).transpose(1, 2) for key in ("gate_up", "down"))
    up_scales, down_scales = (torch.stack(scales[key]) for key in ("gate_up", "down"))
    if form == "mx":
        return MxExperts(up, down, _paired(up_scales), _paired(down_scales))
    return ValueExperts(up, down, up_scales, down_scales)


def _pairs(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    return zip(names[0::2], names[1::2], strict=True)


def _stored(raw: Mapping[str, Tensor], code: str, scale: str, form: str) -> Tensor:
    """float32 [N, K]: the e2m1 values as they are stored for `mx`, times their scales for `values`."""
    unit = torch.full_like(raw[scale], 127)
    return dequantise_fp4(raw[code], unit if form == "mx" else raw[scale], code)


def unpack(placement: Placement, handle: Weight) -> dict[str, Tensor]:
    """The checkpoint's tensors again, byte for byte, on the host."""
    parts = placement.group.parts
    names = [part.name for part in parts]
    if isinstance(handle, EngramTable):
        return {names[0]: handle.codes.cpu(), names[1]: handle.scales.cpu()}
    if isinstance(handle, (MxExperts, ValueExperts)):
        return _unpack_experts(names, handle)
    if isinstance(handle, MxWeight):
        codes = handle.codes.T.cpu().split(handle.part_rows)
        scales = _unpaired(handle.scales).cpu().split(handle.part_rows)
        pieces = [
            piece for code, scale in zip(codes, scales, strict=True) for piece in (code, scale[::GROUP].contiguous())
        ]
        return dict(zip(names, pieces, strict=True))
    return _unpack_dense(placement, handle)


def _unpack_dense(placement: Placement, handle: DenseWeight) -> dict[str, Tensor]:
    codes = [part for part in placement.group.parts if part.dtype != "F8_E8M0"]
    values = handle.values.cpu().split([part.shape[0] for part in codes])
    if handle.scales is None:
        kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
        return {part.name: value.to(kinds[part.dtype]) for part, value in zip(codes, values, strict=True)}
    out = {}
    for part, value, stored in zip(codes, values, handle.scales, strict=True):
        scale = stored.cpu()
        grid = exponents(scale).repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
        out[part.name] = (value.float() / grid[: part.shape[0], : part.shape[1]]).to(torch.float8_e4m3fn)
        out[part.name.removesuffix("weight") + "scale"] = scale
    return out


def _unpack_experts(names: list[str], handle: MxExperts | ValueExperts) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    mx = isinstance(handle, MxExperts)
    both = []
    for matrix, stored in ((handle.gate_up, handle.gate_up_scales), (handle.down, handle.down_scales)):
        values = matrix.transpose(1, 2).cpu().float()
        scales = (_unpaired(stored) if mx else stored).cpu()
        if not mx:
            values = values / exponents(scales).repeat_interleave(GROUP, -1)
        both.append((pack_fp4(_e2m1_codes(values)), scales))
    (up, up_scales), (down, down_scales) = both
    for expert in range(up.shape[0]):
        gate, third = up[expert].chunk(2)
        gate_scales, third_scales = up_scales[expert].chunk(2)
        pieces = (gate, gate_scales, third, third_scales, down[expert], down_scales[expert])
        out |= dict(zip(names[6 * expert : 6 * expert + 6], pieces, strict=True))
    return out


def _e2m1_codes(values: Tensor) -> Tensor:
    """Codes 0..15 of exact e2m1 values."""
    table = torch.tensor(E2M1_MAGNITUDES)
    return torch.bucketize(values.abs(), table).to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)

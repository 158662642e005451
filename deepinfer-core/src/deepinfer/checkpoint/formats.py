"""Stored weight formats and their exact values (spec/model 4.2), with the inverse packers.

Scales are e8m0 exponent bytes: value `2 ** (byte - 127)`; byte 255 means NaN and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from deepinfer.errors import CheckpointError

__all__ = [
    "dequantise",
    "dequantise_fp4",
    "dequantise_fp8",
    "dequantise_rows",
    "pack_fp4",
    "quantise_fp4",
    "quantise_fp8",
    "quantise_rows",
    "scale_values",
    "unpack_fp4",
]

BLOCK = 32
"""Edge of an FP8 tile; also the length of a scale group of FP4 experts and Engram rows."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES = torch.tensor([*E2M1, *(-value for value in E2M1)])
_SCALE_VALUES = torch.tensor([math.ldexp(1.0, byte - 127) for byte in range(255)] + [math.nan])
_FP8_FLOOR = 1e-4
_FP4_FLOOR = 6 * 2.0**-126


def scale_values(scale: torch.Tensor, name: str = "scale") -> torch.Tensor:
    """float32 values of e8m0 bytes (uint8, any shape).

    Raises:
        CheckpointError: a byte is 255.
    """
    bad = int((scale == 255).sum())
    if bad:
        raise CheckpointError(f"{name}: {bad} of {scale.numel()} e8m0 scale bytes are 255 (NaN); the file is damaged")
    return _SCALE_VALUES.to(scale.device)[scale.long()]


def dequantise_fp8(weight: torch.Tensor, scale: torch.Tensor, name: str = "weight") -> torch.Tensor:
    """float32 `[N, K]` of e4m3 `[N, K]` with a scale byte per 32 x 32 tile, `[ceil(N/32), ceil(K/32)]`."""
    rows, columns = weight.shape
    _check_scale(scale, (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)), name)
    factors = scale_values(scale, name).repeat_interleave(BLOCK, 1)[:, :columns]
    return weight.float().mul_(factors.repeat_interleave(BLOCK, 0)[:rows])


def dequantise_rows(weight: torch.Tensor, scale: torch.Tensor, name: str = "weight") -> torch.Tensor:
    """float32 `[rows, C]` of an Engram table: e4m3 `[rows, C]` with a scale byte per 32 channels of each row."""
    rows, columns = weight.shape
    _check_scale(scale, (rows, columns // BLOCK), name)
    groups = weight.float().view(rows, columns // BLOCK, BLOCK)
    return groups.mul_(scale_values(scale, name).unsqueeze(-1)).view(rows, columns)


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 `[..., K]` of packed bytes `[..., K/2]`: the low nibble comes first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Inverse of `unpack_fp4`: codes uint8 `[..., K]`, K even."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def dequantise_fp4(packed: torch.Tensor, scale: torch.Tensor, name: str = "weight") -> torch.Tensor:
    """float32 `[N, K]` of packed e2m1 `[N, K/2]` with a scale byte per 32 inputs of each row, `[N, K/32]`."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    _check_scale(scale, (rows, columns // BLOCK), name)
    values = _FP4_VALUES.to(packed.device)[unpack_fp4(packed).long()].view(rows, columns // BLOCK, BLOCK)
    return values.mul_(scale_values(scale, name).unsqueeze(-1)).view(rows, columns)


def _check_scale(scale: torch.Tensor, shape: tuple[int, int], name: str) -> None:
    if tuple(scale.shape) != shape:
        raise CheckpointError(f"{name}: scale has shape {list(scale.shape)}, expected {list(shape)}")


def dequantise(raw: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """float32 values of raw tensors, each `X.weight` joined with its `X.scale`; other tensors are widened.

    Raises:
        CheckpointError: a quantised weight without its scale, or a scale byte of 255.
    """
    values = {}
    for name, tensor in raw.items():
        if name.endswith(".scale") and name.removesuffix("scale") + "weight" in raw:
            continue
        if tensor.dtype not in (torch.uint8, torch.float8_e4m3fn):
            values[name] = tensor.float()
            continue
        scale = raw.get(name.removesuffix("weight") + "scale")
        if scale is None:
            raise CheckpointError(f"{name} is quantised but its scale tensor is not at hand; read both")
        if tensor.dtype is torch.uint8:
            values[name] = dequantise_fp4(tensor, scale, name)
        elif name.endswith("engram.embed.weight"):
            values[name] = dequantise_rows(tensor, scale, name)
        else:
            values[name] = dequantise_fp8(tensor, scale, name)
    return values


def _exponent_bytes(amax: torch.Tensor, largest: float, floor: float) -> torch.Tensor:
    """e8m0 bytes of the smallest power of two that brings `amax` (float32) to at most `largest`."""
    mantissa, exponent = torch.frexp(amax.clamp_min(floor) / largest)
    return (exponent - (mantissa == 0.5).int() + 127).clamp_(0, 254).to(torch.uint8)


def _to_e4m3(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values / _SCALE_VALUES[scale.long()]).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)


def quantise_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 `[N, K]` and scale bytes `[ceil(N/32), ceil(K/32)]` of float32 `[N, K]`, per 32 x 32 tile."""
    rows, columns = values.shape
    tall, wide = math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)
    padded = torch.nn.functional.pad(values, (0, wide * BLOCK - columns, 0, tall * BLOCK - rows))
    tiles = padded.view(tall, BLOCK, wide, BLOCK)
    scale = _exponent_bytes(tiles.abs().amax((1, 3)), 448.0, _FP8_FLOOR)
    coded = _to_e4m3(tiles, scale[:, None, :, None]).view(tall * BLOCK, wide * BLOCK)
    return coded[:rows, :columns].contiguous(), scale


def quantise_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 `[rows, C]` and scale bytes `[rows, C/32]` of float32 `[rows, C]`, C a multiple of 32."""
    rows, columns = values.shape
    groups = values.view(rows, columns // BLOCK, BLOCK)
    scale = _exponent_bytes(groups.abs().amax(-1), 448.0, _FP8_FLOOR)
    return _to_e4m3(groups, scale.unsqueeze(-1)).view(rows, columns), scale


def quantise_fp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed e2m1 `[N, K/2]` and scale bytes `[N, K/32]` of float32 `[N, K]`, K a multiple of 32; ties to even."""
    rows, columns = values.shape
    groups = values.view(rows, columns // BLOCK, BLOCK)
    scale = _exponent_bytes(groups.abs().amax(-1), 6.0, _FP4_FLOOR)
    scaled = groups / _SCALE_VALUES[scale.long()].unsqueeze(-1)
    size = scaled.abs().clamp_max_(6.0)
    # e2m1 steps are 0.5 below 2, 1 below 4, 2 above; rounding half to even on the value is half to even on the code
    code = torch.where(size < 2, (2 * size).round_(), torch.where(size < 4, size.round() + 2, (size / 2).round_() + 4))
    codes = code.to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)
    return pack_fp4(codes.view(rows, columns)), scale

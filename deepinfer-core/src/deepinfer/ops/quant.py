"""Quantisers and byte-exact row formats (spec/model 4.1, 4.5).

Group exponents are computed on the bits of the fp32 value, so every step here is exact or defined by one rounding:
all backends must give the same bytes for the same fp32 input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, Tolerance, composite, op
from deepinfer.ops.handles import Rows
from deepinfer.ops.sample_inputs import normal, row_counts

__all__ = [
    "FP4_BLOCK16",
    "FP4_BLOCK32",
    "FP8_BLOCK32",
    "RowFormat",
    "fp4_block16_quantise",
    "fp4_block32_quantise",
    "fp8_block32_quantise",
    "pack_nibbles",
    "pack_rows",
    "plain_format",
    "quantise_rows",
    "round_rows",
    "unpack_nibbles",
    "unpack_rows",
]

FP8_MAX = 448.0
FP4_MAX = 6.0
FP8_AMAX_FLOOR = 1e-4
FP4_BLOCK32_AMAX_FLOOR = 6.0 * 2.0**-126
FP4_BLOCK16_AMAX_FLOOR = 6.0 * 2.0**-9
E8M0_BIAS = 127

E2M1_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _ceil_power_of_two(value: Tensor) -> Tensor:
    """Smallest power of two >= value (positive normal fp32), as fp32."""
    return ((value.to(torch.float32).view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def _exponent_bytes(power: Tensor) -> Tensor:
    """e8m0 bytes of powers of two (fp32): their exponent bits."""
    return (power.view(torch.int32) >> 23).to(torch.uint8)


E8M0_VALUES = torch.tensor([2.0 ** (byte - E8M0_BIAS) for byte in range(255)] + [float("nan")])


@cache
def _e8m0_table(device: torch.device) -> Tensor:
    """Kept per device: a copy from host memory in every call could not be captured into a graph."""
    return E8M0_VALUES.to(device)


@cache
def _e2m1_table(device: torch.device) -> Tensor:
    return torch.cat((E2M1_VALUES, -E2M1_VALUES)).to(device)


def exponent_values(scale_bytes: Tensor) -> Tensor:
    """Value 2 ** (byte - 127) of e8m0 bytes as float32; byte 255 is NaN."""
    return _e8m0_table(scale_bytes.device)[scale_bytes.to(torch.int64)]


def _groups(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    grouped = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return grouped, grouped.abs().amax(-1, keepdim=True).to(torch.float32)


def _e2m1_codes(scaled: Tensor) -> Tensor:
    """e2m1 codes (uint8, sign << 3 | index) of values in [-6, 6], round to nearest, ties to even mantissa.

    Values lie 1/2 apart up to 2, 1 apart up to 4 and 2 apart up to 6. Rounding to each of these steps and counting
    codes from where its range would start gives three indices; outside its range a step never counts too few.
    """
    magnitude = scaled.abs()
    index = (magnitude * 2).round_()
    index = torch.minimum(index, magnitude.round().add_(2))
    index = torch.minimum(index, (magnitude * 0.5).round_().add_(4))
    return index.to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)


def e2m1_values(codes: Tensor) -> Tensor:
    """Values (float32) of e2m1 codes, one code per element."""
    return _e2m1_table(codes.device)[codes.to(torch.int64)]


def _group_samples(group: int) -> Callable[[SampleSize, torch.Generator], Iterator[Sample]]:
    def samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
        width = {"tiny": 64, "odd": 5 * 32, "real": 512}[size]
        for label, rows in row_counts(size):
            yield Sample(label, {"x": normal(generator, rows, width)}, ("x",))
        spread = torch.randint(-30, 30, (6, width // group, 1), generator=generator).float()
        wide = (normal(generator, 6, width // group, group) * torch.exp2(spread)).reshape(6, width)
        yield Sample("wide exponents", {"x": wide}, ("x",))
        yield Sample("zeros", {"x": torch.zeros(2, width)}, ("x",))
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * (width // 8)).repeat(2, 1)
        yield Sample("exact ties", {"x": ties * torch.tensor([[1.0], [-1.0]])}, ("x",))
        yield Sample("huge", {"x": 1e30 * normal(generator, 2, width)}, ("x",))

    return samples


@op(samples=_group_samples(32), determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0), activations=("x",))
def fp8_block32_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 e4m3 codes with a power-of-two scale per 32 channels (Q8 of spec/model 4.1).

    Args:
        x: [..., C], C a multiple of 32.

    Returns:
        codes [..., C] float8_e4m3fn and scale bytes [..., C / 32] uint8 (e8m0).
    """
    codes, scale = _fp8_groups(x)
    return codes.reshape(x.shape), _exponent_bytes(scale).squeeze(-1)


def _fp8_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., C / 32, 32] and the scale of each group [..., C / 32, 1] fp32."""
    grouped, amax = _groups(x, 32)
    scale = _ceil_power_of_two(amax.clamp(min=FP8_AMAX_FLOOR) / FP8_MAX)
    scaled = (grouped / scale.to(grouped.dtype)).clamp(-FP8_MAX, FP8_MAX).to(torch.float32)
    return scaled.to(torch.float8_e4m3fn), scale


@op(samples=_group_samples(32), determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0), activations=("x",))
def fp4_block32_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP4 e2m1 codes with a power-of-two scale per 32 channels (Q4i of spec/model 4.1: index queries and keys).

    Returns:
        codes [..., C] uint8, one code per element, and scale bytes [..., C / 32] uint8 (e8m0).
    """
    codes, scale = _fp4_groups(x)
    return codes.reshape(x.shape), _exponent_bytes(scale).squeeze(-1)


def _fp4_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [..., C / 32, 32] and the scale of each group [..., C / 32, 1] fp32."""
    grouped, amax = _groups(x, 32)
    scale = _ceil_power_of_two(amax.clamp(min=FP4_BLOCK32_AMAX_FLOOR) / FP4_MAX)
    return _e2m1_codes((grouped / scale.to(grouped.dtype)).clamp(-FP4_MAX, FP4_MAX)), scale


@op(samples=_group_samples(16), determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0), activations=("x",))
def fp4_block16_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP4 e2m1 codes with an e4m3 scale per 16 channels (Q4kv of spec/model 4.1: compressed entries).

    Returns:
        codes [..., C] uint8, one code per element, and scales [..., C / 16] uint8 (e4m3 bytes).
    """
    grouped, amax = _groups(x, 16)
    scale = (amax.clamp(min=FP4_BLOCK16_AMAX_FLOOR) / FP4_MAX).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
    scaled = (grouped / scale.to(torch.float32).to(grouped.dtype)).clamp(-FP4_MAX, FP4_MAX)
    return _e2m1_codes(scaled).reshape(x.shape), scale.view(torch.uint8).squeeze(-1)


def _nibble_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    width = {"tiny": 32, "odd": 34, "real": 512}[size]
    for label, rows in row_counts(size):
        codes = torch.randint(0, 16, (rows, width), generator=generator, dtype=torch.uint8)
        yield Sample(label, {"codes": codes}, ("codes",))


@op(samples=_nibble_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0))
def pack_nibbles(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte: channel 2i in the low nibble, 2i + 1 in the high one; [..., C] -> [..., C / 2] uint8."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _packed_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for sample in _nibble_samples(size, generator):
        yield Sample(sample.label, {"packed": pack_nibbles(sample.kwargs["codes"])}, ("packed",))


@op(samples=_packed_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0))
def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of `pack_nibbles`: [..., C / 2] uint8 -> codes [..., C] uint8."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


@dataclass(frozen=True)
class RowFormat:
    """How one cached row of `width` channels lies in bytes.

    Attributes:
        name: "fp8_block32", "fp4_block16", "fp4_block32" or "plain:<dtype>".
        width: channels.
    """

    name: str
    width: int

    @property
    def data_bytes(self) -> int:
        """Bytes of codes or plain values, before the scales."""
        if self.name.startswith("plain:"):
            return self.width * self.plain_dtype.itemsize
        return self.width if self.name == "fp8_block32" else self.width // 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales, after the data."""
        if self.name.startswith("plain:"):
            return 0
        return self.width // (16 if self.name == "fp4_block16" else 32)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.data_bytes + self.scale_bytes

    @property
    def plain_dtype(self) -> torch.dtype:
        """Dtype of the values of a plain format."""
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[
            self.name.removeprefix("plain:")
        ]


FP8_BLOCK32, FP4_BLOCK16, FP4_BLOCK32 = "fp8_block32", "fp4_block16", "fp4_block32"


def plain_format(width: int, dtype: torch.dtype) -> RowFormat:
    """Unquantised rows of the compute dtype."""
    return RowFormat("plain:" + str(dtype).removeprefix("torch."), width)


def _row_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    width = {"tiny": 64, "odd": 96, "real": 512}[size]
    formats = [RowFormat(name, width) for name in (FP8_BLOCK32, FP4_BLOCK16, FP4_BLOCK32)]
    for row_format in (*formats, plain_format(width, torch.float32)):
        for label, rows in row_counts(size):
            yield Sample(
                f"{row_format.name}, {label}", {"x": normal(generator, rows, width), "row_format": row_format}, ("x",)
            )


@op(
    samples=_row_samples,
    determinism=Determinism.EXACT,
    tolerance=Tolerance(0.0, 0.0),
    activations=("x",),
    aliases=("x",),
)
def pack_rows(x: Tensor, row_format: RowFormat) -> Tensor:
    """Quantise rows into the canonical byte layout: codes of all channels, then the scales (spec/model 4.5).

    Args:
        x: [..., width].

    Returns:
        [..., row_bytes] uint8.
    """
    if row_format.name == FP8_BLOCK32:
        codes, scales = fp8_block32_quantise(x)
        return torch.cat((codes.view(torch.uint8), scales), dim=-1)
    if row_format.name == FP4_BLOCK16:
        codes, scales = fp4_block16_quantise(x)
        return torch.cat((pack_nibbles(codes), scales), dim=-1)
    if row_format.name == FP4_BLOCK32:
        codes, scales = fp4_block32_quantise(x)
        return torch.cat((pack_nibbles(codes), scales), dim=-1)
    return x.to(row_format.plain_dtype).contiguous().view(torch.uint8)


def _unpack_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    for sample in _row_samples(size, generator):
        row_format = sample.kwargs["row_format"]
        packed = pack_rows(sample.kwargs["x"], row_format)
        yield Sample(sample.label, {"packed": packed, "row_format": row_format, "dtype": torch.float32}, ("packed",))


@op(
    samples=_unpack_samples,
    determinism=Determinism.EXACT,
    tolerance=Tolerance(0.0, 0.0),
    activations=("dtype",),
    aliases=("packed",),
)
def unpack_rows(packed: Tensor, row_format: RowFormat, dtype: torch.dtype) -> Tensor:
    """Exact values of packed rows.

    Args:
        packed: [..., row_bytes] uint8, last dimension contiguous.
        dtype: of the result; every packed value is exact in bfloat16 (spec/model 4.6).

    Returns:
        [..., width].
    """
    if row_format.name.startswith("plain:"):
        return packed.contiguous().view(row_format.plain_dtype).to(dtype)
    data, scales = packed.split((row_format.data_bytes, row_format.scale_bytes), dim=-1)
    if row_format.name == FP8_BLOCK32:
        values = data.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
        scale = exponent_values(scales)
    else:
        values = e2m1_values(unpack_nibbles(data))
        e4m3 = row_format.name == FP4_BLOCK16
        scale = scales.contiguous().view(torch.float8_e4m3fn).to(torch.float32) if e4m3 else exponent_values(scales)
    group = row_format.width // row_format.scale_bytes
    return (values.unflatten(-1, (-1, group)) * scale[..., None]).flatten(-2).to(dtype)


@op(
    samples=_row_samples,
    determinism=Determinism.EXACT,
    tolerance=Tolerance(0.0, 0.0),
    activations=("x",),
    aliases=("x",),
)
def round_rows(x: Tensor, row_format: RowFormat) -> Tensor:
    """Values of x after the format's quantiser, in the dtype of x: `unpack_rows(pack_rows(x))` without the bytes."""
    if row_format.name == FP8_BLOCK32:
        codes, scale = _fp8_groups(x)
        return (codes.to(torch.float32) * scale).flatten(-2).to(x.dtype)
    if row_format.name == FP4_BLOCK32:
        codes, scale = _fp4_groups(x)
        return (e2m1_values(codes) * scale).flatten(-2).to(x.dtype)
    return unpack_rows(pack_rows(x, row_format), row_format, x.dtype)


def _quantise_rows_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    width = {"tiny": 64, "odd": 96, "real": 5120}[size]
    for enabled in (True, False):
        for label, rows in row_counts(size):
            yield Sample(
                f"{label}, enabled={enabled}", {"x": normal(generator, rows, width), "enabled": enabled}, ("x",)
            )


@composite(
    uses=("round_rows",),
    samples=_quantise_rows_samples,
    determinism=Determinism.EXACT,
    tolerance=Tolerance(0.0, 0.0),
    activations=("x",),
    aliases=("x",),
)
def quantise_rows(kernels: object) -> Callable[[Tensor, bool], Rows]:
    """Activations in the forms that linears read: plain and, if enabled, FP8-rounded per 32 channels."""
    round_to = kernels.round_rows  # type: ignore[attr-defined]

    def quantise_rows(x: Tensor, enabled: bool) -> Rows:
        return Rows(x, round_to(x, RowFormat(FP8_BLOCK32, x.shape[-1])) if enabled else x)

    return quantise_rows

"""Device functions: stored codes and scale bytes to exact values, and values to the nearest codes."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "INTERPRETED",
    "as_dtype",
    "ceil_power_of_two",
    "e2m1_codes",
    "e4m3_bytes",
    "e4m3_values",
    "exponent_bytes",
    "exponent_values",
    "fp4_values",
    "nearest_bf16",
    "nearest_integer",
    "reciprocal_power",
]

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in the interpreter. It knows no bfloat16 products, so operands are widened there, exactly."""


@triton.jit
def exponent_values(bytes_):
    """float32 values 2 ** (byte - 127) of e8m0 bytes; 2 ** -127, a subnormal number, for byte 0."""
    bits = bytes_.to(tl.int32)
    return tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp4_values(codes):
    """float32 values of e2m1 codes 0 .. 15: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    code = codes.to(tl.int32)
    exponent, mantissa = (code >> 1) & 3, code & 1
    # 0 and 0.5 have no hidden bit; the others are (1 + m / 2) * 2 ** (e - 1).
    bits = ((exponent + 126) << 23) | (mantissa << 22)
    small = tl.where(mantissa == 1, 0x3F000000, 0)
    bits = tl.where(exponent == 0, small, bits) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def nearest_integer(value):
    """float32 values below 2 ** 22 rounded to integers, ties to even."""
    magic = 12582912.0
    return (value + magic) - magic


@triton.jit
def ceil_power_of_two(value):
    """Smallest power of two >= value, for positive normal float32 values."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def exponent_bytes(power):
    """e8m0 bytes of float32 powers of two."""
    return (power.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)


@triton.jit
def reciprocal_power(power):
    """1 / power of float32 powers of two below 2 ** 127, exactly."""
    return ((254 << 23) - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_bytes(value):
    """e4m3 codes (uint8) of float32 values in [-448, 448], round to nearest even; NaN stays NaN."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    small = nearest_integer(tl.minimum(tl.abs(value), 1.0) * 512.0).to(tl.int32)
    code = tl.where(magnitude < 0x3C800000, small, rounded - (120 << 3))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_values(bytes_):
    """float32 values of e4m3 codes (uint8)."""
    code = bytes_.to(tl.int32)
    magnitude = code & 0x7F
    value = ((magnitude << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def e2m1_codes(value):
    """e2m1 codes (int32) of float32 values in [-6, 6], round to nearest, ties to even mantissa.

    Steps are 1/2 up to 2, 1 up to 4 and 2 up to 6; outside its range a step never counts too few codes.
    """
    magnitude = tl.abs(value)
    index = nearest_integer(magnitude * 2)
    index = tl.minimum(index, nearest_integer(magnitude) + 2)
    index = tl.minimum(index, nearest_integer(magnitude * 0.5) + 4)
    return index.to(tl.int32) | ((value.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def nearest_bf16(value):
    """float32 values rounded to bfloat16 precision, ties to even; the interpreter's own conversion cuts instead."""
    bits = value.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(value == value, rounded, value)


@triton.jit
def as_dtype(value, dtype: tl.constexpr):
    """float32 values in a compute dtype."""
    if dtype == tl.bfloat16:
        value = nearest_bf16(value)
    return value.to(dtype)

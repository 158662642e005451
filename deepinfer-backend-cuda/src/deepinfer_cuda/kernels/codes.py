"""Device functions: stored codes and scale bytes to exact values."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "exponent_values", "fp4_values"]

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in the interpreter, whose products know no bfloat16: operands are widened there, exactly."""


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

"""Device functions of counter-based noise: the float32 operations of the contract `sample_rows`, in their order."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["fixed_log", "log_noise"]

SQRT_HALF_BITS = tl.constexpr(0x3F3504F3)
LN2_HIGH = tl.constexpr(45426 / 65536)
LN2_LOW = tl.constexpr(1.428606765330187e-06)


@triton.jit
def _log_parts(x, correction):
    """log(x) plus a small correction, for positive normal float32 values."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    s = tl.div_rn(f, f + 2.0)
    z = s * s
    series = z * (0.6666666865348816 + z * (0.4000000059604645 + z * (0.2857142984867096 + z * 0.2222222238779068)))
    k = exponent.to(tl.float32)
    low = k * LN2_LOW + correction
    return k * LN2_HIGH + (f - (s * (f - series) - low))


@triton.jit
def fixed_log(x):
    """Natural logarithm of float32 values that are positive and normal, or infinite."""
    return tl.where(x == float("inf"), x, _log_parts(x, tl.zeros_like(x)))


@triton.jit
def log_noise(words):
    """log E of uint32 words, E = -log1p(-(word + 1/2) / 2 ** 32); infinite for words that round to 2 ** 32."""
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    w = 1.0 - u
    lost = (0.0 - u) - (w - 1.0)
    safe = tl.where(w == 0, 1.0, w)
    exponential = tl.where(w == 0, float("inf"), 0.0 - _log_parts(safe, tl.div_rn(lost, safe)))
    return fixed_log(exponential)

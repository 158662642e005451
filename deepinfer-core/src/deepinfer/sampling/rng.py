"""Counter-based randomness whose bits depend on seed, position, completion and token id only.

Words come from Philox4x32-10 with key = seed (low word first) and counter =
(token id >> 2, position, purpose + 256 * completion, stream); the word of a token is number (token id & 3). The stream
is 0 but for drafts, whose noise is fresh in every block. The noise of a
token is log E with E = -log1p(-(word + 1/2) * 2**-32) in float32, so argmax(z - log E) draws from softmax(z).

`log` and `log1p` are fixed sequences of correctly rounded float32 operations (+, -, *, /) and bit operations without
fused multiply-add, so that every backend that follows them has the same bits; within 2 ulp of the exact value. Two
properties matter beyond accuracy: the smallest word still gives E = 2**-33 (a naive float32 uniform bounds the winning
noise, so that in a large vocabulary some ids could not be drawn), and a word that rounds to 2**32 gives E = inf, whose
token is never chosen (it would otherwise win or lose at random).
"""

from __future__ import annotations

import math
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

__all__ = ["UNIT", "Purpose", "exponential", "log", "log1p_negative", "noise", "philox4x32", "random_words"]

MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
UNIT = 2.0**-32
"""(word + 1/2) * UNIT is a uniform number in (0, 1)."""

SQRT_HALF_BITS = 0x3F3504F3
LN2_HIGH = 45426 / 65536  # 16 bits of ln 2: exact times any float32 exponent
LN2_LOW = float(np.float32(math.log(2) - LN2_HIGH))
# 2 atanh(s) = 2 s + s (2/3 s^2 + 2/5 s^4 + ...); |s| <= 0.1716, so the first dropped term is below 2^-28 of 2 s.
ATANH = tuple(float(np.float32(2 / n)) for n in (3, 5, 7, 9))


class Purpose(IntEnum):
    """What a draw is for; draws of different purpose at one position are independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 on int64 tensors that hold unsigned 32-bit words and broadcast together; returns four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_index in range(ROUNDS):
        if round_index:
            k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
        # The 64-bit products wrap as signed integers; shift and mask recover both unsigned halves.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & MASK) ^ c1 ^ k0,
            product1 & MASK,
            ((product0 >> 32) & MASK) ^ c3 ^ k1,
            product0 & MASK,
        )
    return c0, c1, c2, c3


def random_words(
    seeds: Tensor,
    positions: Tensor,
    completions: Tensor,
    vocab_size: int,
    purpose: Purpose = Purpose.TARGET,
    streams: Tensor | None = None,
) -> Tensor:
    """One word in [0, 2**32) for every row and token id.

    Args:
        seeds: int64 [R], bits of the unsigned seeds.
        positions: int64 [R], position of the token to be drawn.
        completions: int64 [R].
        vocab_size: V.
        purpose: what the draw is for.
        streams: int64 [R], tells draws apart that agree in everything else; None: 0.

    Returns:
        int64 [R, V].
    """
    rows = seeds.shape[0]
    groups = torch.arange(-(-vocab_size // 4), device=seeds.device).expand(rows, -1)
    key = ((seeds & MASK)[:, None], ((seeds >> 32) & MASK)[:, None])
    third = (completions * 256 + int(purpose)) & MASK
    fourth = torch.zeros_like(third) if streams is None else streams & MASK
    words = philox4x32((groups, (positions & MASK)[:, None], third[:, None], fourth[:, None]), key)
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]


def _log_parts(x: Tensor, correction: Tensor | None) -> Tensor:
    """Log of positive normal float32 values plus a small correction, in one fixed order of operations."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    s = f / (f + 2.0)
    z = s * s
    series = z * (ATANH[0] + z * (ATANH[1] + z * (ATANH[2] + z * ATANH[3])))
    k = exponent.to(torch.float32)
    low = k * LN2_LOW if correction is None else k * LN2_LOW + correction
    return k * LN2_HIGH + (f - (s * (f - series) - low))


def log(x: Tensor) -> Tensor:
    """Natural logarithm of float32 values that are positive and normal, or infinite; within 2 ulp."""
    return torch.where(torch.isinf(x), x, _log_parts(x, None))


def log1p_negative(u: Tensor) -> Tensor:
    """log(1 - u) of float32 values in [2**-126, 1]; -inf at 1; within 2 ulp."""
    w = 1.0 - u
    lost = (-u) - (w - 1.0)
    safe = torch.where(w == 0, torch.ones_like(w), w)
    return torch.where(w == 0, torch.full_like(w, -math.inf), _log_parts(safe, lost / safe))


def exponential(words: Tensor) -> Tensor:
    """Exponential noise E of 32-bit words as float32: at least 2**-33, infinite for words that round to 2**32."""
    return -log1p_negative((words.to(torch.float32) + 0.5) * UNIT)


def noise(
    seeds: Tensor,
    positions: Tensor,
    completions: Tensor,
    vocab_size: int,
    purpose: Purpose = Purpose.TARGET,
    streams: Tensor | None = None,
) -> Tensor:
    """Log E of every row and token id, float32 [R, V]; subtract it from scaled logits and take the argmax."""
    return log(exponential(random_words(seeds, positions, completions, vocab_size, purpose, streams)))

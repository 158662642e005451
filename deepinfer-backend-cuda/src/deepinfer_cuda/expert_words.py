"""FP4 experts in the order in which FP8 matrix units take them.

128 outputs and 64 inputs make 2,048 words of 32 bits in the order (output, word); word i of an output holds inputs
4 i .. 4 i + 3 of the first 32 inputs (magnitudes in nibbles 0 to 3) and of the next 32 (nibbles 4 to 7). A nibble's
fourth bit is free then: bit 8 c + 7 is the sign of the c-th code of the first half, bit 8 c + 3 that of the second. So
two byte permutations turn a word into eight e4m3 bytes. Scales: the four exponent bytes of 128 inputs are one word.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.api.formats import dequantise_fp4

__all__ = ["TILE_INPUTS", "TILE_OUTPUTS", "ExpertWords", "pack_words", "unpack_words"]

TILE_OUTPUTS = 128
TILE_INPUTS = 128
"""Outputs and inputs of a projection must be multiples of these."""


def pack_words(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Checkpoint bytes uint8 [N, K / 2] and [N, K / 32] -> int32 [N K / 8] and [N K / 128]."""
    outputs, inputs = codes.shape[0], 2 * codes.shape[1]
    nibbles = torch.stack((codes & 15, codes >> 4), -1)
    parts = nibbles.reshape(outputs // TILE_OUTPUTS, TILE_OUTPUTS, inputs // TILE_INPUTS, 2, 2, 8, 4)
    parts = parts.permute(0, 2, 3, 1, 5, 4, 6).to(torch.int32)
    words = torch.zeros(parts.shape[:5], dtype=torch.int32, device=codes.device)
    for code in range(4):
        first, second = parts[..., 0, code], parts[..., 1, code]
        words |= (first & 7) << (4 * code) | (first >> 3) << (8 * code + 7)
        words |= (second & 7) << (16 + 4 * code) | (second >> 3) << (8 * code + 3)
    grouped = scales.reshape(outputs // TILE_OUTPUTS, TILE_OUTPUTS, inputs // TILE_INPUTS, 4).permute(0, 2, 1, 3)
    return words.flatten(), grouped.contiguous().view(torch.int32).flatten()


def unpack_words(words: Tensor, scales: Tensor, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Inverse of `pack_words`."""
    blocks, steps = outputs // TILE_OUTPUTS, inputs // TILE_INPUTS
    wide = words.view(blocks, steps, 2, TILE_OUTPUTS, 8).to(torch.int64)
    codes = torch.empty(blocks, steps, 2, TILE_OUTPUTS, 8, 2, 4, dtype=torch.uint8, device=words.device)
    for code in range(4):
        codes[..., 0, code] = (wide >> (4 * code)) & 7 | ((wide >> (8 * code + 7)) & 1) << 3
        codes[..., 1, code] = (wide >> (16 + 4 * code)) & 7 | ((wide >> (8 * code + 3)) & 1) << 3
    nibbles = codes.permute(0, 3, 1, 2, 5, 4, 6).reshape(outputs, inputs)
    grouped = scales.view(torch.uint8).view(blocks, steps, TILE_OUTPUTS, 4).permute(0, 2, 1, 3)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4), grouped.reshape(outputs, inputs // 32)


@dataclass(frozen=True, slots=True)
class ExpertWords:
    """One projection of all experts, packed.

    Attributes:
        words: int32 [E, N K / 8].
        scales: int32 [E, N K / 128].
        shape: (E, N, K).
        dtype: compute dtype of exact values.
    """

    words: Tensor
    scales: Tensor
    shape: tuple[int, int, int]
    dtype: torch.dtype

    def stored(self, expert: int) -> tuple[Tensor, Tensor]:
        """Checkpoint bytes [N, K / 2] and [N, K / 32] of one expert."""
        return unpack_words(self.words[expert], self.scales[expert], *self.shape[1:])

    def __getitem__(self, expert: int) -> Tensor:
        """Exact values [N, K] of one expert, made anew by every call."""
        return dequantise_fp4(*self.stored(expert)).to(self.dtype)

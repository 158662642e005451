"""How many rows of each sequence stand: one program a sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.api.backend import Determinism, Kernel, Numerics

__all__ = ["kernels", "verify_coupled"]

CHUNK = 64


@triton.jit
def _verify(drafts, targets, status, starts, counts, accepted, tokens, CHUNK: tl.constexpr):
    sequence = tl.program_id(0)
    start, count = tl.load(starts + sequence), tl.load(counts + sequence)
    stand, first = count, count * 0
    while first < count:
        row = first + tl.arange(0, CHUNK)
        later = (row < count) & (row > 0)
        draft = tl.load(drafts + start + row, mask=later, other=-1)
        drawn = tl.load(targets + start + row - 1, mask=later, other=-1)
        sound = tl.load(status + start + row - 1, mask=later, other=1) == 0
        missed = later & ~((draft >= 0) & (draft == drawn) & sound)
        stand = tl.minimum(stand, tl.min(tl.where(missed, row, count)))
        first += CHUNK
    tl.store(accepted + sequence, stand)
    tl.store(tokens + sequence, tl.load(targets + start + stand - 1, mask=stand > 0, other=-1))


def verify_coupled(
    drafts: Tensor, targets: Tensor, status: Tensor, sequences: Tensor, starts: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """See the contract `verify_coupled`; the rows of a sequence follow each other, so `sequences` says nothing new."""
    accepted, tokens = torch.empty(2, starts.shape[0], dtype=torch.int64, device=starts.device).unbind(0)
    if starts.shape[0]:
        _verify[(starts.shape[0],)](drafts, targets, status, starts, counts, accepted, tokens, CHUNK=CHUNK, num_warps=1)
    return accepted, tokens


def kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Operations of this family."""
    return {"verify_coupled": Kernel(verify_coupled, Determinism.EXACT)}

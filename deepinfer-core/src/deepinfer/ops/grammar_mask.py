"""What grammars allow, applied to logits (design 6, first filter after the bans)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, Tolerance, op

__all__ = ["apply_token_mask"]

WORD_BITS = 32


def _mask_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    vocab = {"tiny": 16, "odd": 509, "real": 129_280}[size]
    words = -(-vocab // WORD_BITS)
    rows = 6 if size == "real" else 11
    random = torch.randint(-(2**31), 2**31, (rows, words), generator=generator).to(torch.int32)
    none = torch.full((rows,), -1)
    for label, count, mask, mask_rows in (
        ("empty", 0, random[:0], none[:0]),
        ("one row", 1, random[:1], torch.zeros(1).long()),
        ("padding rows", rows, random, none),
        ("some rows", rows, random, torch.where(torch.arange(rows) % 3 == 1, -1, torch.arange(rows).flip(0))),
        ("shared mask row", rows, random, torch.zeros(rows).long()),
        ("no mask at all", rows, random[:0], none),
        (
            "one token",
            rows,
            torch.zeros(1, words, dtype=torch.int32).fill_(0).index_fill_(1, torch.tensor([0]), 1 << 7),
            torch.zeros(rows).long(),
        ),
        ("sign bits", rows, torch.full((1, words), -(2**31)).to(torch.int32), torch.zeros(rows).long()),
    ):
        logits = 4 * torch.randn(count, vocab, generator=generator)
        yield Sample(label, {"logits": logits, "mask": mask, "mask_rows": mask_rows}, ("logits", "mask_rows"))


@op(samples=_mask_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0))
def apply_token_mask(logits: Tensor, mask: Tensor, mask_rows: Tensor) -> Tensor:
    """Keep the logits that a mask allows and replace the others by -inf.

    Token v is allowed iff bit v % 32 of word v // 32 is set; bits past the vocabulary are ignored. A row without a
    mask keeps its logits. Kept logits keep their bits, NaN included.

    Args:
        logits: float32 [S, V].
        mask: int32 [M, ceil(V / 32)].
        mask_rows: int64 [S], row of `mask` that each row of logits obeys, -1 for none.

    Returns:
        float32 [S, V].
    """
    vocab = logits.shape[-1]
    everything = mask.new_full((1, mask.shape[-1]), -1)
    words = torch.cat([everything, mask])[mask_rows + 1]
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=mask.device)
    allowed = ((words[..., None] >> shifts) & 1).flatten(1)[:, :vocab].bool()
    return torch.where(allowed, logits, -torch.inf)

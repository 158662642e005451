"""Coupled verification: a draft is accepted iff it is what the target itself draws there (design 6)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, op

__all__ = ["verify_coupled"]


def _verify_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    sequences, longest = {"tiny": (3, 3), "odd": (9, 6), "real": (256, 6)}[size]

    def ids(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    def sample(label: str, counts: Tensor, agreement: float, padding: int = 0, missing: int = 0) -> Sample:
        """`missing` rows of each sequence were planned but hold no draft: they are padding between sequences."""
        planned = torch.where(counts > 0, counts + missing, 0)
        starts = planned.cumsum(0) - planned
        rows = int(planned.sum()) + padding
        sequence_of = torch.full((rows,), -1)
        for number, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            sequence_of[start : start + count] = number
        targets = ids(50, rows)
        agreed = torch.rand(rows, generator=generator) < agreement
        drafts = torch.where(agreed, targets.roll(1), ids(50, rows))
        status = (torch.rand(rows, generator=generator) < 0.05).to(torch.int32)
        return Sample(
            label,
            {
                "drafts": torch.where(sequence_of >= 0, drafts, -1),
                "targets": torch.where(status == 0, targets, -1),
                "status": status,
                "sequences": sequence_of,
                "starts": starts,
                "counts": counts,
            },
        )

    counts = 1 + ids(longest, sequences)
    yield sample("empty", counts[:0], 1.0)
    yield sample("only padding", counts[:0], 1.0, padding=3)
    yield sample("no row is sampled", torch.zeros_like(counts), 1.0)
    yield sample("one row each", torch.ones_like(counts), 0.5)
    yield sample("all agree", counts, 1.0, padding=1)
    yield sample("none agrees", counts, 0.0)
    yield sample("some agree", counts, 0.7, padding=2)
    yield sample("missing drafts", counts, 0.8, missing=2)
    yield sample("some sequences sample nothing", torch.where(ids(2, sequences) == 0, 0, counts), 0.7)


@op(samples=_verify_samples, determinism=Determinism.EXACT)
def verify_coupled(
    drafts: Tensor, targets: Tensor, status: Tensor, sequences: Tensor, starts: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """How many sampled tokens of each sequence stand, and the last of them.

    Row 0 of a sequence is known to be right; row j is accepted if rows before it are, its draft is the token that the
    target drew after row j - 1, and that draw was sound. So the accepted tokens are those of decoding one at a time,
    and acceptance can never change a token.

    Args:
        drafts: int64 [R], token that each sampled row was fed; ignored for a sequence's first row.
        targets: int64 [R], token that the target draws after each row; -1 where the row's status is not 0.
        status: int32 [R], status words of `sample_step`.
        sequences: int64 [R], index of the row's sequence; -1 is padding.
        starts, counts: int64 [S], first row and number of rows of each sequence, as in `StepInputs`.

    Returns:
        accepted: int64 [S], rows whose token stands: 1 .. counts, 0 where counts is 0. The last of them may be unsound.
        tokens: int64 [S], token of the last accepted row; -1 where there is none or it is unsound.
    """
    rows, device = drafts.shape[0], drafts.device
    if rows == 0 or starts.shape[0] == 0:
        return torch.zeros_like(starts), torch.full_like(starts, -1)
    sequence = sequences.clamp(min=0)
    valid = sequences >= 0
    start = starts.clamp(max=rows - 1)
    first = torch.arange(rows, device=device) == start[sequence]
    agrees = (drafts >= 0) & (drafts == targets.roll(1)) & (status.roll(1) == 0)
    misses = torch.cumsum((valid & ~first & ~agrees).to(torch.int64), 0)
    stands = valid & (misses == misses[start[sequence]])
    accepted = torch.zeros_like(starts).index_add_(0, sequence, stands.to(torch.int64))
    last = (starts + accepted - 1).clamp(0, rows - 1)
    return accepted, torch.where(accepted > 0, targets[last], -1)

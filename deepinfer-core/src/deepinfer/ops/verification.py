"""Verification of drafted tokens (design 6)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, Tolerance, op
from deepinfer.ops.sample_inputs import row_counts, uniform_ids

__all__ = ["verify_coupled"]


def _verify_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    vocab, drafted = {"tiny": (4, 2), "odd": (97, 5), "real": (129_280, 5)}[size]
    for label, rows in row_counts(size):
        tokens = uniform_ids(generator, vocab, rows, drafted + 1)
        agree = torch.rand(rows, drafted, generator=generator) < 0.75
        drafts = torch.where(agree, tokens[:, :drafted], uniform_ids(generator, vocab, rows, drafted))
        count = torch.randint(0, drafted + 1, (rows, 1), generator=generator)
        drafts = drafts.masked_fill(torch.arange(drafted) >= count, -1)
        lengths = torch.randint(0, 1000, (rows,), generator=generator)
        lengths = lengths.masked_fill(torch.rand(rows, generator=generator) < 0.1, -1)
        idle = lengths < 0
        yield _sample(label, tokens, drafts, lengths, {"tokens": idle, "drafts": idle})
    tokens = torch.tensor([[1, 2, 3], [1, -1, 3], [-1, 2, 3], [1, 2, 3]])
    drafts = torch.tensor([[1, 2], [1, -1], [-1, 2], [2, 2]])
    yield _sample("all, bad rows, first wrong", tokens, drafts, torch.tensor([0, 7, 8, 9]), {})


def _sample(label: str, tokens: Tensor, drafts: Tensor, lengths: Tensor, unread: dict[str, Tensor]) -> Sample:
    arguments = {"tokens": tokens, "drafts": drafts, "lengths": lengths}
    return Sample(label, arguments, tuple(arguments), unread)


@op(samples=_verify_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0))
def verify_coupled(tokens: Tensor, drafts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accept a draft iff it is what the target itself draws there, and every draft before it was accepted.

    So speculation never changes a token: the tokens of a step are those that the target draws one by one.

    Args:
        tokens: int64 [S, N + 1], what the target draws after row j of each sequence; -1 where the row has none.
        drafts: int64 [S, N], input of row j + 1; -1 from the first missing one on.
        lengths: int64 [S], tokens before the step; -1 for padding.

    Returns:
        accepted: int64 [S], leading drafts that stand; next_tokens: int64 [S], the target's token behind them;
        committed: int64 [S], tokens whose rows stand after the step. Padding gives 0, -1, -1.
    """
    live = lengths >= 0
    stands = (drafts >= 0) & (drafts == tokens[:, :-1]) & live[:, None]
    accepted = torch.cumprod(stands.to(torch.int64), dim=1).sum(1)
    next_tokens = tokens.gather(1, accepted[:, None])[:, 0]
    committed = lengths + 1 + accepted
    return accepted, torch.where(live, next_tokens, -1), torch.where(live, committed, -1)

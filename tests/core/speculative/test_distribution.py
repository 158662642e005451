"""What acceptance does to the distribution: noise in a large vocabulary, coupled agreement, scheduled rejection."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.ops.rejection import draw_drafts, judge_drafts
from deepinfer.ops.sampling import sample_rows
from deepinfer.ops.verification import verify_coupled
from deepinfer.sampling.rng import exponential, log, random_words
from deepinfer.speculative.cost_model import CostCurve, StepCosts
from deepinfer.speculative.planner import VerificationPlanner


def chi_square(found: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Pearson's statistic of counts, as standard deviations above its mean (Wilson-Hilferty)."""
    freedom = found.size - 1
    statistic = float(((found - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


VOCAB = 129_280
TAIL = 1e-7


def long_tail() -> Tensor:
    """Eight ids share most of the mass; every other id of the vocabulary has a probability of 1e-7."""
    head = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.025, 0.02, 0.005], dtype=torch.float64)
    probabilities = torch.full((VOCAB,), TAIL, dtype=torch.float64)
    places = torch.tensor([3, 1000, 30_001, 64_000, 64_001, 90_000, 129_000, VOCAB - 1])
    probabilities[places] = head * (1 - TAIL * (VOCAB - 8))
    return probabilities


def tail_counts(tokens: Tensor, probabilities: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Draws and their expectation: each head id on its own, the tail in two halves."""
    head = (probabilities > 2 * TAIL).nonzero()[:, 0]
    is_tail = probabilities[tokens] < 2 * TAIL
    parts = [int((tokens == index).sum()) for index in head.tolist()]
    parts += [int((is_tail & (tokens < VOCAB // 2)).sum()), int((is_tail & (tokens >= VOCAB // 2)).sum())]
    low = float(probabilities[: VOCAB // 2][probabilities[: VOCAB // 2] < 2 * TAIL].sum())
    high = float(probabilities[VOCAB // 2 :][probabilities[VOCAB // 2 :] < 2 * TAIL].sum())
    mass = np.array([*probabilities[head].tolist(), low, high])
    return np.array(parts), mass * tokens.numel()


@pytest.mark.parametrize(
    "draws", [pytest.param(400, id="short"), pytest.param(20_000, id="long", marks=pytest.mark.slow)]
)
def test_draws_from_a_large_vocabulary_follow_its_tail(draws: int) -> None:
    probabilities = long_tail()
    scaled = probabilities.log().to(torch.float32)[None]
    found: list[int] = []
    for first in range(0, draws, 8):
        seeds = torch.arange(first, first + 8)
        zero = torch.zeros_like(seeds)
        noise = log(exponential(random_words(seeds, zero + 17, zero, VOCAB)))
        assert not torch.isnan(noise).any()
        assert (noise > -23).all()  # log E is at least log 2**-33; infinite noise loses, and is never -inf.
        tokens = (scaled - noise).argmax(-1)
        if first < 64:  # The rest would only draw the same noise twice.
            assert torch.equal(tokens, sample_rows(scaled.expand(8, -1), torch.ones(8), seeds, zero + 17, zero))
        assert torch.isfinite(noise.gather(1, tokens[:, None])).all()
        found += tokens.tolist()
    counts, expected = tail_counts(torch.tensor(found), probabilities)
    assert counts.sum() == draws
    assert chi_square(counts, expected) < 4


def distributions(seed: int, vocab: int, distance: float) -> tuple[Tensor, Tensor]:
    """Target and draft distribution over a small vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(vocab, generator=generator)
    draft = target + distance * torch.randn(vocab, generator=generator)
    return torch.softmax(target.double(), 0), torch.softmax(draft.double(), 0)


def agreement(p: Tensor, q: Tensor) -> float:
    """Probability that two draws with the same exponential noise agree: sum_x 1 / sum_y max(p_y / p_x, q_y / q_x)."""
    ratios = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])
    return float((1 / ratios.sum(1)).sum())


@pytest.mark.parametrize(
    ("seed", "vocab", "distance"), [(0, 2, 1.0), (1, 5, 0.3), (2, 9, 1.0), (3, 40, 0.7), (4, 7, 3.0)]
)
def test_coupled_acceptance_is_what_the_formula_says(seed: int, vocab: int, distance: float) -> None:
    target, draft = distributions(seed, vocab, distance)
    draws = 40_000
    seeds = torch.arange(draws) * 7919 + seed
    where = (torch.ones(draws), seeds, torch.full((draws,), 5), torch.zeros(draws, dtype=torch.int64))
    drawn = [sample_rows(p.log().float().expand(draws, -1), *where) for p in (target, draft)]
    # Two rows a sequence: the first is known to stand and draws the target; the second was fed the draft.
    tokens = torch.stack([drawn[0], torch.zeros_like(drawn[0])], 1).flatten()
    fed = torch.stack([torch.full_like(drawn[1], -1), drawn[1]], 1).flatten()
    sequences = torch.arange(draws).repeat_interleave(2)
    starts, counts = 2 * torch.arange(draws), torch.full((draws,), 2)
    accepted, _ = verify_coupled(fed, tokens, torch.zeros_like(tokens, dtype=torch.int32), sequences, starts, counts)
    expected = agreement(target, draft)
    assert abs(float((accepted == 2).double().mean()) - expected) < 5 * math.sqrt(expected * (1 - expected) / draws)
    # It lies between that of independent draws and that of rejection sampling, which is the best there is.
    assert float((target * draft).sum()) < expected <= float(torch.minimum(target, draft).sum()) + 1e-12


def rejection_draws(target: Tensor, draft: Tensor, draws: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts, the tokens after judging them, and the tokens where none is judged: int64 [draws] each."""
    seeds = torch.arange(draws) * 7919 + seed
    positions, completions = torch.full((draws,), 12), torch.zeros(draws, dtype=torch.int64)
    scaled, proposed = (p.log().float().expand(draws, -1).contiguous() for p in (target, draft))
    drafts = draw_drafts(proposed, seeds, positions, completions, positions - 2)
    judged = judge_drafts(scaled, proposed, drafts, seeds, positions, completions)
    return drafts, judged, sample_rows(scaled, torch.ones(draws), seeds, positions, completions)


@pytest.mark.parametrize(
    ("seed", "vocab", "distance"), [(0, 2, 1.0), (1, 5, 0.0), (2, 9, 1.0), (3, 40, 0.7), (4, 7, 3.0)]
)
def test_rejection_keeps_the_distribution_and_accepts_most(seed: int, vocab: int, distance: float) -> None:
    target, draft = distributions(seed, vocab, distance)
    draws = 40_000
    drafts, judged, fresh = rejection_draws(target, draft, draws, seed)
    for tokens, mass in ((drafts, draft), (judged, target), (fresh, target)):
        counts = torch.bincount(tokens, minlength=vocab).numpy()
        assert chi_square(counts, mass.numpy() * draws) < 4
    expected = float(torch.minimum(target, draft).sum())
    deviation = 5 * math.sqrt(expected * (1 - min(expected, 1)) / draws)
    assert abs(float((judged == drafts).double().mean()) - expected) <= deviation
    # A refused draft says nothing about what is drawn without one.
    pairs = torch.bincount(judged * vocab + fresh, minlength=vocab * vocab).numpy()
    if vocab < 10:
        assert chi_square(pairs, np.outer(target, target).ravel() * draws) < 4


TARGET = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
DRAFT = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
SURE = np.array([0.95, 0.95, 0.02, 0.02], np.float32)
"""Confidence of a second draft by the first one: it says which token the first one was."""


def first_tokens(rounds: int, *, unbiased: bool) -> NDArray[np.int64]:
    """First token of every round of a sequence whose two drafts are verified as far as the planner says.

    Every round starts from the same context, with target and draft distributions above; the first draft is judged by
    rejection sampling if it is verified, and a sequence without drafts draws from the target.
    """
    rng = np.random.default_rng(11)
    slot, limit = np.ones(1, np.int32), np.full(1, 2, np.int32)
    # One draft is never worth its row; two are where the second is all but sure.
    curve = CostCurve((1, 2, 3), (1.0, 1.65, 1.7), 0.0, padded=True)
    planner = VerificationPlanner(2, 2, StepCosts(curve), lookahead=0, unbiased=unbiased)
    counts = np.zeros(TARGET.shape[0], np.int64)
    verified, accepted = np.zeros((2, 1), np.int32)
    draws = (tokens.tolist() for tokens in rejection_draws(TARGET, DRAFT, rounds, 5))
    for draft, judged, fresh in zip(*draws, strict=True):
        planner.read(slot, verified, accepted, np.array([[0.6, SURE[draft]]], np.float32))
        verified = planner.lengths(slot, limit, other_rows=0, max_rows=3)
        counts[judged if verified[0] else fresh] += 1
        stands = [draft == judged, rng.random() < SURE[draft]]
        accepted = np.minimum(np.cumprod(stands).sum(), verified).astype(np.int32)
    return counts


def test_scheduled_rejection_keeps_the_distribution() -> None:
    counts = first_tokens(8000, unbiased=True)
    assert chi_square(counts, TARGET.numpy() * counts.sum()) < 4


def test_the_statistic_sees_a_schedule_that_looks_ahead() -> None:
    counts = first_tokens(8000, unbiased=False)
    assert chi_square(counts, TARGET.numpy() * counts.sum()) > 8

"""The schedule against brute force, against the rule of the release, and against fixed lengths."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepinfer.speculative.calibration import Calibration
from deepinfer.speculative.cost_model import CostCurve, StepCosts
from deepinfer.speculative.schedule import assign_drafts, best_total

PROBABILITY = st.floats(0.0, 1.0, width=32)


@st.composite
def small_cases(draw: Any) -> tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.float64]]:
    """Survival [S, N], limits [S] and step times for a few drafts, some times equal, some rising steeply."""
    sequences, drafts = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    cells = st.lists(PROBABILITY, min_size=sequences * drafts, max_size=sequences * drafts)
    survival = np.cumprod(np.array(draw(cells), np.float64).reshape(sequences, drafts), axis=1)
    limits = draw(st.lists(st.integers(0, drafts), min_size=sequences, max_size=sequences))
    growth = draw(st.lists(st.sampled_from([0.0, 0.0, 0.05, 0.3]), min_size=1, max_size=sequences * drafts + 1))
    return survival, np.array(limits, np.int32), 1.0 + np.cumsum(growth)


def rate(survival: NDArray[np.float64], lengths: NDArray[np.int32], seconds: NDArray[np.float64]) -> float:
    """Expected tokens a second of a choice of lengths."""
    kept = np.arange(survival.shape[1]) < lengths[:, None]
    return float((survival.shape[0] + survival[kept].sum()) / seconds[int(lengths.sum())])


def choose(survival: NDArray[np.float64], limits: NDArray[np.int32], seconds: NDArray[np.float64]) -> NDArray[np.int32]:
    return assign_drafts(survival, limits, best_total(survival, limits, seconds))


@settings(max_examples=300, deadline=None)
@given(small_cases())
def test_no_choice_of_lengths_is_better(case: Any) -> None:
    survival, limits, seconds = case
    lengths = choose(survival, limits, seconds)
    assert ((lengths >= 0) & (lengths <= limits)).all()
    every = [
        np.array(choice, np.int32)
        for choice in product(*(range(limit + 1) for limit in limits.tolist()))
        if sum(choice) < seconds.size
    ]
    assert rate(survival, lengths, seconds) >= max(rate(survival, other, seconds) for other in every) * (1 - 1e-12)


@settings(max_examples=200, deadline=None)
@given(small_cases(), st.data())
def test_assignment_is_the_best_for_every_total(case: Any, data: Any) -> None:
    survival, limits, _ = case
    total = data.draw(st.integers(0, int(limits.sum())))
    lengths = assign_drafts(survival, limits, total)
    assert lengths.sum() == total
    flat = np.ones(total + 1)
    choices = product(*(range(limit + 1) for limit in limits.tolist()))
    best = max(rate(survival, np.array(other), flat) for other in choices if sum(other) == total)
    assert rate(survival, lengths, flat) >= best * (1 - 1e-12)


@settings(max_examples=300, deadline=None)
@given(small_cases(), st.data())
def test_later_confidences_decide_nothing_about_earlier_drafts(case: Any, data: Any) -> None:
    survival, limits, _ = case
    total = data.draw(st.integers(0, int(limits.sum())))
    sequence = data.draw(st.integers(0, survival.shape[0] - 1))
    first = data.draw(st.integers(0, survival.shape[1] - 1))
    other = survival.copy()
    factors = data.draw(st.lists(PROBABILITY, min_size=survival.shape[1], max_size=survival.shape[1]))
    for draft in range(first, survival.shape[1]):
        other[sequence, draft] = factors[draft] * (other[sequence, draft - 1] if draft else 1.0)
    lengths, changed = assign_drafts(survival, limits, total), assign_drafts(other, limits, total)
    assert min(lengths[sequence], first) == min(changed[sequence], first)


def test_rows_up_to_the_edge_of_a_bucket_are_taken() -> None:
    survival = np.full((4, 5), 1e-6)
    limits = np.full(4, 5, np.int32)
    seconds = 1.0 + (np.arange(21) > 12)  # A bucket of 16 rows: 4 sequences and 12 drafts.
    assert best_total(survival, limits, seconds) == 12
    # Ties go to the first draft of every sequence before any second one.
    assert choose(survival, limits, seconds).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("drafts", [1, 5])
def test_nothing_to_choose(drafts: int) -> None:
    none = np.zeros(2, np.int32)
    assert choose(np.ones((2, drafts)), none, np.ones(1 + 2 * drafts)).tolist() == [0, 0]
    assert choose(np.zeros((0, drafts)), np.zeros(0, np.int32), np.ones(1)).tolist() == []
    assert best_total(np.ones((2, drafts)), np.full(2, drafts, np.int32), np.ones(1)) == 0


def release_rule(survival: NDArray[np.float64], graphs: list[tuple[int, float]]) -> NDArray[np.int32]:
    """Verify lengths as the release chooses them: all (rate, sequence) pairs by rate; rows until E / t stops improving.

    Written from its description with plain loops: sort by rate descending, then sequence; after each pair the smallest
    graph that holds the rows gives the time.
    """
    sequences = survival.shape[0]
    pairs = sorted((-float(value), index) for index in range(sequences) for value in survival[index])
    best_rows, best_rate, expected = sequences, 0.0, float(sequences)
    for rows in range(sequences, sequences + len(pairs) + 1):
        if rows > sequences:
            expected += -pairs[rows - sequences - 1][0]
        fitting = [seconds for size, seconds in graphs if size >= rows]
        if fitting and expected / fitting[0] > best_rate:
            best_rows, best_rate = rows, expected / fitting[0]
    lengths = np.zeros(sequences, np.int32)
    for _, index in pairs[: best_rows - sequences]:
        lengths[index] += 1
    return lengths


GRAPHS = (64, 80, 96, 128, 160, 192, 256, 320, 384)
"""Row buckets of 64 sequences with up to five drafts; a step reads weights (20 ms) and computes rows (50 us each)."""


def mixed_acceptance(seed: int) -> NDArray[np.float64]:
    """True acceptance [64, 5] of easy and hard requests; later drafts are harder."""
    rng = np.random.default_rng(seed)
    easy = np.where(rng.random(64) < 0.5, rng.uniform(0.75, 0.98, 64), rng.uniform(0.1, 0.6, 64))
    return np.clip(easy[:, None] * np.array([1.0, 0.98, 0.96, 0.94, 0.92]), 0, 1)


def many_costs() -> StepCosts:
    return StepCosts(CostCurve(GRAPHS, tuple(0.02 + 5e-5 * rows for rows in GRAPHS), 0.0, padded=True))


@pytest.mark.parametrize("seed", range(5))
def test_64_mixed_sequences_beat_fixed_lengths_and_equal_the_release_with_exact_confidences(seed: int) -> None:
    survival = np.cumprod(mixed_acceptance(seed), axis=1)
    limits = np.full(64, 5, np.int32)
    costs = many_costs()
    seconds = costs.seconds(64 + np.arange(64 * 5 + 1), 64)
    scheduled = rate(survival, choose(survival, limits, seconds), seconds)
    graphs = list(zip(GRAPHS, costs.row_seconds.tolist(), strict=True))
    assert scheduled >= rate(survival, release_rule(survival, graphs), seconds)
    for length in range(6):
        assert scheduled > rate(survival, np.full(64, length, np.int32), seconds)


@pytest.mark.parametrize("seed", range(5))
def test_calibration_beats_the_release_where_confidences_are_not_exact(seed: int) -> None:
    """A drafter that is too sure of itself; the calibration has seen 200 steps of full blocks."""
    rng = np.random.default_rng(100 + seed)
    acceptance = mixed_acceptance(seed)
    confidences = (1 - (1 - acceptance) ** 3).astype(np.float32)
    calibration = Calibration(5)
    for _ in range(200):
        stands = np.cumprod(rng.random((64, 5)) < acceptance, axis=1).sum(1)
        calibration.observe(confidences, np.full(64, 5, np.int32), stands.astype(np.int32))
    truth, limits, costs = np.cumprod(acceptance, axis=1), np.full(64, 5, np.int32), many_costs()
    seconds = costs.seconds(64 + np.arange(64 * 5 + 1), 64)
    ours = choose(calibration.survival(confidences), limits, seconds)
    graphs = list(zip(GRAPHS, costs.row_seconds.tolist(), strict=True))
    theirs = release_rule(np.cumprod(confidences.astype(np.float64), axis=1), graphs)
    best = rate(truth, choose(truth, limits, seconds), seconds)
    assert rate(truth, ours, seconds) > rate(truth, theirs, seconds)
    assert rate(truth, ours, seconds) > 0.99 * best
    for length in range(6):
        assert rate(truth, ours, seconds) > rate(truth, np.full(64, length, np.int32), seconds)


def test_the_room_needs_no_torch() -> None:
    code = (
        "import sys, deepinfer.speculative.planner, deepinfer.speculative.cost_file; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Reliability tables, calibrated survival and what the statistics say."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepinfer.speculative.calibration import BINS, Calibration, Reliability
from deepinfer.speculative.monotone import isotonic
from deepinfer.speculative.statistics import SpeculationStatistics


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def pool_adjacent(values: list[float], weights: list[float]) -> list[float]:
    """Isotonic regression by merging neighbours that are out of order."""
    blocks: list[list[float]] = []
    for value, weight in zip(values, weights, strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (low, first, count), (high, second, more) = blocks.pop(-2), blocks.pop()
            blocks.append([(low * first + high * second) / (first + second), first + second, count + more])
    return [value for value, _, count in blocks for _ in range(int(count))]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 10)), min_size=1, max_size=12))
def test_isotonic_equals_merging_of_neighbours(entries: list[tuple[float, float]]) -> None:
    values, weights = (list(part) for part in zip(*entries, strict=True))
    fitted = isotonic(np.array([values, values[::-1]]), np.array([weights, weights[::-1]]))
    np.testing.assert_allclose(fitted[0], pool_adjacent(values, weights), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(fitted[1], pool_adjacent(values[::-1], weights[::-1]), rtol=1e-9, atol=1e-12)


def test_only_drafts_that_were_judged_after_accepted_ones_count() -> None:
    table = Reliability(3)
    confidences = np.array([[0.9, 0.5, 0.1], [0.9, 0.5, 0.1], [np.nan, 0.5, 0.1]], np.float32)
    # Three accepted; the second of two refused; the first of three refused, so that the others were never judged.
    table.observe(confidences, ints(3, 2, 3), ints(3, 1, 0))
    assert table.tries.sum(1).tolist() == [2, 2, 1]
    assert table.hits.sum(1).tolist() == [2, 1, 1]
    rows = table.rows()
    assert [(row["position"], row["drafts"], row["accepted"]) for row in rows] == [
        (0, 2, 1.0),
        (1, 2, 0.5),
        (2, 1, 1.0),
    ]
    assert rows[0]["confidence"] == pytest.approx(0.9)
    assert table.error() == pytest.approx((2 * 0.1 + 0.0 + 0.9) / 5)


def test_without_evidence_the_confidence_is_believed() -> None:
    confidences = np.array([[0.25, 0.5], [0.75, 0.125]], np.float32)
    survival = Calibration(2).survival(confidences)
    np.testing.assert_allclose(survival, np.cumprod(confidences, axis=1))


def test_unknown_confidences_start_hopeful_and_learn_the_mean() -> None:
    calibration = Calibration(2)
    unknown = np.full((1, 2), np.nan, np.float32)
    assert calibration.survival(unknown).tolist() == [[1.0, 1.0]]
    for _ in range(300):
        calibration.observe(np.full((4, 2), 0.9, np.float32), ints(2, 2, 2, 2), ints(0, 1, 2, 0))
    np.testing.assert_allclose(calibration.survival(unknown), [[0.5, 0.25]], atol=0.02)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_survival_is_a_probability_that_falls_along_the_block_and_rises_with_confidence(seed: int) -> None:
    rng = np.random.default_rng(seed)
    calibration = Calibration(4)
    for _ in range(20):
        verified = rng.integers(0, 5, 8).astype(np.int32)
        accepted = rng.integers(0, verified + 1).astype(np.int32)
        confidences = rng.random((8, 4)).astype(np.float32)
        confidences[rng.random((8, 4)) < 0.2] = np.nan
        calibration.observe(confidences, verified, accepted)
    confidences = np.sort(rng.random((16, 4)).astype(np.float32), axis=0)
    survival = calibration.survival(confidences)
    assert ((survival >= 0) & (survival <= 1)).all()
    assert (np.diff(survival, axis=1) <= 0).all()
    assert (np.diff(survival, axis=0) >= -1e-12).all()


def test_calibration_finds_the_true_acceptance() -> None:
    rng = np.random.default_rng(3)
    calibration = Calibration(3)
    for _ in range(1000):
        confidences = rng.random((32, 3)).astype(np.float32)
        stands = np.cumprod(rng.random((32, 3)) < confidences**2, axis=1).sum(1).astype(np.int32)
        calibration.observe(confidences, np.full(32, 3, np.int32), stands)
    grid = np.linspace(0.1, 0.9, 9, dtype=np.float32)[:, None].repeat(3, 1)
    # Bins are 1/16 wide and hold some 250 drafts at the third position, whose predecessors were accepted in 1 of 9.
    np.testing.assert_allclose(calibration.survival(grid), np.cumprod(grid**2, axis=1), atol=0.08)


def test_evidence_fades_where_nothing_is_verified_any_more() -> None:
    calibration = Calibration(1)
    confidence = np.full((8, 1), 0.5, np.float32)
    for _ in range(50):
        calibration.observe(confidence, np.full(8, 1, np.int32), np.zeros(8, np.int32))
    low = calibration.survival(confidence[:1]).item()
    for _ in range(40_000):
        calibration.table.tries *= calibration.table.fade
        calibration.table.hits *= calibration.table.fade
    calibration.observe(confidence, np.zeros(8, np.int32), np.zeros(8, np.int32))
    assert low < 0.1
    assert calibration.survival(confidence[:1]).item() == pytest.approx(0.5, abs=0.01)


def test_statistics_by_position() -> None:
    statistics = SpeculationStatistics(3)
    confidences = np.array([[0.9, 0.8, 0.7], [0.6, np.nan, np.nan]], np.float32)
    statistics.observe(ints(3, 1), ints(2, 1), ints(2, 0), confidences)
    statistics.observe(ints(), ints(), ints(), np.zeros((0, 3), np.float32))
    found = statistics.to_dict()
    assert found["drafted"] == [2, 1, 1]
    assert found["verified"] == [2, 1, 0]
    assert found["accepted"] == [1, 1, 0]
    assert (found["steps"], found["sequence_steps"], found["committed_tokens"]) == (1, 2, 4)
    assert found["tokens_per_sequence_step"] == 2.0
    assert sum(row["drafts"] for row in found["reliability"]) == 3
    assert len(found["reliability"]) <= 3 * BINS
    json.dumps(found)

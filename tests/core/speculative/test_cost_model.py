"""Curves, what steps teach them, and the files that keep them."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import ConfigError
from deepinfer.speculative import cost_file
from deepinfer.speculative.cost_file import curve_path, save_curve
from deepinfer.speculative.cost_model import CostCurve, StepCosts, fit_curve, row_edges

CURVE = CostCurve((1, 8, 16, 32), (0.010, 0.011, 0.014, 0.020), 1e-4, padded=True)
KEY = {"numerics_id": "n1-0", "rows": [1, 8, 16, 32], "device": "cpu"}


def load_curve(directory: Path, key: Any) -> CostCurve | None:
    return cost_file.load_curve(directory, key, max_age=3600)


@pytest.mark.parametrize(
    ("rows", "seconds", "each", "message"),
    [
        ((), (), 0.0, "must ascend from 1 or more"),
        ((0, 1), (1.0, 1.0), 0.0, "must ascend"),
        ((2, 2), (1.0, 1.0), 0.0, "must ascend"),
        ((1, 2), (1.0,), 0.0, "with one time each"),
        ((1, 2), (1.0, 0.0), 0.0, "positive numbers of seconds"),
        ((1, 2), (1.0, float("nan")), 0.0, "positive numbers"),
        ((1, 2), (1.0, 2.0), -1.0, "positive numbers"),
    ],
)
def test_no_curve(rows: Any, seconds: Any, each: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CostCurve(rows, seconds, each, padded=True)


def test_padded_steps_cost_their_bucket_and_others_lie_between() -> None:
    padded = StepCosts(CURVE)
    np.testing.assert_allclose(
        padded.seconds(np.array([1, 2, 8, 9, 32, 64]), 10), 1e-3 + np.array([0.010, 0.011, 0.011, 0.014, 0.020, 0.040])
    )
    between = StepCosts(CostCurve(CURVE.rows, CURVE.row_seconds, 0.0, padded=False))
    np.testing.assert_allclose(between.seconds(np.array([12, 24, 48]), 1), [0.0125, 0.017, 0.030])


def test_edges_are_buckets_or_a_grid() -> None:
    buckets = np.array([8 * -(-rows // 8) for rows in range(1, 101)])
    edges, padded = row_edges(buckets)
    assert padded
    assert edges == tuple(range(8, 105, 8))
    edges, padded = row_edges(np.arange(1, 1001))
    assert not padded
    assert (edges[0], edges[-1]) == (1, 1000)
    assert len(edges) <= 21
    assert row_edges(np.array([1])) == ((1,), False)


def test_a_fit_tells_rows_from_sequences() -> None:
    rows, sequences = np.array([1, 4, 4, 8, 8, 16, 16]), np.array([1, 1, 4, 2, 8, 3, 8])
    curve = fit_curve(rows, sequences, 0.01 + 0.001 * rows + 0.002 * sequences, padded=False)
    assert curve.rows == (1, 4, 8, 16)
    np.testing.assert_allclose(curve.row_seconds, [0.011, 0.014, 0.018, 0.026])
    assert curve.sequence_seconds == pytest.approx(0.002)
    # Sequences that seem to save time save none, and rows always cost something.
    assert fit_curve(rows, sequences, 1.0 - 0.01 * sequences, padded=False).sequence_seconds == 0
    steep = fit_curve(np.array([8, 8]), np.array([1, 8]), np.array([1.0, 8.0]), padded=True)
    assert steep.row_seconds == (pytest.approx(0.45),)
    with pytest.raises(ConfigError, match="must ascend"):
        fit_curve(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), padded=True)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.floats(1e-4, 1.0)), max_size=60), st.booleans())
def test_times_never_fall_with_the_rows(steps: list[tuple[int, float]], padded: bool) -> None:
    costs = StepCosts(CostCurve(CURVE.rows, (0.02, 0.01, 0.03, 0.02), 0.0, padded=padded))
    for rows, seconds in steps:
        costs.observe(rows, 1, seconds)
    found = costs.seconds(np.arange(1, 80), 1)
    assert (np.diff(found) >= -1e-12).all()
    assert (found > 0).all()


def test_a_slower_machine_is_learned_everywhere_and_a_slower_bucket_where_it_is() -> None:
    costs = StepCosts(CURVE)
    for _ in range(200):
        costs.observe(4, 2, 2 * 0.011 + 2e-4)
    np.testing.assert_allclose(costs.row_seconds, 2 * np.array(CURVE.row_seconds), rtol=0.05)
    for _ in range(200):
        costs.observe(30, 2, 5 * 0.020 + 2e-4)
        costs.observe(4, 2, 2 * 0.011 + 2e-4)
    assert costs.row_seconds[3] == pytest.approx(0.1, rel=0.05)
    assert costs.row_seconds[1] == pytest.approx(0.022, rel=0.05)


def test_a_hiccup_moves_little_and_a_slow_bucket_is_tried_again() -> None:
    costs = StepCosts(CURVE)
    for _ in range(100):
        costs.observe(16, 1, 0.014 + 1e-4)
    before = costs.row_seconds.copy()
    costs.observe(16, 1, 50.0)
    np.testing.assert_allclose(costs.row_seconds, before, rtol=0.02)
    for _ in range(100):
        costs.observe(32, 1, 10 * 0.020 + 1e-4)
    assert costs.row_seconds[3] > 0.15
    for _ in range(8_000):
        costs.observe(16, 1, 0.014 + 1e-4)
    assert costs.row_seconds[3] == pytest.approx(0.020, rel=0.05)
    costs.observe(16, 1000, 0.014)  # Less than what the sequences alone cost.
    assert costs.row_seconds[3] == pytest.approx(0.020, rel=0.05)


def test_a_file_brings_back_its_curve(tmp_path: Path) -> None:
    directory = tmp_path / "costs"
    assert load_curve(directory, KEY) is None
    save_curve(directory, KEY, CURVE)
    assert load_curve(directory, KEY) == CURVE
    assert [path.name for path in directory.iterdir()] == [curve_path(directory, KEY).name]
    for name, value in (("numerics_id", "n1-1"), ("rows", [1, 8]), ("device", "other")):
        assert load_curve(directory, {**KEY, name: value}) is None


@pytest.mark.parametrize(("age", "counts"), [(0, True), (3500, True), (3700, False), (-30, True), (-3600, False)])
def test_old_files_and_files_of_the_future_do_not_count(tmp_path: Path, age: float, counts: bool) -> None:
    save_curve(tmp_path, KEY, CURVE)
    moment = time.time() - age
    os.utime(curve_path(tmp_path, KEY), (moment, moment))
    assert (load_curve(tmp_path, KEY) is not None) == counts


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1]",
        b"{}",
        b"[" * 100_000,
        json.dumps({"key": {**KEY, "device": "other"}, "curve": {}}).encode(),
        json.dumps({"key": KEY, "curve": None}).encode(),
        json.dumps({"key": KEY, "curve": {"rows": ["a"], "row_seconds": [1], "sequence_seconds": 0}}).encode(),
        json.dumps(
            {"key": KEY, "curve": {"rows": [1, 2], "row_seconds": [1, -2], "sequence_seconds": 0, "padded": True}}
        ).encode(),
    ],
)
def test_a_file_that_is_not_ours_is_ignored_and_then_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    path = curve_path(tmp_path, KEY)
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert load_curve(tmp_path, KEY) is None
    assert f"{path} is ignored, step costs are measured anew" in caplog.text
    save_curve(tmp_path, KEY, CURVE)
    assert load_curve(tmp_path, KEY) == CURVE


def test_other_files_of_the_directory_are_left_alone(tmp_path: Path) -> None:
    names = ("notes.txt", "step-costs-old.json", ".step-costs-0.json.tmp", "a" * 64 + ".b.1")
    for name in names:
        (tmp_path / name).write_text(name)
    save_curve(tmp_path, KEY, CURVE)
    load_curve(tmp_path, {**KEY, "device": "other"})
    assert {path.name for path in tmp_path.iterdir()} == {*names, curve_path(tmp_path, KEY).name}
    assert all((tmp_path / name).read_text() == name for name in names)


def test_a_directory_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        save_curve(blocked, KEY, CURVE)
    assert "step costs are not kept" in caplog.text
    assert list(tmp_path.iterdir()) == [blocked]

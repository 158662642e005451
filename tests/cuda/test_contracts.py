"""Every portable kernel against the contract of its operation, in the interpreter."""

from __future__ import annotations

import pytest

from deepinfer.api.backend import Numerics
from deepinfer.conformance import Suite
from tests.cuda.interpreted import InterpretedBackend

NATIVE = sorted(InterpretedBackend().kernels(Numerics()))
SEED = 5
CHECKS = ("values", "side_effects", "poison")
"""The interpreter computes in one order, so it has nothing to say of repetition and of rows."""


@pytest.fixture(scope="module")
def suite() -> Suite:
    return Suite(InterpretedBackend(), seed=SEED)


LONG = {"sample_step"}
"""Whole vocabularies twice; its parts are among the others."""


@pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.slow if op in LONG else ()) for op in NATIVE])
def test_values(suite: Suite, op: str) -> None:
    suite.check(op, "tiny", "values")


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("op", NATIVE)
def test_contract_at_odd_sizes(suite: Suite, op: str, check: str) -> None:
    suite.check(op, "odd", check)

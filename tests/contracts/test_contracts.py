"""Every operation of a backend against its contract."""

from __future__ import annotations

from deepinfer.conformance import Suite


def test_contract(suite: Suite, op: str, size: str, check: str) -> None:
    suite.check(op, size, check)

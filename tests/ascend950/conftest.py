"""Tests for an Ascend 950; `nox -s ascend` runs them on the simulated runtime."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def _reasons() -> tuple[str, ...]:
    """Why no NPU can be used, as the backend's probe says it."""
    if importlib.util.find_spec("deepinfer_ascend") is None:
        return ("deepinfer-backend-ascend is not installed",)
    from deepinfer_ascend import probe

    answer = probe.look()
    return () if answer.status == "match" else answer.reasons


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reasons = _reasons() if here else ()
    for item in here:
        item.add_marker("ascend950")
        if reasons:
            item.add_marker(pytest.mark.skip(reason=f"no NPU: {'; '.join(reasons)}"))

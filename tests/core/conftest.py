from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the independent reference data; required in CI, skipped where it is not at hand."""
    default = Path(__file__).resolve().parents[3] / "shared" / "golden"
    folder = Path(os.environ.get("DEEPINFER_TEST_GOLDEN") or default)
    if not (folder / "ops.npz").is_file():
        message = f"no golden data in {folder}; set DEEPINFER_TEST_GOLDEN"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(message)
        pytest.skip(message)
    return folder

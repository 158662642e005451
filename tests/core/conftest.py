from __future__ import annotations

from pathlib import Path

import pytest
from support.golden import golden_root, missing_golden, ops_file


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the independent reference data; required in CI, skipped where it is not at hand."""
    if not ops_file().is_file():
        missing_golden()
    return golden_root()

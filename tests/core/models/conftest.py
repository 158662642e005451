from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer.checkpoint.presets import preset_config

DATA = Path(__file__).parent / "data"


@pytest.fixture
def raw() -> dict[str, Any]:
    """The tiny config, free to change."""
    return copy.deepcopy(preset_config("tiny"))


@pytest.fixture
def raw_release() -> dict[str, Any]:
    """The released config, free to change."""
    return json.loads((DATA / "v41_flash_config.json").read_text(encoding="utf-8"))

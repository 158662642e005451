"""Configs of the synthetic checkpoints, by name."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from deepinfer.errors import ConfigError

__all__ = ["FORMAT_VERSION", "PRESETS", "preset_config"]

PRESETS = ("tiny", "small", "wide")
FORMAT_VERSION = 2
"""Raised whenever the same preset and seed give other bytes, so that cached checkpoints are made anew."""


def preset_config(preset: str) -> dict[str, Any]:
    """The `config.json` of a preset; ConfigError for an unknown name."""
    if preset not in PRESETS:
        raise ConfigError(f"{preset!r} is not a preset; choose one of {', '.join(PRESETS)}", field="preset")
    return json.loads(resources.files(__name__).joinpath(f"{preset}.json").read_text(encoding="utf-8"))

"""Cost curves on disk: one file for everything that a curve depends on; nothing else in the directory is touched."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepinfer.errors import ConfigError
from deepinfer.speculative.cost_model import CostCurve

__all__ = ["curve_path", "load_curve", "save_curve"]

_logger = logging.getLogger("deepinfer.speculative")

FORMAT = 1
"""Part of every key: files of another format have other names."""
CLOCK_SLACK = 60.0
"""Seconds by which a file may seem to come from the future."""


def curve_path(directory: Path, key: Mapping[str, Any]) -> Path:
    """Where the curve of a key lies.

    Args:
        directory: of curves.
        key: everything that the times depend on, as JSON values.
    """
    return directory / f"step-costs-{hashlib.sha256(_canonical(key).encode()).hexdigest()[:32]}.json"


def load_curve(directory: Path, key: Mapping[str, Any], *, max_age: float) -> CostCurve | None:
    """The curve of a key; None if there is none, or if the file is not what was written, which is logged.

    Args:
        directory, key: as `curve_path`.
        max_age: seconds after which a file no longer counts.
    """
    path = curve_path(directory, key)
    try:
        if not -CLOCK_SLACK <= time.time() - path.stat().st_mtime <= max_age:
            return None
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or _canonical(found["key"]) != _canonical(key):
            raise ValueError("it belongs to something else")
        curve = found["curve"]
        return CostCurve(
            tuple(int(rows) for rows in curve["rows"]),
            tuple(float(seconds) for seconds in curve["row_seconds"]),
            float(curve["sequence_seconds"]),
            bool(curve["padded"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, ConfigError) as error:
        _logger.warning("%s is ignored, step costs are measured anew: %s: %s", path, type(error).__name__, error)
        return None


def save_curve(directory: Path, key: Mapping[str, Any], curve: CostCurve) -> None:
    """Write a curve so that a reader sees all of it or none; a directory that cannot be written is logged."""
    path = curve_path(directory, key)
    content = {
        "key": dict(key),
        "curve": {
            "rows": curve.rows,
            "row_seconds": curve.row_seconds,
            "sequence_seconds": curve.sequence_seconds,
            "padded": curve.padded,
        },
    }
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(temporary, "x", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        _logger.warning("step costs are not kept: %s", error)


def _canonical(key: Mapping[str, Any]) -> str:
    return json.dumps({"format": FORMAT, "key": key}, sort_keys=True)

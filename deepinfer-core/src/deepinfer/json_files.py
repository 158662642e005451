"""Reading JSON files that users hand in: every failure is a typed error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepinfer.errors import CheckpointError

__all__ = ["parse_unique", "read_json_object"]


def read_json_object(file: Path) -> tuple[dict[str, Any], list[str]]:
    """The JSON object in `file`, and the keys that appear twice in one object of it.

    Raises:
        CheckpointError: the file is absent, unreadable, not JSON, or not an object.
    """
    try:
        raw, duplicates = parse_unique(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} holds a {type(raw).__name__}; expected a JSON object")
    return raw, duplicates


def parse_unique(text: bytes) -> tuple[Any, list[str]]:
    """Parse UTF-8 JSON, collecting keys that appear twice in one object (the last value wins).

    Raises:
        ValueError: not UTF-8, not JSON, or nested too deeply.
    """
    duplicates: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                duplicates.append(key)
            result[key] = value
        return result

    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=unique), duplicates
    except RecursionError:
        raise ValueError("nested too deeply") from None

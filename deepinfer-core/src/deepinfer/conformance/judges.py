"""Comparisons of operations whose results are choices or packed bytes, where closeness needs its own rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["JUDGES"]

Judge = Callable[..., "str | None"]

JUDGES: dict[str, Judge] = {}

"""Process-wide torch settings: applied once, listed for reports, refused if two engines disagree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from deepinfer.errors import ConfigError

__all__ = ["PROCESS_SETTINGS", "applied_settings", "apply_process_settings", "current_settings"]

PROCESS_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "num_threads": (torch.get_num_threads, torch.set_num_threads),
    "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic_algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
}
"""Reader and writer per setting."""

_applied: dict[str, tuple[Any, str]] = {}


def apply_process_settings(values: Mapping[str, Any], owner: str) -> None:
    """Apply settings on behalf of an engine; repeating the same values is free.

    Raises:
        ConfigError: unknown setting, or another engine of this process has applied another value.
    """
    for name, value in values.items():
        if name not in PROCESS_SETTINGS:
            raise ConfigError(f"{name!r} is no process-wide setting; known: {', '.join(PROCESS_SETTINGS)}", field=owner)
        if name in _applied and _applied[name][0] != value:
            before, first = _applied[name]
            raise ConfigError(
                f"wants the process-wide setting {name}={value!r}, but {first} has applied {before!r}; "
                f"use the same value or another process",
                field=owner,
            )
    for name, value in values.items():
        if name not in _applied:
            PROCESS_SETTINGS[name][1](value)
            _applied[name] = (value, owner)


def applied_settings() -> dict[str, tuple[Any, str]]:
    """Value and first owner of every setting that was applied in this process."""
    return dict(_applied)


def current_settings() -> dict[str, Any]:
    """What torch says now, whoever set it."""
    return {name: reader() for name, (reader, _) in PROCESS_SETTINGS.items()}

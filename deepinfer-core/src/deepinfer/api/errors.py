"""Errors that a plugin may raise or catch."""

from __future__ import annotations

from deepinfer.errors import (
    AcceleratorUnavailable,
    CapabilityError,
    CapacityError,
    CheckpointError,
    ConfigError,
    DeepInferError,
    InvalidRequest,
    PluginError,
)

__all__ = [
    "AcceleratorUnavailable",
    "CapabilityError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DeepInferError",
    "InvalidRequest",
    "PluginError",
]

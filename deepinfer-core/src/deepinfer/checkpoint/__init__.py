"""Checkpoints: folders of safetensors files in the released format."""

from __future__ import annotations

from deepinfer.checkpoint.checkpoint import Checkpoint
from deepinfer.checkpoint.resolve import DEFAULT_MODEL, resolve_model

__all__ = ["DEFAULT_MODEL", "Checkpoint", "resolve_model"]

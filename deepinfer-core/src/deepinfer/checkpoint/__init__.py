"""Checkpoints: folders of safetensors files in the released format."""

from __future__ import annotations

from deepinfer.checkpoint.checkpoint import Checkpoint

__all__ = ["Checkpoint"]

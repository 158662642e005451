"""What a plugin implements to hear of every step."""

from __future__ import annotations

from deepinfer.observe.recorder import StepObserver, StepRecord

__all__ = ["StepObserver", "StepRecord"]

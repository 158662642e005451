"""Environment variables that torch_npu reads once, set before it is imported (standard library only)."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

__all__ = ["VARIABLES", "prepare"]

VARIABLES: dict[str, tuple[str, str]] = {
    "TASK_QUEUE_ENABLE": (
        "0",
        "0: launch from the calling thread, so that a read of host memory cannot overtake a launch",
    ),
    "PYTORCH_NPU_ALLOC_CONF": (
        "expandable_segments:True",
        "segments that grow: pages, slots and workspaces of one size leave no holes",
    ),
}
"""Value and meaning of each variable that the backend sets where the user has not."""


def prepare(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Set what the user has left open; returns the value of each variable as torch_npu will find it."""
    return {name: environ.setdefault(name, value) for name, (value, _) in VARIABLES.items()}

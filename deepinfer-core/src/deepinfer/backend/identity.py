"""The numerics id: everything on which the bits of a result depend, in one short text."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from deepinfer.backend.backend import Backend
from deepinfer.backend.kernels import KernelTable
from deepinfer.backend.runtime import DeviceRuntime

__all__ = ["NUMERICS_ID_PREFIX", "numerics_id", "numerics_parts"]

NUMERICS_ID_PREFIX = "n1-"
"""Changes when the recipe of the id changes, so that old ids never match by accident."""


def numerics_parts(backend: Backend, runtime: DeviceRuntime, table: KernelTable) -> dict[str, Any]:
    """What the id is made of, as plain values: two engines with equal parts owe each other equal bits."""
    return {
        "backend": f"{backend.name} {backend.version}",
        "torch": torch.__version__,
        "compiler": table.capabilities.compiler,
        "device": runtime.fingerprint(),
        "numerics": table.numerics.describe(),
        # All of them, so that the id does not depend on which graph asks.
        "ops": {
            binding.op: f"{binding.kind} {binding.backend}".strip()
            for binding in sorted(table.bindings(), key=lambda binding: binding.op)
        },
    }


def numerics_id(backend: Backend, runtime: DeviceRuntime, table: KernelTable) -> str:
    """Hash of `numerics_parts`, `n1-` and 16 hexadecimal digits; stored with every cache page and golden bit file."""
    text = json.dumps(numerics_parts(backend, runtime, table), sort_keys=True)
    return NUMERICS_ID_PREFIX + hashlib.sha256(text.encode()).hexdigest()[:16]

"""Which function each operation is bound to: every family of kernels says what it brings."""

from __future__ import annotations

from deepinfer.api.backend import Kernel, Numerics
from deepinfer_cuda.kernels import (
    attention,
    cache,
    compress,
    embedding,
    engram,
    hyper_connection,
    indexer,
    linear,
    metadata,
    moe,
    norm,
    quant,
    rope,
    sampling,
    selection,
    verification,
)

__all__ = ["native_kernels"]

FAMILIES = (
    attention,
    cache,
    compress,
    embedding,
    engram,
    hyper_connection,
    indexer,
    linear,
    metadata,
    moe,
    norm,
    quant,
    rope,
    sampling,
    selection,
    verification,
)
"""Modules of `deepinfer_cuda.kernels`; each has `kernels(numerics)`, which names its operations."""


def native_kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Kernels for these numerics, by op name."""
    found: dict[str, Kernel] = {}
    for family in FAMILIES:
        found |= family.kernels(numerics)
    return found

"""Light half of the built-in CPU backend."""

from __future__ import annotations

from typing import Any

from deepinfer.api.descriptor import BackendDescriptor, Probe

__all__ = ["CPU", "deepinfer_register_backends"]


def probe() -> Probe:
    """Every machine has a processor."""
    return Probe.match()


CPU = BackendDescriptor(
    name="cpu",
    api=(1, 0),
    module="deepinfer.cpu.backend:create_backend",
    summary="Built-in reference backend in plain PyTorch, row-invariant",
    probe=probe,
    is_accelerator=False,
    verified_on=("x86-64",),
)


def deepinfer_register_backends(registry: Any) -> None:
    """Offer the CPU backend through the door that every backend uses."""
    registry.add(CPU)

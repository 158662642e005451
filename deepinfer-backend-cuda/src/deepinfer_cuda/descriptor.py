"""Light half of the NVIDIA backend (standard library only)."""

from __future__ import annotations

from typing import Any

from deepinfer.api.descriptor import BackendDescriptor, Probe

__all__ = ["NVIDIA", "deepinfer_register_backends"]


def probe() -> Probe:
    """Look for a driver, usable devices, Triton and a CUDA build of PyTorch."""
    from deepinfer_cuda.probe import look

    return look()


NVIDIA = BackendDescriptor(
    name="nvidia",
    api=(1, 0),
    module="deepinfer_cuda.backend:create_backend",
    summary="NVIDIA GPUs through Triton kernels",
    probe=probe,
    verified_on=("H200",),
)


def deepinfer_register_backends(registry: Any) -> None:
    """Offer the backend."""
    registry.add(NVIDIA)

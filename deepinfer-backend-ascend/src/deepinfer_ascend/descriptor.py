"""Light half of the Ascend backend (standard library only)."""

from __future__ import annotations

from typing import Any

from deepinfer.api.descriptor import BackendDescriptor, Probe
from deepinfer_ascend.environment import VARIABLES

__all__ = ["ASCEND", "deepinfer_register_backends"]


def probe() -> Probe:
    """Look for device files, the CANN libraries and torch_npu."""
    from deepinfer_ascend.probe import look

    return look()


ASCEND = BackendDescriptor(
    name="ascend",
    api=(1, 0),
    module="deepinfer_ascend.backend:create_backend",
    summary="Ascend 950 NPUs through torch_npu (never run on hardware)",
    probe=probe,
    variables={name: meaning for name, (_, meaning) in VARIABLES.items()},
    verified_on=(),
)


def deepinfer_register_backends(registry: Any) -> None:
    """Offer the backend."""
    registry.add(ASCEND)

"""Light half of the plugin: imported at every start, so it needs nothing but the standard library."""

from __future__ import annotations

import os
from typing import Any

from deepinfer.api.descriptor import BackendDescriptor, Probe


def probe() -> Probe:
    """Look for the board without touching it; here a variable plays the part of a device file."""
    if os.environ.get("ACME_BOARDS", "1") == "0":
        return Probe.no_match("no Acme board in this machine (ACME_BOARDS=0)", hardware_present=False)
    return Probe.match()


ACME = BackendDescriptor(
    name="acme",
    api=(1, 0),
    module="acme_deepinfer.backend:create_backend",
    summary="Example backend: PyTorch in host memory with one kernel of its own",
    probe=probe,
    variables={"ACME_BOARDS": "number of boards that the example pretends to have"},
)


def deepinfer_register_backends(registry: Any) -> None:
    """Offer the backend."""
    registry.add(ACME)

"""What the heavy module of a backend implements and uses."""

from __future__ import annotations

from deepinfer.backend.backend import (
    Backend,
    Check,
    Handle,
    Kernel,
    Placement,
    Shard,
    StepLimits,
    WeightGroup,
    WeightKind,
    WeightPart,
)
from deepinfer.backend.capabilities import ALL_OPS, Capabilities, Support
from deepinfer.backend.communicator import COLLECTIVES, Communicator
from deepinfer.backend.numerics import Numerics
from deepinfer.backend.runtime import DeviceRuntime, Event, Graph, MemoryInfo, Stream
from deepinfer.ops.contract import Determinism

__all__ = [
    "ALL_OPS",
    "COLLECTIVES",
    "Backend",
    "Capabilities",
    "Check",
    "Communicator",
    "Determinism",
    "DeviceRuntime",
    "Event",
    "Graph",
    "Handle",
    "Kernel",
    "MemoryInfo",
    "Numerics",
    "Placement",
    "Shard",
    "StepLimits",
    "Stream",
    "Support",
    "WeightGroup",
    "WeightKind",
    "WeightPart",
]

"""The abstract backend: capabilities, runtime, communicator, kernels and weight layout of one kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from deepinfer.backend.capabilities import Capabilities
from deepinfer.backend.communicator import Communicator
from deepinfer.backend.numerics import Numerics
from deepinfer.backend.runtime import DeviceRuntime
from deepinfer.ops.contract import Determinism

__all__ = [
    "Backend",
    "Check",
    "Handle",
    "Kernel",
    "Placement",
    "Shard",
    "StepLimits",
    "WeightGroup",
    "WeightKind",
    "WeightPart",
]

Handle: TypeAlias = Any
"""A backend's own form of a weight group; core passes it to ops and never looks inside."""

WeightKind = Literal["bf16", "float32", "fp8_block32", "fp4_experts", "fp8_rows"]
"""`fp8_block32`: e4m3 codes and a ue8m0 scale per 32x32 block; `fp4_experts`: packed e2m1 codes and a ue8m0 scale per
32 inputs, all experts of one projection; `fp8_rows`: e4m3 table rows and their ue8m0 scales (Engram)."""


@dataclass(frozen=True)
class StepLimits:
    """Largest sizes of a step, from which a kernel computes its workspace.

    Attributes:
        rows: rows of a step.
        sequences: sequences of a step.
        context: longest context in tokens.
    """

    rows: int
    sequences: int
    context: int


@dataclass(frozen=True)
class Kernel:
    """A backend's own implementation of one op.

    Attributes:
        function: takes the arguments of the contract's reference, under the same names and in the same order.
        determinism: what it promises; more than the contract is welcome, less keeps it out of row-invariant mode.
        workspace: bytes of scratch memory that it needs for given limits; None for none. The backend gets one buffer
            for all kernels through `Backend.attach_workspace`.
        note: one line for `deepinfer backends ops`.
    """

    function: Callable[..., Any]
    determinism: Determinism
    workspace: Callable[[StepLimits], int] | None = None
    note: str = ""


@dataclass(frozen=True)
class WeightPart:
    """One tensor of the checkpoint.

    Attributes:
        name: its name there.
        shape: its shape there (packed FP4 counts bytes).
        dtype: its safetensors dtype string (`F8_E4M3`, `F8_E8M0`, `I8`, `BF16`, `F32`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightGroup:
    """Tensors that become one handle, in an order that their kind fixes.

    Codes and their scales alternate (`w.weight, w.scale, ...`); projections that share their input are fused in the
    order of the parts; for `fp4_experts` the parts of expert 0 come first.

    Attributes:
        name: unique name of the group within the model.
        kind: how the tensors are stored.
        parts: the tensors.
        plain_rows: whether the rows that it meets are never quantised, as those of the grouped output linear. A backend
            whose products do not take stored codes with such rows may keep exact values instead.
    """

    name: str
    kind: WeightKind
    parts: tuple[WeightPart, ...]
    plain_rows: bool = False


@dataclass(frozen=True)
class Shard:
    """Position of this device among those that share one copy of the model; groups are already this device's own."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class Placement:
    """Where and how a group will live, known before anything is read.

    Attributes:
        group: the group.
        nbytes: bytes that it takes there.
        memory: `device`; `host` for pinned memory that the device reads; `mmap` for views of the checkpoint's files.
        layout: the backend's name for the form; part of reports.
    """

    group: WeightGroup
    nbytes: int
    memory: Literal["device", "host", "mmap"] = "device"
    layout: str = "plain"


@dataclass(frozen=True)
class Check:
    """One line of `deepinfer doctor`: what was looked at, the finding, and what to do if it is not well."""

    name: str
    status: Literal["ok", "warning", "failure"]
    detail: str = ""
    fix: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


class Backend(ABC):
    """What a plugin's factory returns. One object per process; `device` is the index of a device of this machine.

    Attributes:
        name: the name of its descriptor.
        version: version of the distribution, part of the numerics id.
    """

    name: str
    version: str

    @abstractmethod
    def capabilities(self, device: int = 0) -> Capabilities:
        """What a device can do; no allocation."""

    @abstractmethod
    def runtime(self, device: int = 0) -> DeviceRuntime:
        """Take a device into use."""

    @abstractmethod
    def communicator(self, group: Any = None) -> Communicator:
        """Collectives over a `torch.distributed` group (None: a group of one).

        Raises:
            CapabilityError: the backend has no collectives.
        """

    @abstractmethod
    def kernels(self, numerics: Numerics) -> Mapping[str, Kernel]:
        """Its kernels by op name for these numerics.

        Raises:
            CapabilityError: the numerics cannot be honoured.
        """

    @abstractmethod
    def plan_weights(self, groups: Sequence[WeightGroup], shard: Shard, numerics: Numerics) -> list[Placement]:
        """One placement per group, in order, before anything is read."""

    @abstractmethod
    def load(self, placement: Placement, raw: Mapping[str, torch.Tensor]) -> Handle:
        """Bring a group into its form. `raw` maps part names to the checkpoint's tensors: `float8_e4m3fn` for codes,
        uint8 for ue8m0 scales and packed FP4; for `mmap` they are views of the files and may be kept.
        """

    @abstractmethod
    def unpack(self, placement: Placement, handle: Handle) -> dict[str, torch.Tensor]:
        """The checkpoint's bytes again, part by part, on the host."""

    def attach_workspace(self, buffer: torch.Tensor) -> None:  # noqa: B027 - a backend without scratch memory
        """Receive the scratch buffer (uint8, on the device) that core allocated for all its kernels; kept for good."""

    def adopt_handle(self, handle: Handle) -> Handle:
        """Its own form of a plain `Mixes` or `Selection` of `deepinfer.api.ops`; for tests only."""
        return handle

    def plain_handle(self, handle: Handle) -> Handle:
        """A result as plain tensors: `Rows`, `Mixes`, `Selection` or `Projected` of `deepinfer.api.ops`; for tests."""
        return handle

    def process_settings(self, numerics: Numerics) -> Mapping[str, Any]:
        """Process-wide torch settings that its kernels rely on, by the names of `deepinfer.backend.process`."""
        return {}

    def doctor(self) -> list[Check]:
        """Look for trouble on this machine; called by `deepinfer doctor` only."""
        return []

    def environment(self) -> dict[str, str]:
        """Versions of drivers, compilers and libraries, for bug reports."""
        return {}

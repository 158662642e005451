"""Heavy half of the Ascend backend: capabilities, runtime, weight forms and kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from deepinfer_ascend.environment import VARIABLES, prepare

prepare()  # before torch_npu is imported: it reads its variables once

import torch  # noqa: E402
import torch_npu  # noqa: E402

from deepinfer.api.backend import (  # noqa: E402
    COLLECTIVES,
    Backend,
    Capabilities,
    Communicator,
    DeviceRuntime,
    Kernel,
    Numerics,
    Placement,
    Shard,
    WeightGroup,
)
from deepinfer.api.errors import CapabilityError  # noqa: E402
from deepinfer.api.ops import Rows  # noqa: E402
from deepinfer_ascend import weights  # noqa: E402
from deepinfer_ascend.communicator import HcclCommunicator  # noqa: E402
from deepinfer_ascend.handles import MxRows  # noqa: E402
from deepinfer_ascend.runtime import NpuRuntime, cann_version  # noqa: E402
from deepinfer_ascend.table import native_kernels  # noqa: E402

__all__ = ["AscendBackend", "create_backend"]


class AscendBackend(Backend):
    """Ascend NPUs through torch_npu."""

    name = "ascend"
    version = metadata.version("deepinfer-backend-ascend")

    def capabilities(self, device: int = 0) -> Capabilities:
        """What the documentation of the 950 and of torch_npu promises; nothing of it was measured on hardware.

        Bits promise nothing: batch invariance exists for other chips only, and HCCL's deterministic mode does not
        name the 950. FP4 weights are multiplied as FP8 codes.
        """
        return Capabilities(
            device_type="npu",
            device_name=torch_npu.npu.get_device_name(device),
            compute_dtypes=("bfloat16", "float32"),
            fp8="native",
            fp4="emulated",
            compiler=f"torch_npu-{torch_npu.__version__}",
            graphs=True,
            async_loop=True,
            pinned_memory=True,
            collectives=frozenset(COLLECTIVES),
            fixed_order_collectives=HcclCommunicator.fixed_order,
            max_draft=64,
            row_invariant=False,
            references_intended=True,
            engram_placements=("device",),
            verified_on=(),
        )

    def runtime(self, device: int = 0) -> DeviceRuntime:
        """Take an NPU into use."""
        return NpuRuntime(device)

    def communicator(self, group: Any = None) -> Communicator:
        """Collectives over a group whose backend is `cpu:gloo,npu:hccl`."""
        return HcclCommunicator(group)

    def kernels(self, numerics: Numerics) -> Mapping[str, Kernel]:
        """Kernels by op name; other ops run their references, which are made of aten operations.

        Raises:
            CapabilityError: float64 was asked for.
        """
        if numerics.compute_dtype not in (torch.bfloat16, torch.float32):
            raise CapabilityError(f"the Ascend backend computes in bfloat16 or float32, not {numerics.compute_dtype}")
        return native_kernels()

    def plan_weights(self, groups: Sequence[WeightGroup], shard: Shard, numerics: Numerics) -> list[Placement]:
        """Form and bytes of each group."""
        return weights.plan_weights(groups, shard, numerics)

    def load(self, placement: Placement, raw: Mapping[str, torch.Tensor]) -> weights.Weight:
        """Bring the checkpoint's tensors to the current device."""
        return weights.load(placement, raw, torch.device("npu", torch_npu.npu.current_device()))

    def unpack(self, placement: Placement, handle: weights.Weight) -> dict[str, torch.Tensor]:
        """The checkpoint's bytes again."""
        return weights.unpack(placement, handle)

    def plain_handle(self, handle: Any) -> Any:
        """Rows with codes as plain rows."""
        return Rows(handle.values, handle.quantised) if isinstance(handle, MxRows) else handle

    def environment(self) -> dict[str, str]:
        """Versions, and the variables as torch_npu found them."""
        versions = {"torch_npu": torch_npu.__version__, "CANN": cann_version() or "not found"}
        return versions | {name: os.environ.get(name, "") for name in VARIABLES} | {"hardware": "never run on hardware"}


def create_backend() -> AscendBackend:
    """Factory that the descriptor names."""
    return AscendBackend()

"""Heavy half of the NVIDIA backend: capabilities, runtime, weight forms and kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

from deepinfer.api.backend import (
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
from deepinfer.api.errors import CapabilityError
from deepinfer.api.ops import Rows
from deepinfer_cuda import weights
from deepinfer_cuda.handles import QuantisedRows
from deepinfer_cuda.probe import read_driver
from deepinfer_cuda.runtime import CudaRuntime
from deepinfer_cuda.table import native_kernels

__all__ = ["CudaBackend", "create_backend"]


class CudaBackend(Backend):
    """NVIDIA GPUs."""

    name = "nvidia"
    version = metadata.version("deepinfer-backend-cuda")

    def capabilities(self, device: int = 0) -> Capabilities:
        """What a GPU can do; FP4 and, before compute capability 8.9, FP8 are converted before they are multiplied."""
        properties = torch.cuda.get_device_properties(device)
        return Capabilities(
            device_type="cuda",
            device_name=properties.name,
            compute_dtypes=("bfloat16", "float32"),
            fp8="emulated",
            fp4="emulated",
            compiler=f"triton-{metadata.version('triton')}",
            graphs=True,
            async_loop=True,
            pinned_memory=True,
            max_draft=64,
            engram_placements=("device",),
            verified_on=("H200",),
        )

    def runtime(self, device: int = 0) -> DeviceRuntime:
        """Take a GPU into use."""
        return CudaRuntime(device)

    def communicator(self, group: Any = None) -> Communicator:
        """Refuse: one GPU a model so far."""
        raise CapabilityError("the NVIDIA backend has no collectives yet; run one GPU")

    def kernels(self, numerics: Numerics) -> Mapping[str, Kernel]:
        """Triton kernels by op name."""
        return native_kernels(numerics)

    def plan_weights(self, groups: Sequence[WeightGroup], shard: Shard, numerics: Numerics) -> list[Placement]:
        """Form and bytes of each group."""
        return weights.plan_weights(groups, shard, numerics)

    def load(self, placement: Placement, raw: Mapping[str, torch.Tensor]) -> weights.Handle:
        """Bring the checkpoint's tensors to the current device."""
        return weights.load(placement, raw, self._device())

    def unpack(self, placement: Placement, handle: weights.Handle) -> dict[str, torch.Tensor]:
        """The checkpoint's bytes again."""
        return weights.unpack(placement, handle)

    def plain_handle(self, handle: Any) -> Any:
        """Quantised rows as plain tensors."""
        return Rows(handle.values, handle.quantised) if isinstance(handle, QuantisedRows) else handle

    def environment(self) -> dict[str, str]:
        """Versions of the driver, CUDA and Triton."""
        version = read_driver().version
        return {
            "driver supports CUDA": f"{version // 1000}.{version % 1000 // 10}",
            "PyTorch built for CUDA": str(torch.version.cuda),
            "Triton": metadata.version("triton"),
        }

    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())


def create_backend() -> CudaBackend:
    """Factory that the descriptor names."""
    return CudaBackend()

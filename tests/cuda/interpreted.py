"""The NVIDIA backend on tensors of the processor: its portable kernels run in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from deepinfer.api.backend import Capabilities, DeviceRuntime
from deepinfer.cpu.runtime import CpuRuntime

pytest.importorskip("triton", reason="Triton is not installed")

from deepinfer_cuda.backend import CudaBackend


class InterpretedBackend(CudaBackend):
    """Same kernels and weight forms, another device."""

    def capabilities(self, device: int = 0) -> Capabilities:
        with mock.patch("torch.cuda.get_device_properties", return_value=SimpleNamespace(name="interpreter")):
            return replace(super().capabilities(device), device_type="cpu")

    def runtime(self, device: int = 0) -> DeviceRuntime:
        return CpuRuntime()

    def _device(self) -> torch.device:
        return torch.device("cpu")

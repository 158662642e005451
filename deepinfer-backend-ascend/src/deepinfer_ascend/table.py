"""Every kernel of the backend by op name, and what each is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepinfer.api.backend import Determinism, Kernel
from deepinfer_ascend.kernels.linear import grouped_linear, linear, linear_accumulate, quantise_rows
from deepinfer_ascend.kernels.moe import expert_ffn
from deepinfer_ascend.kernels.norm import rms_norm
from deepinfer_ascend.kernels.rope import rope

__all__ = ["native_kernels"]


def native_kernels() -> dict[str, Kernel]:
    """Kernels by op name.

    None promises anything about its bits: operators of CANN may sum in another order in every run unless torch's
    deterministic switch is on, and what that switch covers on the 950 is not documented.
    """
    notes: dict[Callable[..., Any], str] = {
        rms_norm: "npu_rms_norm",
        rope: "npu_rotary_mul",
        linear: "npu_quant_matmul (MX) or aten",
        linear_accumulate: "npu_quant_matmul (MX) or aten",
        grouped_linear: "aten bmm",
        expert_ffn: "npu_grouped_matmul",
    }
    kernels = {function.__name__: Kernel(function, Determinism.NONE, note=note) for function, note in notes.items()}
    kernels["quantise_rows"] = Kernel(quantise_rows, Determinism.EXACT, note="aten; keeps FP8 codes for MX products")
    return kernels

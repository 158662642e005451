"""Heavy half of the CPU backend: capabilities as data, kernels and weight forms from their own files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepinfer import __version__
from deepinfer.api.backend import (
    ALL_OPS,
    COLLECTIVES,
    Backend,
    Capabilities,
    Check,
    Communicator,
    DeviceRuntime,
    Handle,
    Kernel,
    Numerics,
    Placement,
    Shard,
    WeightGroup,
)
from deepinfer.api.errors import CapabilityError
from deepinfer.cpu import weights
from deepinfer.cpu.communicator import GlooCommunicator
from deepinfer.cpu.kernels import cpu_kernels
from deepinfer.cpu.runtime import CpuRuntime
from deepinfer.cpu.self_check import row_variant_products, row_variant_shapes, row_variant_work

__all__ = ["CpuBackend", "create_backend"]

ROW_INVARIANT_COMPOSITIONS = ("sparse_attention", "index_scores", "index_select", "draft_block")
"""Their contracts promise less for the sake of other devices; here batched products keep one shape per row."""


class CpuBackend(Backend):
    """Plain PyTorch on the processor."""

    name = "cpu"
    version = __version__

    def capabilities(self, device: int = 0) -> Capabilities:
        """What the processor can do; FP8 and FP4 are emulated through exact conversion."""
        return Capabilities(
            device_type="cpu",
            device_name=torch.backends.cpu.get_cpu_capability(),
            compute_dtypes=("bfloat16", "float32", "float64"),
            fp8="emulated",
            fp4="emulated",
            compiler="torch-" + hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:12],
            host_readable=True,
            collectives=frozenset(COLLECTIVES),
            fixed_order_collectives=GlooCommunicator.fixed_order,
            max_draft=64,
            row_invariant=not row_variant_products(),
            row_invariant_references=frozenset({ALL_OPS, *ROW_INVARIANT_COMPOSITIONS}),
            references_intended=True,
            engram_placements=("mmap", "host"),
            verified_on=("x86-64",),
        )

    def runtime(self, device: int = 0) -> DeviceRuntime:
        """The synchronous runtime; there is one device."""
        return CpuRuntime()

    def communicator(self, group: Any = None) -> Communicator:
        """Collectives over a gloo group."""
        return GlooCommunicator(group)

    def kernels(self, numerics: Numerics) -> Mapping[str, Kernel]:
        """Kernels that replace references, by op name."""
        return cpu_kernels(numerics)

    def plan_weights(self, groups: Sequence[WeightGroup], shard: Shard, numerics: Numerics) -> list[Placement]:
        """Form and bytes of each group.

        Raises:
            CapabilityError: more than one shard; or row-invariant mode, and the arithmetic of this machine, tried on
                the shapes of these groups, does not keep rows independent.
        """
        if numerics.batch_invariant:
            dtype = numerics.compute_dtype
            found = (*row_variant_work(), *row_variant_shapes(weights.product_shapes(groups), dtype))
            if found:
                raise CapabilityError(
                    f"DEEPINFER_BATCH_INVARIANT=1 cannot be kept here: rows depend on their neighbours in "
                    f"{', '.join(found)}; unset it, or report the processor and the version of PyTorch"
                )
        return weights.plan_weights(groups, shard, numerics)

    def load(self, placement: Placement, raw: Mapping[str, torch.Tensor]) -> Handle:
        """Bring the checkpoint's tensors into the form of the plan."""
        return weights.load(placement, raw)

    def unpack(self, placement: Placement, handle: Handle) -> dict[str, torch.Tensor]:
        """The checkpoint's bytes again."""
        return weights.unpack(placement, handle)

    def doctor(self) -> list[Check]:
        """Test on this machine that a row's bits do not depend on its neighbours."""
        found = tuple(dict.fromkeys((*row_variant_products(), *row_variant_work(), *row_variant_work(1))))
        if not found:
            return [Check("row-invariance of cpu", "ok", "arithmetic of this machine keeps rows independent")]
        detail = f"rows depend on their neighbours in: {', '.join(found)}; DEEPINFER_BATCH_INVARIANT=1 is refused"
        return [Check("row-invariance of cpu", "warning", detail, "report the processor and the version of PyTorch")]


def create_backend() -> CpuBackend:
    """Factory that the descriptor names."""
    return CpuBackend()

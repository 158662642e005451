"""What a device can do, as data; a field that a backend leaves alone is the careful answer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

__all__ = ["ALL_OPS", "Capabilities", "Support"]

Support = Literal["native", "emulated", "none"]

ALL_OPS = "*"
"""In `row_invariant_references`: every op whose contract promises row-invariance."""


@dataclass(frozen=True)
class Capabilities:
    """Abilities of one device under one backend.

    Attributes:
        device_type: `torch.device` type of its tensors.
        device_name: what the vendor calls it.
        compute_dtypes: values of `DEEPINFER_COMPUTE_DTYPE` that its kernels accept.
        fp8: FP8 (e4m3) matrix products: by the hardware, by conversion, or not at all.
        fp4: the same for FP4 (e2m1) weights.
        compiler: kernel compiler and version, part of the numerics id.
        graphs: steps can be captured and replayed.
        async_loop: the next step may be launched while one runs.
        host_readable: kernels can read rows of host memory in place.
        pinned_memory: pinned host memory exists and makes copies asynchronous.
        collectives: names of the Communicator's methods that work.
        fixed_order_collectives: those of them whose result bits do not depend on timing or algorithm choice.
        max_draft: longest draft block N that it can verify; 0 for none.
        row_invariant: `DEEPINFER_BATCH_INVARIANT=1` may be asked for at all.
        row_invariant_references: ops whose plain-PyTorch reference (or what a composition computes itself) keeps rows
            independent on this device, although the contract may promise less. `ALL_OPS` stands for every op whose
            contract promises row-invariance. Empty until a test has shown it.
        references_intended: plain PyTorch is this backend's way of running ops, so it counts as no fallback.
        cache_layouts: ids of the row layouts that its cache ops read and write; `canonical` is the release's own.
        engram_placements: where Engram tables can live, best first.
        verified_on: hardware on which the contract tests have been run; empty means never on hardware.
    """

    device_type: str
    device_name: str = ""
    compute_dtypes: tuple[str, ...] = ("bfloat16",)
    fp8: Support = "none"
    fp4: Support = "none"
    compiler: str = ""
    graphs: bool = False
    async_loop: bool = False
    host_readable: bool = False
    pinned_memory: bool = False
    collectives: frozenset[str] = frozenset()
    fixed_order_collectives: frozenset[str] = frozenset()
    max_draft: int = 0
    row_invariant: bool = False
    row_invariant_references: frozenset[str] = frozenset()
    references_intended: bool = False
    cache_layouts: tuple[str, ...] = ("canonical",)
    engram_placements: tuple[str, ...] = ()
    verified_on: tuple[str, ...] = ()

    def describe(self) -> dict[str, object]:
        """Plain values in the order of declaration, sets sorted, for reports."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in values.items()}

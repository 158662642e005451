"""Which function each operation is bound to."""

from __future__ import annotations

from deepinfer.api.backend import Determinism, Kernel, Numerics
from deepinfer_cuda.kernels.linear import Products
from deepinfer_cuda.kernels.moe import expert_ffn

__all__ = ["native_kernels"]


def native_kernels(numerics: Numerics) -> dict[str, Kernel]:
    """Kernels for these numerics, by op name."""
    products = Products()
    found = (products.linear, products.linear_accumulate, products.grouped_linear, expert_ffn)
    return {function.__name__: Kernel(function, Determinism.ROW_INVARIANT) for function in found}

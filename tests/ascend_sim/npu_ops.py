"""Reference semantics of the `npu_*` operators that the backend calls, from their documentation.

Registered at the device's key of torch_npu's own schemas, so that its parser checks every call, and compared in shape
and dtype with its own Meta kernels. Each is a composition of aten operators of the simulated device: it runs later, in
stream order, and can be captured. The numbers are a reading of the documentation, never of a device; a form that the
documentation leaves open raises `Undocumented`. What it calls undefined is NaN here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import simulated_operators
import torch
import torch_npu  # noqa: F401 - registers the schemas
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

__all__ = ["LIBRARY", "Undocumented"]

LIBRARY = torch.library.Library("npu", "IMPL")
GROUP = 32
_DTYPES = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16, 27: torch.bfloat16}
"""torch's own numbers of dtypes and torch_npu's, as the parser hands them on."""


class Undocumented(NotImplementedError):
    """A form whose result the documentation does not say."""


def emulate(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function as the kernel of the operator of its name."""
    name = function.__name__
    operator = getattr(torch.ops.npu, name).default
    seen: set[str] = set()

    @functools.wraps(function)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        simulated_operators.enter(f"npu::{name}")
        try:
            result = function(*args, **kwargs)
        finally:
            simulated_operators.leave()
        shapes = tree_map_only(Tensor, lambda tensor: (tensor.shape, tensor.dtype), (args, kwargs))
        if repr(shapes) not in seen:
            _compare(name, operator, args, kwargs, result)
            seen.add(repr(shapes))
        return result

    LIBRARY.impl(name, kernel, "PrivateUse1")
    return kernel


def _compare(name: str, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
    """The result must look like that of torch_npu's Meta kernel, which also checks the arguments."""
    meta_args, meta_kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    expected = tree_flatten(operator(*meta_args, **meta_kwargs))[0]
    for index, (ours, theirs) in enumerate(zip(tree_flatten(result)[0], expected, strict=True)):
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            raise AssertionError(
                f"npu::{name}, result {index}: {tuple(ours.shape)} {ours.dtype}, "
                f"torch_npu's Meta kernel says {tuple(theirs.shape)} {theirs.dtype}"
            )


def _factors(scales: Tensor) -> Tensor:
    return torch.exp2(scales.view(torch.uint8).to(torch.float32) - 127)


def mx_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [M, K] of codes [M, K] and scales [M, K / 64, 2]."""
    return codes.to(torch.float32) * _factors(scales).flatten(-2).repeat_interleave(GROUP, -1)


def mx_columns(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [K, N] of codes [K, N] and scales [K / 64, N, 2]."""
    return codes.to(torch.float32) * _factors(scales).transpose(-1, -2).flatten(0, 1).repeat_interleave(GROUP, 0)


@emulate
def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """y = x rsqrt(mean(x^2) + eps) gamma in float32, rounded to x's dtype; x and gamma have one dtype."""
    if self.dtype != gamma.dtype:
        raise Undocumented(f"x is {self.dtype}, gamma {gamma.dtype}")
    wide = self.to(torch.float32)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.to(torch.float32)).to(self.dtype), rstd


@emulate
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Mode `interleave`: r1 x + r2 (-x[1], x[0], -x[3], x[2], ...)."""
    if rotary_mode != "interleave" or rotate is not None or input.dim() != 4:
        raise Undocumented(f"mode {rotary_mode}, {input.dim()} dimensions")
    x = input.to(torch.float32)
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return (r1.to(torch.float32) * x + r2.to(torch.float32) * turned).to(input.dtype)


@emulate
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: Tensor | None = None,
) -> Tensor:
    """MX form: products of codes, scaled per 32 terms, summed in float32, rounded once."""
    plain = offset is None and bias is None and y_scale is None
    if not plain or pertoken_scale is None or group_sizes is None or list(group_sizes) != [1, 1, GROUP]:
        raise Undocumented("only the MX form")
    if x1.shape[-1] % 64:
        raise Undocumented(f"{x1.shape[-1]} terms are no whole pairs of scales")
    product = mx_rows(x1, pertoken_scale) @ mx_columns(x2, scale)
    return product.to(_DTYPES[output_dtype or 0])


@emulate
def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    scale: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    output_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
    **other: Any,
) -> list[Tensor]:
    """One x and one weight [E, K, N], rows grouped by counts: row r of group g gives x[r] weight[g]."""
    named = {name for name, value in other.items() if value not in (None, 0, [])}
    if named or len(x) != 1 or len(weight) != 1 or (group_type, group_list_type, split_item) != (0, 1, 2):
        raise Undocumented(f"only one x and one weight with rows grouped by counts; got {sorted(named)}")
    if group_list is None:
        raise Undocumented("no group_list")
    rows = mx_rows(x[0], per_token_scale[0]) if per_token_scale else x[0].to(torch.float32)
    group = torch.bucketize(torch.arange(rows.shape[0], device=rows.device), group_list.cumsum(0), right=True)
    out = torch.full((rows.shape[0], weight[0].shape[2]), float("nan"), device=rows.device)
    for expert in range(weight[0].shape[0]):
        matrix = mx_columns(weight[0][expert], scale[0][expert]) if scale else weight[0][expert].to(torch.float32)
        out = torch.where((group == expert)[:, None], rows @ matrix, out)
    return [out.to(x[0].dtype if output_dtype is None else _DTYPES[output_dtype])]

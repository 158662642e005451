"""Turns sample inputs into calls of a backend, and into the float64 result that they are judged by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from deepinfer.api.backend import Backend, Numerics, Shard, WeightGroup, WeightKind, WeightPart
from deepinfer.api.ops import Determinism, Mixes, OpContract, RawWeight, RowsInput, Selection
from deepinfer.backend.binder import Binding, dependency_order
from deepinfer.backend.kernels import KernelTable
from deepinfer.conformance.trees import clone, map_leaves, to_wide

__all__ = ["ExactTable", "Target"]

_DTYPE_NAMES = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32"}


class Target:
    """One backend, device and numerics under test.

    Args:
        contracts: all op contracts by name.
        backend: the backend.
        numerics: what is rounded where.
        device: index of the device.
        overrides: text of `DEEPINFER_OPS`.
    """

    def __init__(
        self,
        contracts: Mapping[str, OpContract],
        backend: Backend,
        numerics: Numerics,
        device: int = 0,
        overrides: str = "",
    ) -> None:
        self.backend, self.numerics = backend, numerics
        self.runtime = backend.runtime(device)
        self.device = self.runtime.device
        self.table = KernelTable.bind(
            contracts, backend, numerics, fallback="allow", overrides=overrides, device=device, roots=()
        )
        self.bindings: dict[str, Binding] = {binding.op: binding for binding in self.table.bindings()}
        self._handles: dict[int, tuple[RawWeight, Any]] = {}

    @property
    def kernel_functions(self) -> dict[str, Callable[..., Any]]:
        """The backend's own kernels that are bound."""
        return {op: self.function(op) for op, binding in self.bindings.items() if binding.kind == "native"}

    def function(self, op: str) -> Callable[..., Any]:
        """The bound function of an op."""
        bound: Callable[..., Any] = getattr(self.table, op)
        return bound

    def arguments(self, contract: OpContract, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Fresh arguments of one call: on the device, in the dtypes of the numerics, weights loaded by the backend."""
        activations = contract.activations

        def is_activation(path: str) -> bool:
            return any(path == name or path.startswith(f"{name}.") for name in activations)

        def prepare(path: str, leaf: Any) -> Any:
            if isinstance(leaf, RawWeight):
                return self._handle(leaf)
            if isinstance(leaf, RowsInput):
                values = self._place(leaf.values, self.numerics.compute_dtype)
                return self.table.quantise_rows(values, self.numerics.activation_quant)
            if isinstance(leaf, torch.dtype):
                return self.numerics.compute_dtype if is_activation(path) else leaf
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf.dtype is not torch.float32:
                return self._place(leaf, leaf.dtype)
            wanted = self.numerics.compute_dtype if is_activation(path) else self.numerics.accumulate_dtype
            return self._place(leaf, wanted)

        prepared = map_leaves(prepare, dict(kwargs), stop=(Tensor, RawWeight, RowsInput))
        adopted: dict[str, Any] = map_leaves(self._adopt, prepared, stop=(Mixes, Selection))
        return adopted

    def _adopt(self, _: str, leaf: Any) -> Any:
        return self.backend.adopt_handle(leaf) if isinstance(leaf, (Mixes, Selection)) else leaf

    def run(self, op: str, arguments: Mapping[str, Any]) -> Any:
        """Call the bound function and wait for its result, handles in plain form."""
        result = self.function(op)(**arguments)
        self.runtime.synchronize()
        if isinstance(result, tuple):
            return tuple(self.backend.plain_handle(part) for part in result)
        return self.backend.plain_handle(result)

    def _place(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy on the device with the strides that a view of a page has."""
        copied = clone(tensor)
        if copied.device == self.device and copied.dtype is dtype:
            return copied
        if copied.is_contiguous() or 0 in copied.stride():
            return copied.to(self.device, dtype)
        placed = torch.empty_strided(copied.shape, copied.stride(), dtype=dtype, device=self.device)
        return placed.copy_(copied)

    def _handle(self, raw: RawWeight) -> Any:
        """The backend's form of a weight, made once per weight."""
        if id(raw) not in self._handles:
            if len(self._handles) > 256:
                self._handles.clear()
            self._handles[id(raw)] = (raw, self._load(raw))
        return self._handles[id(raw)][1]

    def _load(self, raw: RawWeight) -> Any:
        parts = tuple(
            WeightPart(name, tuple(tensor.shape), _DTYPE_NAMES.get(tensor.dtype) or _byte_kind(name))
            for name, tensor in raw.tensors.items()
        )
        group = WeightGroup("under test", cast(WeightKind, raw.kind), parts)
        placement = self.backend.plan_weights([group], Shard(), self.numerics)[0]
        return self.backend.load(placement, raw.tensors)


def _byte_kind(name: str) -> str:
    return "F8_E8M0" if name.endswith("scale") else "I8"


class ExactTable:
    """References whose arithmetic runs in float64, with the result of every fine op rounded as its contract says.

    So a composition differs from this table only by its own rounding errors, never by roundings that are part of the
    release's numerics.
    """

    def __init__(self, contracts: Mapping[str, OpContract]) -> None:
        self._contracts = contracts
        for name in dependency_order(contracts):
            setattr(self, name, self._function(contracts[name]))

    def _function(self, contract: OpContract) -> Callable[..., Any]:
        if contract.compose is not None:
            return contract.compose(self)
        if contract.reference is None:
            raise ValueError(f"operation {contract.name!r} has neither a reference nor a composition")
        return contract.reference if contract.determinism is Determinism.EXACT else _rounded(contract.reference)

    def expected(self, contract: OpContract, arguments: Mapping[str, Any]) -> Any:
        """Float64 result of a fine op, or the exact table's result of a composition; writes into `arguments`."""
        if contract.reference is not None and contract.determinism is not Determinism.EXACT:
            return contract.reference(**to_wide(arguments))
        return getattr(self, contract.name)(**arguments)


def _rounded(reference: Callable[..., Any]) -> Callable[..., Any]:
    def exact(*args: Any, **kwargs: Any) -> Any:
        model = reference(*args, **kwargs)
        return _round_like(reference(*to_wide(args), **to_wide(kwargs)), model)

    return exact


def _round_like(wide: Any, model: Any) -> Any:
    """Float64 values in the dtypes of `model`, which has the same structure."""
    dtypes: dict[str, Any] = {}
    map_leaves(lambda path, leaf: dtypes.setdefault(path, getattr(leaf, "dtype", None)), model)
    return map_leaves(lambda path, leaf: leaf.to(dtypes[path]) if isinstance(leaf, Tensor) else leaf, wide)

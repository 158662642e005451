"""A made-up set of contracts and a made-up backend, so that binding rules are tested without the real ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deepinfer.backend.backend import Backend, Kernel
from deepinfer.backend.capabilities import ALL_OPS, Capabilities
from deepinfer.backend.numerics import Numerics
from deepinfer.ops.contract import Determinism, OpContract, Tolerance


def small(name: str, function: Callable[..., Any], determinism: Determinism = Determinism.ROW_INVARIANT) -> OpContract:
    return OpContract(name, "made_up", function, None, (), None, Tolerance(), determinism)


def large(name: str, compose: Callable[[Any], Any], uses: tuple[str, ...], **kwargs: Any) -> OpContract:
    determinism = kwargs.get("determinism", Determinism.ROW_INVARIANT)
    return OpContract(name, "made_up", None, compose, uses, None, Tolerance(), determinism)


def scale(x: float, by: float = 2.0) -> float:
    return x * by


def shift(x: float) -> float:
    return x + 1


def pick(x: float) -> float:
    return x


def block(table: Any) -> Callable[[float], float]:
    scaled, shifted = table.scale, table.shift

    def block(x: float) -> float:
        return shifted(scaled(x))

    return block


def model(table: Any) -> Callable[[float], float]:
    inner = table.block

    def model(x: float) -> float:
        return inner(inner(x))

    return model


@pytest.fixture
def contracts() -> dict[str, OpContract]:
    entries = [
        large("model", model, ("block",)),
        large("block", block, ("scale", "shift")),
        small("scale", scale, Determinism.RUN_TO_RUN),
        small("shift", shift),
        small("pick", pick, Determinism.EXACT),
    ]
    return {entry.name: entry for entry in entries}


class FakeBackend(Backend):
    """Only what binding looks at."""

    version = "1.0"

    def __init__(self, name: str = "acme", kernels: Any = None, **capabilities: Any) -> None:
        self.name = name
        self._kernels = kernels or {}
        values = {
            "compute_dtypes": ("bfloat16",),
            "row_invariant": True,
            "row_invariant_references": frozenset({ALL_OPS}),
        }
        self._capabilities = Capabilities(**{"device_type": "cpu", **values, **capabilities})

    def capabilities(self, device: int = 0) -> Capabilities:
        return self._capabilities

    def kernels(self, numerics: Numerics) -> Any:
        return self._kernels() if callable(self._kernels) else self._kernels

    def runtime(self, device: int = 0) -> Any: ...

    def communicator(self, group: Any = None) -> Any: ...

    def plan_weights(self, groups: Any, shard: Any, numerics: Any) -> Any: ...

    def load(self, placement: Any, raw: Any) -> Any: ...

    def unpack(self, placement: Any, handle: Any) -> dict[str, torch.Tensor]: ...


@pytest.fixture
def fake() -> type[FakeBackend]:
    return FakeBackend


@pytest.fixture
def kernel() -> Callable[..., Kernel]:
    def make(function: Callable[..., Any], determinism: Determinism = Determinism.ROW_INVARIANT, **more: Any) -> Kernel:
        return Kernel(function, determinism, **more)

    return make

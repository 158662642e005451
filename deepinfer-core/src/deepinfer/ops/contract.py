"""What an operation promises: one declaration from which reference, tests, benchmarks, docs and fallback come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import torch

__all__ = ["CONTRACTS", "Determinism", "OpContract", "Sample", "SampleSize", "Tolerance", "composite", "op"]

SampleSize = Literal["tiny", "odd", "real"]


class Determinism(StrEnum):
    """How far two runs of an operation agree, strongest first."""

    EXACT = "exact"
    """Integer or rounding-defined result: every backend gives the same bits."""
    ROW_INVARIANT = "row-invariant"
    """A row's bits do not depend on the other rows of the call; backends differ within the tolerance."""
    RUN_TO_RUN = "run-to-run"
    """The same call gives the same bits; another batch may not."""
    NONE = "none"


@dataclass(frozen=True)
class Tolerance:
    """Allowed distance to the float64 result.

    Attributes:
        rtol: allowed |out - ref| relative to the largest |ref| of the array, for float32 inputs.
        bf16_rtol: the same for bfloat16 inputs.
        flip_share: for quantised outputs, the largest share of codes that may differ, and only where a value within
            two bfloat16 steps of the float64 one, or within the tolerance of its row, has that code. Above 0 it also
            says that the operation quantises inside: a few rows may then hold a flipped code and deviate by up to its
            step.
    """

    rtol: float = 2e-6
    bf16_rtol: float = 8e-3
    flip_share: float = 0.0

    def for_dtype(self, dtype: torch.dtype) -> float:
        """The relative tolerance for inputs of this dtype."""
        return self.bf16_rtol if dtype is torch.bfloat16 else self.rtol


@dataclass(frozen=True)
class Sample:
    """One call of an operation: keyword arguments and where its rows are.

    Attributes:
        label: what is special about it ("empty", "padding rows", "extreme values", ...).
        kwargs: arguments of the call; tensors on the CPU, moved to the device by the caller.
        row_args: names of the arguments whose first dimension is the row, for row-invariance tests.
        unread: what no result may depend on: a mask over the leading dimensions of an argument (dotted name for a
            field), True where a test may put poison.
        idle_rows: mask of rows whose results are undefined.
    """

    label: str
    kwargs: dict[str, Any]
    row_args: tuple[str, ...] = ()
    unread: Mapping[str, torch.Tensor] = field(default_factory=dict)
    idle_rows: torch.Tensor | None = None


@dataclass(frozen=True)
class OpContract:
    """Declaration of one operation.

    Attributes:
        name: key in the kernel table.
        family: the file of the room `ops` that declares it.
        reference: plain-PyTorch function; None for a composite.
        compose: for a large op, builds the reference from finer ops of a kernel table.
        uses: names of the finer ops that `compose` reads.
        samples: yields calls for a size, drawn from the generator.
        tolerance: against float64.
        determinism: class of the *contract*; a kernel may promise more, never less.
        mutates: names of arguments written in place.
        activations: dotted names of arguments in the compute dtype (of a `torch.dtype` argument: that is the compute
            dtype). Every other floating argument is in the accumulate dtype, weights apart.
        aliases: names of arguments whose memory a result may share.
        summary: first line of the reference's docstring.
    """

    name: str
    family: str
    reference: Callable[..., Any] | None
    compose: Callable[[Any], Callable[..., Any]] | None
    uses: tuple[str, ...]
    samples: Callable[[SampleSize, torch.Generator], Iterator[Sample]] | None
    tolerance: Tolerance
    determinism: Determinism
    mutates: tuple[str, ...] = ()
    activations: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    summary: str = ""
    doc: str = field(default="", repr=False)


CONTRACTS: dict[str, OpContract] = {}


def _declare(
    function: Callable[..., Any],
    *,
    is_composite: bool,
    uses: tuple[str, ...],
    samples: Callable[[SampleSize, torch.Generator], Iterator[Sample]] | None,
    tolerance: Tolerance,
    determinism: Determinism,
    mutates: tuple[str, ...],
    activations: tuple[str, ...],
    aliases: tuple[str, ...],
) -> None:
    name = function.__name__
    if name in CONTRACTS:
        raise RuntimeError(f"operation {name!r} is declared twice")
    doc = function.__doc__ or ""
    CONTRACTS[name] = OpContract(
        name=name,
        family=function.__module__.rsplit(".", 1)[-1],
        reference=None if is_composite else function,
        compose=function if is_composite else None,
        uses=uses,
        samples=samples,
        tolerance=tolerance,
        determinism=determinism,
        mutates=mutates,
        activations=activations,
        aliases=aliases,
        summary=doc.strip().splitlines()[0] if doc.strip() else "",
        doc=doc,
    )


def op(
    *,
    samples: Callable[[SampleSize, torch.Generator], Iterator[Sample]] | None = None,
    tolerance: Tolerance = Tolerance(),
    determinism: Determinism = Determinism.ROW_INVARIANT,
    mutates: tuple[str, ...] = (),
    activations: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a small operation; the decorated plain-PyTorch function is its reference."""

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        _declare(
            function,
            is_composite=False,
            uses=(),
            samples=samples,
            tolerance=tolerance,
            determinism=determinism,
            mutates=mutates,
            activations=activations,
            aliases=aliases,
        )
        return function

    return declare


def composite(
    *,
    uses: tuple[str, ...],
    samples: Callable[[SampleSize, torch.Generator], Iterator[Sample]] | None = None,
    tolerance: Tolerance = Tolerance(),
    determinism: Determinism = Determinism.ROW_INVARIANT,
    mutates: tuple[str, ...] = (),
    activations: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
) -> Callable[[Callable[[Any], Callable[..., Any]]], Callable[[Any], Callable[..., Any]]]:
    """Declare a large operation; the decorated function takes a kernel table and returns the reference.

    The inner function must be built once and hold the finer ops in local variables, so that a call costs no look-up.
    """

    def declare(function: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Callable[..., Any]]:
        _declare(
            function,
            is_composite=True,
            uses=uses,
            samples=samples,
            tolerance=tolerance,
            determinism=determinism,
            mutates=mutates,
            activations=activations,
            aliases=aliases,
        )
        return function

    return declare


def contracts_by_family() -> Mapping[str, list[OpContract]]:
    """Contracts grouped by family, in order of declaration."""
    families: dict[str, list[OpContract]] = {}
    for contract in CONTRACTS.values():
        families.setdefault(contract.family, []).append(contract)
    return families

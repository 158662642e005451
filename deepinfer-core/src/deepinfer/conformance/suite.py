"""All checks of one backend, by operation and size."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import cached_property

import torch

from deepinfer.api.backend import Backend, Numerics
from deepinfer.api.ops import Determinism, OpContract, Sample, SampleSize
from deepinfer.backend.kernels import all_contracts
from deepinfer.conformance.checks import (
    check_poison,
    check_repeat,
    check_rows,
    check_side_effects,
    check_values,
)
from deepinfer.conformance.compare import ConformanceFailure
from deepinfer.conformance.rows import units
from deepinfer.conformance.targets import ExactTable, Target
from deepinfer.cpu.backend import create_backend as create_reference_backend

__all__ = ["CHECKS", "Suite"]

CHECKS = ("values", "side_effects", "poison", "repeat", "rows")
"""Names of the checks."""

MANY_ROWS = 33
"""A sample of an op with this many rows is tried at every row count."""


class Suite:
    """Contract tests of one backend.

    Args:
        backend: the backend under test.
        device: index of its device.
        seed: of all sample data; the same seed gives the same calls.
    """

    def __init__(self, backend: Backend, device: int = 0, seed: int = 0) -> None:
        self.contracts = dict(all_contracts())
        self.backend, self.device, self.seed = backend, device, seed
        self.capabilities = backend.capabilities(device)
        names = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        self.dtypes = [dtype for name, dtype in names.items() if name in self.capabilities.compute_dtypes]
        self._targets: dict[tuple[torch.dtype, bool], Target] = {}
        self._references: dict[torch.dtype, Target] = {}

    @cached_property
    def exact(self) -> ExactTable:
        """The float64 table."""
        return ExactTable(self.contracts)

    def target(self, dtype: torch.dtype, batch_invariant: bool) -> Target:
        """The backend's kernels for a compute dtype, with or without row-invariant mode."""
        key = (dtype, batch_invariant)
        if key not in self._targets:
            numerics = Numerics(compute_dtype=dtype, batch_invariant=batch_invariant)
            self._targets[key] = Target(self.contracts, self.backend, numerics, self.device)
        return self._targets[key]

    def reference(self, dtype: torch.dtype) -> Target:
        """Plain PyTorch references on the CPU."""
        if dtype not in self._references:
            numerics = Numerics(compute_dtype=dtype)
            reference = create_reference_backend()
            self._references[dtype] = Target(self.contracts, reference, numerics, overrides="*=reference")
        return self._references[dtype]

    def samples(self, op: str, size: SampleSize) -> Iterator[Sample]:
        """Sample calls of an op, always the same for one seed."""
        contract = self.contracts[op]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{op}/{size}".encode()))
        if contract.samples is not None:
            yield from contract.samples(size, generator)

    def dtypes_of(self, contract: OpContract) -> list[torch.dtype]:
        """Compute dtypes that make a difference for an op."""
        return self.dtypes if contract.activations else self.dtypes[:1]

    def check(self, op: str, size: SampleSize, check: str | None = None) -> int:
        """Run one check (all if None) on every sample and numerics; returns the number of calls that were judged.

        Raises:
            ConformanceFailure: names operation, sample, numerics and difference; all of them.
        """
        failures: list[str] = []
        judged = 0
        for name in CHECKS if check is None else (check,):
            for label, found in getattr(self, f"_{name}")(op, size):
                judged += 1
                if found:
                    failures.append(f"{op} [{size}, sample {label}, seed {self.seed}] {name}: {found}")
        if failures:
            raise ConformanceFailure("\n".join(failures[:20]))
        return judged

    def _each(
        self, op: str, size: SampleSize, body: Callable[[Target, Sample], str | None], modes: tuple[bool, ...]
    ) -> Iterator[tuple[str, str | None]]:
        contract = self.contracts[op]
        for sample in self.samples(op, size):
            for dtype in self.dtypes_of(contract):
                for mode in modes:
                    target = self.target(dtype, mode)
                    if mode and False in modes and target.function(op) is self.target(dtype, False).function(op):
                        continue
                    if target.bindings[op].kind == "refused":
                        continue
                    name = str(dtype).removeprefix("torch.") + (", row-invariant mode" if mode else "")
                    yield f"{sample.label!r}, {name}", body(target, sample)

    @cached_property
    def _modes(self) -> tuple[bool, ...]:
        """Row-invariant mode is tried on its own only where the backend brings other kernels for it."""
        if not self.capabilities.row_invariant:
            return (False,)
        kernels = [self.target(dtype, mode).kernel_functions for dtype in self.dtypes for mode in (False, True)]
        return (False,) if all(kernels[i] == kernels[i + 1] for i in range(0, len(kernels), 2)) else (False, True)

    def _values(self, op: str, size: SampleSize) -> Iterator[tuple[str, str | None]]:
        contract = self.contracts[op]

        def body(target: Target, sample: Sample) -> str | None:
            return check_values(target, self.reference(target.numerics.compute_dtype), self.exact, contract, sample)

        yield from self._each(op, size, body, self._modes)

    def _side_effects(self, op: str, size: SampleSize) -> Iterator[tuple[str, str | None]]:
        contract = self.contracts[op]

        def body(target: Target, sample: Sample) -> str | None:
            return check_side_effects(target, self.reference(target.numerics.compute_dtype), contract, sample)

        yield from self._each(op, size, body, self._modes)

    def _poison(self, op: str, size: SampleSize) -> Iterator[tuple[str, str | None]]:
        contract = self.contracts[op]
        for sample in self.samples(op, size):
            if sample.unread:
                for dtype in self.dtypes_of(contract):
                    label = f"{sample.label!r}, {str(dtype).removeprefix('torch.')}"
                    yield label, check_poison(self.target(dtype, False), contract, sample)

    def _repeat(self, op: str, size: SampleSize) -> Iterator[tuple[str, str | None]]:
        contract = self.contracts[op]
        yield from self._each(op, size, lambda target, sample: check_repeat(target, contract, sample), (False,))

    def _rows(self, op: str, size: SampleSize) -> Iterator[tuple[str, str | None]]:
        contract = self.contracts[op]
        if not self.capabilities.row_invariant and contract.determinism is not Determinism.EXACT:
            return
        mode = self.capabilities.row_invariant
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{op}/{size}/rows".encode()))
        tried: set[torch.dtype] = set()

        def body(target: Target, sample: Sample) -> str | None:
            dtype = target.numerics.compute_dtype
            thorough = dtype not in tried and len(units(sample)) >= MANY_ROWS
            tried.update({dtype} if thorough else set())
            return check_rows(target, contract, sample, generator, thorough)

        yield from self._each(op, size, body, (mode,))

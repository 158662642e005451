"""How each op of a kernel table is decided: sources, policy, row-invariance, composition in dependency order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from deepinfer.backend.backend import Backend, Kernel
from deepinfer.backend.capabilities import ALL_OPS, Capabilities
from deepinfer.backend.numerics import Numerics
from deepinfer.backend.overrides import FIELD, SOURCES, OpOverrides, nearest
from deepinfer.backend.signatures import signature_difference
from deepinfer.errors import CapabilityError, ConfigError, DeepInferError, PluginError
from deepinfer.ops.contract import Determinism, OpContract

__all__ = ["Binder", "Binding", "BindingKind", "dependency_order"]

BindingKind = Literal["native", "composite", "reference", "refused"]

_STRENGTH = {Determinism.EXACT: 3, Determinism.ROW_INVARIANT: 2, Determinism.RUN_TO_RUN: 1, Determinism.NONE: 0}


@dataclass(frozen=True)
class Binding:
    """What one op is bound to and why.

    Attributes:
        op: name of the op.
        kind: `native` kernel, `composite` of finer ops of the same table, plain-PyTorch `reference`, or `refused`
            (nothing that row-invariant mode admits; calling it raises, and nothing that the graph reaches is refused).
        backend: name of the backend whose kernel it is; empty for a reference.
        determinism: what the bound function promises; a composite promises what its weakest part does.
        reachable: whether the graph can come here, directly or through composites.
        reasons: why not the first choice, and overrides that applied.
        note: the kernel's own remark.
    """

    op: str
    kind: BindingKind
    backend: str
    determinism: Determinism
    reachable: bool = False
    reasons: tuple[str, ...] = ()
    note: str = ""


class _FinerOps:
    """What a composite sees while it is built: the finer ops that it declared, and the numerics."""

    def __init__(self, contract: OpContract, functions: Mapping[str, Callable[..., Any]], numerics: Numerics) -> None:
        self._contract = contract
        self._functions = functions
        self.numerics = numerics

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self._contract.uses:
            raise PluginError(f"operation {self._contract.name!r} reads {name!r}, which its `uses` does not declare")
        return self._functions[name]


class Binder:
    """Binds all ops of a table, finer ops before the large ops that use them."""

    def __init__(
        self,
        contracts: Mapping[str, OpContract],
        backend: Backend,
        capabilities: Capabilities,
        numerics: Numerics,
        overrides: OpOverrides,
        resolve: Callable[[str], Backend] | None = None,
    ) -> None:
        self.contracts = contracts
        self.functions: dict[str, Callable[..., Any]] = {}
        self.bindings: dict[str, Binding] = {}
        self.kernels: dict[str, Kernel] = {}
        self._backend = backend
        self._capabilities = capabilities
        self._numerics = numerics
        self._overrides = overrides
        self._resolve = resolve
        self._own = self._kernels_of(backend)
        self._foreign: dict[str, Mapping[str, Kernel]] = {}

    @property
    def registered(self) -> set[str]:
        """Ops for which the backend brings a kernel."""
        return set(self._own)

    def bind_all(self) -> None:
        """Fill `functions` and `bindings`.

        Raises:
            PluginError: cyclic or undeclared composition, or a kernel whose parameters differ from its contract.
            ConfigError: an override that cannot be followed.
        """
        for op in dependency_order(self.contracts):
            contract = self.contracts[op]
            composed = contract.compose(self._finer(contract)) if contract.compose else None
            standard = contract.reference or composed
            if standard is None:
                raise PluginError(f"operation {op!r} has neither a reference nor a composition")
            self._check_signature(self._backend.name, self._own.get(op), contract, standard)
            self._bind(contract, standard)

    def _finer(self, contract: OpContract) -> _FinerOps:
        return _FinerOps(contract, self.functions, self._numerics)

    def _bind(self, contract: OpContract, standard: Callable[..., Any]) -> None:
        op = contract.name
        source, is_named = self._overrides.source_of(op), op in self._overrides.named
        reasons = [f"override {op if is_named else '*'}={source}"] if source else []
        if source == "composite" and not contract.compose:
            if is_named:
                raise ConfigError(f"{op}=composite: {op!r} is not made of finer operations", field=FIELD)
            source = None
        if source not in ("reference", "composite"):
            owner, kernels = self._provider(source, op)
            kernel = kernels.get(op)
            if kernel is None and source is not None and is_named:
                raise ConfigError(f"{op}={source}: backend {owner!r} has no kernel for {op!r}", field=FIELD)
            if kernel is None and owner != self._backend.name:
                owner, kernel = self._backend.name, self._own.get(op)
            if kernel is not None and self._admits(kernel.determinism):
                if owner != self._backend.name:
                    self._check_signature(owner, kernel, contract, standard)
                self._enter(contract, "native", owner, kernel.determinism, kernel.function, reasons, kernel)
                return
            if kernel is not None:
                reasons.append(f"the kernel of {owner!r} promises {kernel.determinism} only")
            elif not self._capabilities.references_intended:
                reasons.append(f"backend {owner!r} has no kernel")
            if kernel is not None and source is not None and is_named:
                self._refuse(contract, reasons)
                return
        self._bind_standard(contract, standard, reasons)

    def _bind_standard(self, contract: OpContract, standard: Callable[..., Any], reasons: list[str]) -> None:
        """Bind the composition of finer ops, or the plain-PyTorch reference."""
        if contract.compose:
            parts = [self.bindings[name] for name in contract.uses]
            if any(part.kind == "refused" for part in parts):
                weak = ", ".join(part.op for part in parts if part.kind == "refused")
                self._refuse(contract, [*reasons, f"its finer operations are refused: {weak}"])
                return
            promises = [self._own_determinism(contract), *(part.determinism for part in parts)]
            weakest = min(promises, key=_STRENGTH.__getitem__)
            if self._admits(weakest):
                self._enter(contract, "composite", self._backend.name, weakest, standard, reasons)
            else:
                self._refuse(contract, [*reasons, "its composition is not known to be row-invariant on this device"])
            return
        determinism = self._own_determinism(contract)
        if self._admits(determinism):
            self._enter(contract, "reference", "", determinism, standard, reasons)
        else:
            self._refuse(contract, [*reasons, "its reference is not known to be row-invariant on this device"])

    def _own_determinism(self, contract: OpContract) -> Determinism:
        """What a reference, or the part of a composition that it computes itself, promises on this device."""
        if contract.determinism is Determinism.EXACT:
            return Determinism.EXACT
        known = self._capabilities.row_invariant_references
        if contract.name in known or (contract.determinism is Determinism.ROW_INVARIANT and ALL_OPS in known):
            return Determinism.ROW_INVARIANT
        return min(contract.determinism, Determinism.RUN_TO_RUN, key=_STRENGTH.__getitem__)

    def _admits(self, determinism: Determinism) -> bool:
        return not self._numerics.batch_invariant or _STRENGTH[determinism] >= _STRENGTH[Determinism.ROW_INVARIANT]

    def _enter(
        self,
        contract: OpContract,
        kind: BindingKind,
        backend: str,
        determinism: Determinism,
        function: Callable[..., Any],
        reasons: Iterable[str],
        kernel: Kernel | None = None,
    ) -> None:
        self.functions[contract.name] = function
        note = kernel.note if kernel else ""
        self.bindings[contract.name] = Binding(
            contract.name, kind, backend, determinism, reasons=tuple(reasons), note=note
        )
        if kernel:
            self.kernels[contract.name] = kernel

    def _refuse(self, contract: OpContract, reasons: Iterable[str]) -> None:
        text = f"operation {contract.name!r} is refused in row-invariant mode: {'; '.join(reasons)}"

        def refused(*args: Any, **kwargs: Any) -> NoReturn:
            raise CapabilityError(text)

        self._enter(contract, "refused", self._backend.name, Determinism.NONE, refused, reasons)

    def _provider(self, source: str | None, op: str) -> tuple[str, Mapping[str, Kernel]]:
        """Name and kernels of the backend that a source means."""
        if source is None or source in SOURCES or source == self._backend.name:
            return self._backend.name, self._own
        if source not in self._foreign:
            self._foreign[source] = self._load_foreign(source, op)
        return source, self._foreign[source]

    def _load_foreign(self, source: str, op: str) -> Mapping[str, Kernel]:
        """Kernels of another installed backend; its tensors must live on the same kind of device."""
        try:
            if self._resolve is None:
                raise KeyError(source)
            other = self._resolve(source)
        except KeyError:
            raise ConfigError(
                f"{op}={source}: {source!r} is neither one of {', '.join(SOURCES)} nor an installed backend",
                field=FIELD,
            ) from None
        device_type = other.capabilities().device_type
        if device_type != self._capabilities.device_type:
            raise ConfigError(
                f"{op}={source}: kernels of {source!r} work on {device_type!r} tensors, "
                f"the model is on {self._capabilities.device_type!r}",
                field=FIELD,
            )
        return self._kernels_of(other)

    def _kernels_of(self, backend: Backend) -> dict[str, Kernel]:
        try:
            kernels = dict(backend.kernels(self._numerics))
        except DeepInferError:
            raise
        except Exception as error:
            raise PluginError(f"backend {backend.name!r}: kernels() raised {type(error).__name__}: {error}") from error
        for op, kernel in kernels.items():
            if op not in self.contracts:
                raise PluginError(
                    f"backend {backend.name!r} registers a kernel for {op!r}, which is no operation"
                    f"{nearest(op, self.contracts)}"
                )
            if not isinstance(kernel, Kernel):
                raise PluginError(f"backend {backend.name!r}: {op!r} must be a Kernel, found {type(kernel).__name__}")
        return kernels

    def _check_signature(
        self, owner: str, kernel: Kernel | None, contract: OpContract, standard: Callable[..., Any]
    ) -> None:
        difference = kernel and signature_difference(kernel.function, standard)
        if difference:
            raise PluginError(
                f"kernel {contract.name!r} of backend {owner!r} does not match its contract: {difference}"
            )

    # Which ops the graph can come to.

    def mark_reachable(self, roots: Iterable[str] | None) -> set[str]:
        """Set `reachable` on the bindings that `roots` lead to; returns the ops that any binding could lead to."""
        used = {name for contract in self.contracts.values() for name in contract.uses}
        starts = list(roots) if roots is not None else [op for op in self.contracts if op not in used]
        for op in starts:
            if op not in self.contracts:
                raise PluginError(f"the model asks for {op!r}, which is no operation{nearest(op, self.contracts)}")
        composed = {op for op, binding in self.bindings.items() if binding.kind == "composite"}
        refused = {op for op, binding in self.bindings.items() if binding.kind == "refused"}
        for op in self._closure(starts, composed | refused):
            self.bindings[op] = replace(self.bindings[op], reachable=True)
        return self._closure(starts, set(self.contracts))

    def _closure(self, starts: Iterable[str], opened: set[str]) -> set[str]:
        """Ops that can be reached when the large ops in `opened` are looked into."""
        reached: set[str] = set()
        pending = list(starts)
        while pending:
            op = pending.pop()
            if op not in reached:
                reached.add(op)
                pending += self.contracts[op].uses if op in opened else ()
        return reached


def dependency_order(contracts: Mapping[str, OpContract]) -> list[str]:
    """Op names, finer ops before the large ops that use them.

    Raises:
        PluginError: a composite uses an op that does not exist, or ops use each other in a circle.
    """
    order: list[str] = []
    done: set[str] = set()

    def visit(op: str, path: tuple[str, ...]) -> None:
        if op in path:
            raise PluginError("operations use each other in a circle: " + " -> ".join([*path[path.index(op) :], op]))
        if op in done:
            return
        for finer in contracts[op].uses:
            if finer not in contracts:
                raise PluginError(f"operation {op!r} uses {finer!r}, which is no operation{nearest(finer, contracts)}")
            visit(finer, (*path, op))
        done.add(op)
        order.append(op)

    for op in contracts:
        visit(op, ())
    return order

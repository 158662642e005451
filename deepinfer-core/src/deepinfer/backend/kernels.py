"""The kernel table: every op bound once to a plain function, native, composed of finer ops, or reference."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from deepinfer.backend.backend import Backend, StepLimits
from deepinfer.backend.binder import Binder, Binding
from deepinfer.backend.capabilities import Capabilities
from deepinfer.backend.numerics import Numerics
from deepinfer.backend.overrides import OpOverrides, nearest, parse_overrides
from deepinfer.errors import CapabilityError
from deepinfer.ops.contract import CONTRACTS, OpContract

__all__ = ["ENGINE_OPS", "Binding", "FallbackPolicy", "KernelTable", "all_contracts", "check_numerics"]

FallbackPolicy = Literal["allow", "warn", "error"]

ENGINE_OPS = (
    "add_bias",
    "apply_filters",
    "apply_penalties",
    "apply_token_mask",
    "commit_step",
    "copy_blocks",
    "count_tokens",
    "draft_step",
    "expand_plan",
    "forbid_tokens",
    "force_tokens",
    "judge_step",
    "sample_step",
    "token_logprobs",
    "verify_coupled",
)
"""Ops that the engine asks for, beside those of a model's graph."""

_logger = logging.getLogger("deepinfer")


def all_contracts() -> Mapping[str, OpContract]:
    """Every contract by op name; imports the whole room `ops`."""
    import deepinfer.ops

    for module in pkgutil.iter_modules(deepinfer.ops.__path__):
        importlib.import_module(f"deepinfer.ops.{module.name}")
    return CONTRACTS


def check_numerics(backend: Backend, capabilities: Capabilities, numerics: Numerics) -> None:
    """Refuse numerics that a device cannot honour.

    Raises:
        CapabilityError: compute dtype, or row-invariance, that the backend does not offer.
    """
    dtype = str(numerics.compute_dtype).removeprefix("torch.")
    if dtype not in capabilities.compute_dtypes:
        raise CapabilityError(
            f"backend {backend.name!r} cannot compute in {dtype}; DEEPINFER_COMPUTE_DTYPE may be "
            f"{' or '.join(capabilities.compute_dtypes)} there"
        )
    if numerics.batch_invariant and not capabilities.row_invariant:
        raise CapabilityError(
            f"backend {backend.name!r} does not promise that a row's bits are independent of its neighbours; "
            f"unset DEEPINFER_BATCH_INVARIANT or choose another accelerator"
        )


class KernelTable:
    """Ops as attributes: `table.rms_norm(x, ...)` is one look-up in the instance and one call, nothing in between.

    Made by `bind` and immutable from then on. The other members are `numerics`, `capabilities`, `backend_name`,
    `bindings()`, `unreachable()` and `workspace_bytes()`; no op may be named like one of them.
    """

    numerics: Numerics
    capabilities: Capabilities
    backend_name: str

    @classmethod
    def bind(
        cls,
        contracts: Mapping[str, OpContract],
        backend: Backend,
        numerics: Numerics,
        *,
        fallback: FallbackPolicy = "warn",
        overrides: str = "",
        resolve: Callable[[str], Backend] | None = None,
        roots: Iterable[str] | None = None,
        device: int = 0,
    ) -> KernelTable:
        """Bind every contract once.

        Args:
            contracts: all op contracts by name (`all_contracts()`).
            backend: the selected backend.
            numerics: what is rounded where; `batch_invariant` admits only exact or row-invariant functions.
            fallback: `allow`, `warn` about or refuse (`error`) ops that run their plain-PyTorch reference although
                the backend is meant to bring kernels. What an override asks for is no fallback.
            overrides: text of `DEEPINFER_OPS`.
            resolve: gives another installed backend by name (KeyError if there is none) for `op=<backend name>`.
            roots: ops that the graph asks for; None takes every op that no large op uses.
            device: index of the device whose capabilities count.

        Raises:
            CapabilityError: numerics that the backend cannot honour; ops without a row-invariant function, or without
                a kernel under `fallback="error"`: all of them are named.
            ConfigError: malformed overrides, unknown ops in them, or overrides that cannot be followed.
            PluginError: the backend registers unknown ops or kernels with other parameters than their contract.
        """
        capabilities = backend.capabilities(device)
        check_numerics(backend, capabilities, numerics)
        parsed = parse_overrides(overrides, contracts)
        binder = Binder(contracts, backend, capabilities, numerics, parsed, resolve)
        binder.bind_all()
        possible = binder.mark_reachable(roots)
        _warn_unreached(binder.bindings, parsed)
        _refuse_missing(backend, binder.bindings)
        if not capabilities.references_intended:
            _apply_policy(backend, binder.bindings, fallback)
        return cls._build(binder, backend.name, capabilities, numerics, sorted(binder.registered - possible))

    @classmethod
    def _build(
        cls, binder: Binder, backend: str, capabilities: Capabilities, numerics: Numerics, unreachable: list[str]
    ) -> KernelTable:
        table = cls()
        members = {"numerics": numerics, "capabilities": capabilities, "backend_name": backend}
        private = {"_bindings": tuple(binder.bindings.values()), "_unreachable": tuple(unreachable)}
        workspaces = [kernel.workspace for kernel in binder.kernels.values() if kernel.workspace]
        for op in binder.functions:
            if op in members or hasattr(cls, op):
                raise ValueError(f"operation {op!r} is named like a member of the kernel table")
        vars(table).update(members, **private, _workspaces=tuple(workspaces), **binder.functions)
        return table

    def bindings(self) -> list[Binding]:
        """What each op is bound to, finer ops first."""
        return list(vars(self)["_bindings"])

    def unreachable(self) -> list[str]:
        """Ops for which the backend brings a kernel that no graph can ever come to; a fault of the backend."""
        return list(vars(self)["_unreachable"])

    def workspace_bytes(self, limits: StepLimits) -> int:
        """Bytes of the scratch buffer that all bound kernels share: the largest request of one kernel."""
        return max((workspace(limits) for workspace in vars(self)["_workspaces"]), default=0)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Reached only for a name that is not in the instance: bound ops never come here.
        raise AttributeError(f"there is no operation {name!r}{nearest(name, list(vars(self)))}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a kernel table is immutable; cannot set {name!r}, use DEEPINFER_OPS to choose a source")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a kernel table is immutable; cannot delete {name!r}")

    def __repr__(self) -> str:
        kinds = [binding.kind for binding in self.bindings()]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        return f"KernelTable({self.backend_name!r}: {counts})"


def _warn_unreached(bindings: Mapping[str, Binding], overrides: OpOverrides) -> None:
    """Say so when an override has no effect because the large ops around it are native."""
    idle = [op for op in overrides.named if not bindings[op].reachable]
    if idle:
        _logger.warning(
            "DEEPINFER_OPS: nothing calls %s, for the large operations around it are native; set them to `composite`",
            ", ".join(idle),
        )


def _refuse_missing(backend: Backend, bindings: Mapping[str, Binding]) -> None:
    missing = [binding for binding in bindings.values() if binding.kind == "refused" and binding.reachable]
    if missing:
        lines = "".join(f"\n  - {binding.op}: {'; '.join(binding.reasons)}" for binding in missing)
        raise CapabilityError(
            f"backend {backend.name!r} has no row-invariant function for {len(missing)} operations, but "
            f"DEEPINFER_BATCH_INVARIANT=1 asks for it:{lines}"
        )


def _apply_policy(backend: Backend, bindings: Mapping[str, Binding], fallback: FallbackPolicy) -> None:
    """Warn about, or refuse, reachable references that nobody asked for."""
    fallen = [
        binding.op
        for binding in bindings.values()
        if binding.kind == "reference"
        and binding.reachable
        and not any(reason.endswith("=reference") for reason in binding.reasons)
    ]
    if not fallen or fallback == "allow":
        return
    text = f"backend {backend.name!r} has no kernel for {', '.join(fallen)}"
    if fallback == "error":
        raise CapabilityError(f"{text}; DEEPINFER_FALLBACK=error forbids their plain PyTorch reference")
    _logger.warning("%s; their plain PyTorch reference runs (DEEPINFER_FALLBACK=allow silences this)", text)

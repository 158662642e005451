"""Facts that several commands show: plugins, backends, bindings, numerics id. Torch is imported only where needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepinfer.errors import DeepInferError, PluginError
from deepinfer.plugins.host import PluginHost
from deepinfer.plugins.selection import KNOWN_DISTRIBUTIONS, select_accelerator
from deepinfer.settings import Settings

if TYPE_CHECKING:
    from deepinfer.backend.backend import Backend
    from deepinfer.backend.kernels import KernelTable
    from deepinfer.backend.runtime import DeviceRuntime

__all__ = ["OpenBackend", "backend_rows", "binding_rows", "choice", "open_backend", "plugin_rows"]


@dataclass(frozen=True)
class OpenBackend:
    """A backend with its table bound under the current settings."""

    backend: Backend
    runtime: DeviceRuntime
    table: KernelTable
    numerics_id: str


def backend_rows(host: PluginHost) -> list[dict[str, Any]]:
    """One row per registered backend and per name that two distributions offer."""
    rows = []
    for entry in host.backends:
        probe = host.probe(entry.descriptor.name)
        rows.append(
            {
                "name": entry.descriptor.name,
                "status": probe.status,
                "devices": probe.devices,
                "distribution": entry.origin.distribution,
                "version": entry.origin.version,
                "summary": entry.descriptor.summary,
                "hardware_present": probe.hardware_present,
                "reasons": list(probe.reasons),
            }
        )
    for name, origins in host.backends.conflicts().items():
        rows.append({"name": name, "status": "conflict", "reasons": [host.backends.conflict(name)]})
        rows[-1] |= {"distribution": ", ".join(o.distribution for o in origins)}
        rows[-1] |= {"version": ", ".join(o.version for o in origins)}
    return rows


def plugin_rows(host: PluginHost) -> list[dict[str, Any]]:
    """One row per entry point, failures with their error and traceback."""
    return [
        {
            "name": record.origin.entry_point,
            "status": record.status,
            "distribution": record.origin.distribution,
            "version": record.origin.version,
            "module": record.origin.module,
            "hooks": list(record.hooks),
            "error": record.error,
            "traceback": record.traceback,
        }
        for record in host.records
    ]


def choice(host: PluginHost, settings: Settings) -> dict[str, Any]:
    """Which backend would run under the current settings, or why none."""
    try:
        selection = select_accelerator(host, settings.accelerator)
    except DeepInferError as error:
        return {"asked": settings.accelerator, "selected": None, "error": str(error), "notices": []}
    return {
        "asked": settings.accelerator,
        "selected": selection.name,
        "because": selection.because,
        "notices": list(selection.notices),
    }


def open_backend(host: PluginHost, name: str, settings: Settings) -> OpenBackend:
    """Import a backend, take its first device and bind its table.

    Raises:
        PluginError: no such backend, or a broken one.
        CapabilityError, ConfigError: the settings cannot be followed.
    """
    require_backend(host, name)
    from deepinfer.backend.identity import numerics_id
    from deepinfer.backend.kernels import KernelTable, all_contracts

    backend = host.load_backend(name)
    runtime = backend.runtime()
    table = KernelTable.bind(
        all_contracts(),
        backend,
        settings.numerics(),
        fallback=settings.fallback,
        overrides=settings.ops,
        resolve=host.load_backend,
        roots=graph_ops(host),
    )
    return OpenBackend(backend, runtime, table, numerics_id(backend, runtime, table))


def require_backend(host: PluginHost, name: str) -> None:
    """Raise a PluginError that lists the installed names if there is no such backend."""
    if host.backends.get(name) is None:
        advice = f"; to install it: pip install {KNOWN_DISTRIBUTIONS[name]}" if name in KNOWN_DISTRIBUTIONS else ""
        clash = host.backends.conflict(name)
        raise PluginError(
            clash or f"there is no backend {name!r}; installed: {', '.join(host.backends.names()) or 'none'}{advice}"
        )


def graph_ops(host: PluginHost) -> list[str] | None:
    """Ops that the engine and the installed model graphs ask for; None if a model does not declare its ops."""
    from deepinfer.backend.kernels import ENGINE_OPS

    declared = [entry.descriptor.ops for entry in host.models]
    return sorted({*ENGINE_OPS, *(op for ops in declared for op in ops)}) if declared and all(declared) else None


def binding_rows(table: KernelTable) -> list[dict[str, Any]]:
    """One row per op of a table."""
    return [
        {
            "op": binding.op,
            "kind": binding.kind,
            "backend": binding.backend,
            "determinism": str(binding.determinism),
            "reachable": binding.reachable,
            "reasons": list(binding.reasons),
            "note": binding.note,
        }
        for binding in table.bindings()
    ]

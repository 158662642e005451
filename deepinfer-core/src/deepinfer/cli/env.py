"""`deepinfer env`: everything that a bug report should say."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from typing import Any

import typer

from deepinfer import __version__
from deepinfer.cli.reports import backend_rows, choice, open_backend, plugin_rows
from deepinfer.errors import DeepInferError
from deepinfer.plugins.host import PluginHost, default_host
from deepinfer.plugins.registry import Registry
from deepinfer.settings import PREFIX, Settings, load_settings

__all__ = ["collect", "env"]

REPORTED_DISTRIBUTIONS = (
    "torch",
    "numpy",
    "pluggy",
    "pydantic",
    "pydantic-settings",
    "safetensors",
    "huggingface_hub",
    "typer",
    "rich",
    "msgspec",
    "tokenizers",
    "deepseek-recipe",
)


def env(as_json: bool = typer.Option(False, "--json", help="Print JSON instead of text.")) -> None:
    """Print versions, machine, plugins, settings, numerics id and process-wide torch settings."""
    report = collect()
    if as_json:
        typer.echo(json.dumps(report, indent=2, default=str))
        return
    for section, values in report.items():
        typer.echo(f"{section}:")
        for name, value in values.items():
            typer.echo(f"  {name}: {value}")


def collect() -> dict[str, dict[str, Any]]:
    """The report as plain values by section."""
    host, settings = default_host(), load_settings()
    chosen = choice(host, settings)
    report: dict[str, dict[str, Any]] = {
        "versions": {"deepinfer": __version__, "python": platform.python_version(), **_distributions()},
        "machine": {"platform": platform.platform(), "machine": platform.machine(), "processors": os.cpu_count()},
        "plugins": {row["name"]: _plugin_text(row) for row in plugin_rows(host)},
        "backends": {row["name"]: "; ".join([row["status"], *row["reasons"]]) for row in backend_rows(host)},
        "registered": _registered(host),
        "settings": {PREFIX + name.upper(): getattr(settings, name) for name in Settings.model_fields},
        "selection": {key: value for key, value in chosen.items() if value},
    }
    if chosen["selected"]:
        report["numerics"] = _numerics(chosen["selected"], settings)
    from deepinfer.backend.process import applied_settings, current_settings

    report["process-wide torch settings"] = current_settings() | {
        f"{name} (applied by {owner})": value for name, (value, owner) in applied_settings().items()
    }
    return report


def _numerics(name: str, settings: Settings) -> dict[str, Any]:
    """Numerics id and what it is made of, or why there is none."""
    from deepinfer.backend.identity import numerics_parts

    try:
        opened = open_backend(default_host(), name, settings)
    except DeepInferError as error:
        return {"error": str(error)}
    parts = numerics_parts(opened.backend, opened.runtime, opened.table)
    return {"numerics id": opened.numerics_id, **parts, **opened.backend.environment()}


def _registered(host: PluginHost) -> dict[str, str]:
    """Names beside the backends that plugins offer, by kind."""
    registries: dict[str, Registry[Any]] = {
        "models": host.models,
        "codecs": host.codecs,
        "KV stores": host.kv_stores,
        "observers": host.observers,
    }
    return {
        kind: ", ".join(f"{entry.descriptor.name} ({entry.origin})" for entry in registry) or "none"
        for kind, registry in registries.items()
    }


def _distributions() -> dict[str, str]:
    found = {}
    for name in REPORTED_DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _plugin_text(row: dict[str, Any]) -> str:
    text = f"{row['status']}, {row['distribution']} {row['version']}"
    return f"{text}: {row['error']}" if row["error"] else text

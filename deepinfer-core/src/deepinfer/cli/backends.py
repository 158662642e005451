"""`deepinfer backends`: what is installed, what each can do, and which kernels it brings."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepinfer.cli.reports import backend_rows, binding_rows, choice, open_backend, plugin_rows, require_backend
from deepinfer.plugins.host import default_host
from deepinfer.settings import load_settings

__all__ = ["app"]

app = typer.Typer(help="Installed backends, their abilities and their kernels.", pretty_exceptions_enable=False)

JSON_OPTION = typer.Option(False, "--json", help="Print JSON instead of a table.")

_COLOURS = {"match": "green", "no_match": "yellow", "loaded": "green", "left out": "yellow"}


@app.callback(invoke_without_command=True)
def default(context: typer.Context) -> None:
    """Installed backends, their abilities and their kernels."""
    if context.invoked_subcommand is None:
        list_backends(as_json=False)


@app.command("list")
def list_backends(as_json: bool = JSON_OPTION) -> None:
    """List backends and plugins, failed ones included, and say which backend would run."""
    host = default_host()
    settings = load_settings()
    backends, plugins, chosen = backend_rows(host), plugin_rows(host), choice(host, settings)
    if as_json:
        typer.echo(json.dumps({"backends": backends, "plugins": plugins, "selection": chosen}, indent=2))
        return
    console = Console(soft_wrap=True)
    selected = chosen["selected"]
    rows = [[row["name"] + (" *" if row["name"] == selected else ""), *_state_cells(row)] for row in backends]
    console.print(_table("Backends", ["name", "status", "distribution", "version", "remarks"], rows))
    unused = [
        [row["name"], *_state_cells(row | {"reasons": [row["error"]]})] for row in plugins if row["status"] != "loaded"
    ]
    if unused:
        console.print(_table("Plugins that are not used", ["name", "status", "distribution", "version", "why"], unused))
    for notice in chosen["notices"]:
        console.print(Text(f"note: {notice}", style="yellow"))
    if selected:
        console.print(f"* would run ({chosen['because']})", markup=False)
    else:
        console.print(Text(chosen["error"], style="red"))


@app.command()
def info(name: str, as_json: bool = JSON_OPTION) -> None:
    """Show one backend: where it comes from, whether it can run here, and its capabilities as data."""
    host = default_host()
    require_backend(host, name)
    entry = host.backends.get(name)
    row = next(row for row in backend_rows(host) if row["name"] == name)
    report: dict[str, Any] = {
        **row,
        "api": list(entry.descriptor.api) if entry else [],
        "module": entry.descriptor.module if entry else "",
        "variables": dict(entry.descriptor.variables) if entry else {},
        "verified_on": list(entry.descriptor.verified_on) if entry else [],
    }
    if row["status"] == "match":
        backend = host.load_backend(name)
        report["capabilities"] = backend.capabilities().describe()
        report["environment"] = backend.environment()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    report["verified_on"] = ", ".join(report["verified_on"]) or "never run on hardware"
    capabilities = report.pop("capabilities", {})
    console = Console(soft_wrap=True)
    console.print(_table(f"Backend {name}", ["field", "value"], [[key, _show(value)] for key, value in report.items()]))
    if capabilities:
        rows = [[key, _show(value)] for key, value in capabilities.items()]
        console.print(_table("Capabilities", ["field", "value"], rows))


@app.command()
def ops(name: str, as_json: bool = JSON_OPTION) -> None:
    """Show what every op is bound to with this backend under the current settings."""
    opened = open_backend(default_host(), name, load_settings())
    rows, unreachable = binding_rows(opened.table), opened.table.unreachable()
    report = {
        "backend": name,
        "numerics": opened.table.numerics.describe(),
        "numerics_id": opened.numerics_id,
        "ops": rows,
        "unreachable": unreachable,
    }
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    console = Console(soft_wrap=True)
    columns = ["op", "kind", "backend", "determinism", "remarks"]
    cells = [
        [
            row["op"],
            row["kind"],
            row["backend"],
            row["determinism"],
            "; ".join(filter(None, [row["note"], *row["reasons"]])),
        ]
        for row in rows
    ]
    console.print(_table(f"Operations with {name} ({opened.numerics_id})", columns, cells))
    if unreachable:
        console.print(Text(f"kernels that no graph can reach: {', '.join(unreachable)}", style="red"))


def _state_cells(row: dict[str, Any]) -> list[str]:
    remarks = [reason for reason in row["reasons"] if reason] or [row.get("summary", "")]
    return [row["status"], row["distribution"], row["version"], "; ".join(remarks)]


def _show(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return "\n".join(f"{key}: {text}" for key, text in value.items())
    return str(value)


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*[Text(cell, style=_COLOURS.get(cell, "")) for cell in row])
    return table

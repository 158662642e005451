"""`deepinfer doctor`: look for everything that would go wrong later; exit status 1 if something will."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from deepinfer.cli.reports import choice, open_backend
from deepinfer.errors import DeepInferError
from deepinfer.plugins.host import PluginHost, default_host
from deepinfer.settings import Settings, load_settings, unknown_variables

if TYPE_CHECKING:
    from deepinfer.backend.backend import Check

__all__ = ["doctor", "examine"]

_STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red"}


def doctor(as_json: bool = typer.Option(False, "--json", help="Print JSON instead of text.")) -> None:
    """Check settings, plugins, backends and kernels of this machine."""
    checks = list(examine(default_host()))
    failed = sum(check.status == "failure" for check in checks)
    if as_json:
        rows = [
            {"name": c.name, "status": c.status, "detail": c.detail, "fix": c.fix, "values": dict(c.values)}
            for c in checks
        ]
        typer.echo(json.dumps({"ok": not failed, "checks": rows}, indent=2, default=str))
    else:
        console = Console(soft_wrap=True)
        for check in checks:
            console.print(Text(f"{check.status:8}", style=_STYLES[check.status]), Text(f"{check.name}: {check.detail}"))
            if check.fix and check.status != "ok":
                console.print(Text(f"         fix: {check.fix}"))
        console.print(f"{len(checks)} checks, {failed} failures")
    raise typer.Exit(1 if failed else 0)


def examine(host: PluginHost) -> Iterator[Check]:
    """Every check, in the order in which a fault would be met."""
    from deepinfer.backend.backend import Check

    try:
        settings = load_settings()
    except DeepInferError as error:
        yield Check("settings", "failure", str(error), "correct or unset the variable")
        settings = Settings.model_construct()
    else:
        yield Check("settings", "ok", "every value is allowed")
    for name, hint in unknown_variables(os.environ).items():
        yield Check(f"variable {name}", "warning", f"is not known and has no effect{hint}", "correct or unset it")
    yield from _examine_plugins(host)
    chosen = choice(host, settings)
    if chosen["selected"] is None:
        yield Check("selection", "failure", chosen["error"])
    else:
        yield Check("selection", "ok", f"{chosen['selected']}: {chosen['because']}")
    for entry in host.backends:
        if host.probe(entry.descriptor.name).status == "match":
            yield from _examine_backend(host, entry.descriptor.name, settings)


def _examine_plugins(host: PluginHost) -> Iterator[Check]:
    from deepinfer.backend.backend import Check

    for record in host.records:
        name = f"plugin {record.origin.entry_point}"
        if record.status == "failed":
            fix = (
                f"upgrade or uninstall {record.origin.distribution}, or DEEPINFER_PLUGINS=-{record.origin.entry_point}"
            )
            yield Check(name, "failure", record.error, fix, {"traceback": record.traceback})
        else:
            yield Check(name, "ok", f"{record.status} ({record.origin})")
    for entry in host.backends:
        probe = host.probe(entry.descriptor.name)
        name, reasons = f"probe {entry.descriptor.name}", "; ".join(probe.reasons)
        if probe.status == "error":
            yield Check(
                name, "failure", f"failed: {reasons}", f"report it to {entry.origin}", {"traceback": probe.traceback}
            )
        elif probe.status == "no_match" and probe.hardware_present:
            yield Check(name, "failure", f"hardware is present but cannot be used: {reasons}", "see the reasons")
        else:
            found = f"{probe.devices} device(s)" if probe.status == "match" else f"no hardware: {reasons}"
            yield Check(name, "ok", found)


def _examine_backend(host: PluginHost, name: str, settings: Settings) -> Iterator[Check]:
    """Heavy import, numerics, kernel table and the backend's own checks."""
    from deepinfer.backend.backend import Check

    quiet = settings.model_copy(update={"fallback": "allow"})
    try:
        opened = open_backend(host, name, quiet)
    except DeepInferError as error:
        yield Check(f"backend {name}", "failure", str(error))
        return
    except Exception as error:  # A backend may fail in any way; the other checks still help.
        yield Check(f"backend {name}", "failure", f"{type(error).__name__}: {error}", "report it to its author")
        return
    yield Check(f"backend {name}", "ok", f"{opened.table!r}, numerics id {opened.numerics_id}")
    for op in opened.table.unreachable():
        yield Check(
            f"kernel {op}",
            "failure",
            f"backend {name!r} registers it, but no graph can ever reach it",
            "register the kernel under the name of an op that the graph uses (deepinfer backends ops)",
        )
    bindings = opened.table.bindings()
    fallen = [binding.op for binding in bindings if binding.kind == "reference" and binding.reachable]
    if fallen and not opened.table.capabilities.references_intended:
        yield Check(f"kernels of {name}", "warning", f"plain PyTorch runs for {', '.join(fallen)}")
    yield from opened.backend.doctor()

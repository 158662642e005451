"""`deepinfer bench`: an engine under load, and what speculation brings, as numbers and pictures."""

from __future__ import annotations

import typer

from deepinfer.cli.bench_load import DESCRIPTIONS, bench_load
from deepinfer.cli.bench_spec import bench_spec

__all__ = ["app"]

app = typer.Typer(help="Measure an engine. A first request warms it up and is not counted.", no_args_is_help=True)

for load, description in DESCRIPTIONS.items():
    app.command(load.value, help=description)(bench_load)
app.command("spec")(bench_spec)

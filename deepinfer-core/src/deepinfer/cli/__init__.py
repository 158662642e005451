"""The `deepinfer` command. Only the modules of the command that was asked for are imported."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.text import Text

from deepinfer import __version__
from deepinfer.errors import DeepInferError
from deepinfer.observe.logs import JsonFormatter
from deepinfer.plugins.host import default_host

__all__ = ["COMMANDS", "build_app", "main"]

COMMANDS = {
    "backends": "deepinfer.cli.backends:app",
    "bench": "deepinfer.cli.bench:app",
    "checkpoint": "deepinfer.cli.checkpoint:app",
    "doctor": "deepinfer.cli.doctor:doctor",
    "env": "deepinfer.cli.env:env",
    "generate": "deepinfer.cli.generate:generate",
}
"""Command, and the typer application or the function that serves it."""

EXIT_ERROR = 2
"""Exit status for every error that DeepInfer raises on purpose; `doctor` exits with 1 when it finds a failure."""


def build_app(words: Sequence[str] = ()) -> typer.Typer:
    """The typer application for a command line: the one command that it names, or all of them for help.

    Args:
        words: arguments after the program's name.
    """
    app = typer.Typer(
        name="deepinfer",
        help=f"DeepInfer {__version__}: inference for DeepSeek-V4.1-Flash on any accelerator.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_version_option)
    asked = next((word for word in words if not word.startswith("-")), None)
    for name in [asked] if asked in COMMANDS else COMMANDS:
        module_name, _, attribute = COMMANDS[name].partition(":")
        command = getattr(importlib.import_module(module_name), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    default_host().extend_cli(app)
    return app


def main() -> None:
    """Run the command line; an error of the project is one red message and exit status 2, never a traceback."""
    # A wrong level is reported by the settings; until then the default serves.
    levels = logging.getLevelNamesMapping()
    level = levels.get(os.environ.get("DEEPINFER_LOG_LEVEL", "").upper(), logging.WARNING)
    handler = logging.StreamHandler(sys.stderr)
    structured = os.environ.get("DEEPINFER_LOG_FORMAT", "").strip() == "json"
    handler.setFormatter(JsonFormatter() if structured else logging.Formatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    try:
        build_app(sys.argv[1:])()
    except DeepInferError as error:
        Console(stderr=True, soft_wrap=True).print(Text(f"{type(error).__name__}: {error}", style="bold red"))
        raise SystemExit(EXIT_ERROR) from None


def _version_option(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(f"deepinfer {__version__}")
        raise typer.Exit

"""`deepinfer checkpoint`: make synthetic checkpoints, look into any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

    from deepinfer.checkpoint.inspect import CheckpointReport

__all__ = ["app"]

app = typer.Typer(help="Make synthetic checkpoints, look into any.", no_args_is_help=True)


@app.command()
def make(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; must not exist or be empty.")],
    preset: Annotated[str, typer.Option(help="tiny (9 MB), small (0.5 GB) or wide (released widths, 5 GB).")] = "tiny",
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    shards: Annotated[int | None, typer.Option(help="Number of files; by default one per 2 GiB.")] = None,
) -> None:
    """Write a synthetic checkpoint in the released format, with a working tokenizer."""
    from deepinfer.checkpoint.synthetic import make_checkpoint
    from deepinfer.errors import DeepInferError

    with _progress() as bar:
        task = bar.add_task(f"making {preset}", total=None)
        try:
            made = make_checkpoint(
                folder, preset, seed, shards, lambda done, total: bar.update(task, completed=done, total=total)
            )
        except DeepInferError as error:
            bar.stop()
            typer.secho(f"error: {error}", fg="red", err=True)
            raise typer.Exit(2) from None
    typer.echo(str(made))


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    read: Annotated[bool, typer.Option("--read", help="Also read every byte, check scales and report GB/s.")] = False,
) -> None:
    """Show config, topology, coverage, sizes and memory needed; exit status 1 if the checkpoint has problems."""
    from deepinfer.checkpoint.checkpoint import Checkpoint
    from deepinfer.checkpoint.inspect import inspect_checkpoint, scan_payload
    from deepinfer.errors import DeepInferError

    try:
        report = inspect_checkpoint(folder)
        problems, speed = list(report.problems), None
        if read:
            checkpoint = Checkpoint.open(folder)
            problems += scan_payload(checkpoint, list(checkpoint.names))
            speed = checkpoint.stats.gigabytes_per_second
    except DeepInferError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    if as_json:
        plain = report.to_dict()
        plain["coverage"]["problems"] = problems
        plain["read_gigabytes_per_second"] = speed
        typer.echo(json.dumps(plain, indent=1))
    else:
        _print_report(report, problems, speed)
    raise typer.Exit(1 if problems else 0)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _print_report(report: CheckpointReport, problems: list[str], speed: float | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    config = report.config
    console.print(f"[bold]{report.path}[/bold]", highlight=False)
    console.print(
        f"hidden {config.hidden_size}, {config.num_hidden_layers} layers + {config.num_nextn_predict_layers} draft "
        f"stages, {config.num_attention_heads} heads x {config.head_dim}, {config.n_routed_experts} experts "
        f"(top {config.num_experts_per_tok}), vocabulary {config.vocab_size}, context {config.max_position_embeddings}"
    )
    table = Table("layer", "kind", "ratio", "keys of", "selection of", "also", title="Topology")
    for role in report.topology.layers:
        also = [
            text
            for flag, text in (
                (role.has_engram, "n-gram memory"),
                (role.is_candidate_source, "candidate source"),
                (role.uses_candidates, "selects in candidates"),
                (role.is_dspark_target, "feeds drafter"),
                (role.layer == report.topology.boundary, "boundary"),
            )
            if flag
        ]
        table.add_row(
            str(role.layer),
            role.kind,
            str(role.ratio),
            _dash(role.kv_source),
            _dash(role.index_source),
            ", ".join(also),
        )
    console.print(table)
    table = Table("part", "tensors", "bytes", "GB", title="Sizes as stored")
    for part, (size, count) in report.sizes.items():
        table.add_row(part, str(count), f"{size:,}", f"{size / 1e9:.3f}")
    table.add_row("total", str(report.num_expected), f"{report.total_bytes:,}", f"{report.total_bytes / 1e9:.3f}")
    console.print(table)
    table = Table("devices", "weights GB", "n-gram tables on device GB", title="Memory per device (experts spread)")
    for need in report.needs:
        table.add_row(str(need.devices), f"{need.weights / 1e9:.3f}", f"{need.engram_table / 1e9:.3f}")
    console.print(table)
    console.print(
        f"cache: {report.page_bytes:,} bytes per page of {report.page_size} tokens, {report.slot_bytes:,} bytes per "
        f"sequence; 32 sequences of 4,096 tokens take {report.cache_bytes(32, 4096) / 1e9:.3f} GB"
    )
    if speed is not None:
        console.print(f"read at {speed:.2f} GB/s")
    console.print(f"coverage: {report.num_found} of {report.num_expected} tensors in {report.num_shards} file(s)")
    for problem in problems:
        console.print(f"[red]problem:[/red] {problem}", highlight=False)


def _dash(value: int | None) -> str:
    return "-" if value is None else str(value)

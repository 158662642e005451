"""`deepinfer bench spec`: acceptance and speed of every draft length, fixed and scheduled, as numbers and a curve."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from deepinfer import __version__
from deepinfer.cli.bench_load import Job, Load, check_files, synthetic_jobs
from deepinfer.errors import InvalidRequest

if TYPE_CHECKING:
    from deepinfer.conformance.scripted import ScriptedDrafter
    from deepinfer.engine.core import EngineCore
    from deepinfer.engine.loader import LoadedModel
    from deepinfer.settings import Settings

__all__ = ["bench_spec"]

SCHEDULED = "scheduled"


@dataclass(frozen=True)
class _Run:
    """One engine over all requests: its tokens by request, and what became of its drafts in all its runs.

    The processor's seconds are those of this process: what the host does, and on the CPU backend everything, whatever
    else the machine is busy with.
    """

    tokens: list[list[int]]
    seconds: float
    processor_seconds: float
    steps: int
    drafts: dict[str, Any] | None = None


def bench_spec(
    model: str | None = typer.Option(None, help="As in `generate`. Default: DEEPINFER_HF_MODEL_DIR, else tiny."),
    acceptance: str | None = typer.Option(
        None,
        help="Take drafts from a script that is right with this probability; the drafter's time still counts. A comma "
        "list is dealt out to the requests in turn.",
    ),
    num_requests: int = typer.Option(16, min=1, help="Requests, all sent at once."),
    input_len: int = typer.Option(32, min=1, help="Prompt tokens of each."),
    output_len: int = typer.Option(64, min=2, help="Output tokens of each."),
    temperature: float = typer.Option(1.0, min=0.0, help="0 always takes the most probable token."),
    repeats: int = typer.Option(3, min=1, help="Runs of every length; the fastest counts."),
    seed: int = typer.Option(0, min=0, help="Of ids and draws."),
    accelerator: str | None = typer.Option(None, help="Backend; default: DEEPINFER_ACCELERATOR, else automatic."),
    max_num_seqs: int | None = typer.Option(None, help="Sequences that run at once."),
    max_model_len: int | None = typer.Option(None, help="Most tokens of prompt and output together."),
    output: Path | None = typer.Option(None, help="Write the report to this JSON file."),
    plot: Path | None = typer.Option(None, help="Draw speed and acceptance into this PNG (needs matplotlib)."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON instead of a table."),
) -> None:
    """Measure speculation: no drafts, every fixed length up to the drafter's block, and scheduled lengths."""
    from deepinfer.cli.generate import announce, default_model
    from deepinfer.settings import load_settings

    check_files({"--output": output, "--plot": plot})
    rates = None if acceptance is None else _rates(acceptance)
    name = default_model() if model is None else model
    announce(name, chosen=model is not None)
    settings = load_settings(accelerator=accelerator, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
    lengths = (num_requests, input_len, output_len)
    report = _measure(name, settings, rates, lengths, temperature, repeats, seed)
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        _draw(report, plot)
    typer.echo(json.dumps(report) if as_json else _table(report))


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
        if all(0 <= rate <= 1 for rate in rates):
            return rates
    except ValueError:
        pass
    raise InvalidRequest(f"{text!r} is not a probability or a comma list of them", field="--acceptance")


def _measure(
    name: str | Path,
    settings: Settings,
    rates: list[float] | None,
    lengths: tuple[int, int, int],
    temperature: float,
    repeats: int,
    seed: int,
) -> dict[str, Any]:
    from deepinfer.engine.loader import load_model

    # Loaded apart, so that the engine without drafts computes nothing for them.
    plain = load_model(name, settings.model_copy(update={"use_nextn_decode": 0}))
    jobs = synthetic_jobs(Load.throughput, plain.model.traits, lengths, 1.0, seed)
    for job in jobs:
        job.params["temperature"] = temperature
    baseline = _best(plain, settings, jobs, 0, False, None, repeats)
    sequences = min(len(jobs), settings.max_num_seqs)
    (steps,) = _time_steps(plain, settings, sequences, 0)
    step_times = {"no drafter": steps}
    del plain
    loaded = load_model(name, settings.model_copy(update={"use_nextn_decode": None}))
    block = loaded.model.traits.max_drafts
    if block == 0:
        raise InvalidRequest(f"{name} has no drafter", field="--model")
    script = None
    if rates is not None:
        outputs = {
            job.params["seed"]: (len(job.prompt), tokens) for job, tokens in zip(jobs, baseline.tokens, strict=True)
        }
        script = outputs, {key: rates[index % len(rates)] for index, key in enumerate(outputs)}
    entries = [_entry("0", baseline, baseline)]
    for drafts, scheduled in [*((count, False) for count in range(1, block + 1)), (block, True)]:
        run = _best(loaded, settings, jobs, drafts, scheduled, script, repeats)
        entries.append(_entry(SCHEDULED if scheduled else str(drafts), run, baseline))
    drafting = _time_steps(loaded, settings, sequences, block)
    step_times |= {f"{drafts} verified": times for drafts, times in enumerate(drafting)}
    return {
        "version": __version__,
        "model": str(name),
        "numerics_id": loaded.numerics_id,
        "num_requests": len(jobs),
        "prompt_tokens": sum(len(job.prompt) for job in jobs),
        "temperature": temperature,
        "acceptance": rates,
        "block_size": block,
        "lengths": entries,
        "sequences": sequences,
        "step_times": step_times,
    }


def _best(
    loaded: LoadedModel,
    settings: Settings,
    jobs: Sequence[Job],
    drafts: int,
    scheduled: bool,
    script: Any,
    repeats: int,
) -> _Run:
    """The fastest of several runs on one engine; the first one, which warms it up, is not counted."""
    from deepinfer.conformance.scripted import ScriptedDrafter
    from deepinfer.engine.build import build_engine

    changed = settings.model_copy(update={"use_nextn_decode": drafts, "enable_mtp_varlen": scheduled})
    drafter = ScriptedDrafter(drafts, *script) if script is not None and drafts else None
    core = build_engine(loaded, changed, drafter=drafter).core
    try:
        if drafter is not None:
            _attach(drafter, core)
        _serve(core, jobs)
        runs = [_serve(core, jobs) for _ in range(repeats)]
        return replace(
            min(runs, key=lambda run: run.seconds),
            processor_seconds=min(run.processor_seconds for run in runs),
            drafts=None if core.speculation is None else core.speculation.to_dict(),
        )
    finally:
        core.close()


def _time_steps(loaded: LoadedModel, settings: Settings, sequences: int, block: int) -> list[dict[str, float]]:
    """Times of decode steps in which every sequence drafts a block and verifies 0, 1, ... of its drafts."""
    from deepinfer.engine.build import build_engine
    from deepinfer.engine.step_costs import time_step

    # Twice the slots bring twice the pages, so that all sequences can start in one step.
    changed = settings.model_copy(update={"use_nextn_decode": block, "max_num_seqs": 2 * sequences})
    core = build_engine(loaded, changed).core
    try:
        clocks = {"seconds": time.perf_counter, "processor_seconds": time.process_time}
        config = core.scheduler.config
        return [
            {
                name: time_step(core.runner, config, sequences * (1 + drafts), sequences, clock)
                for name, clock in clocks.items()
            }
            for drafts in range(block + 1)
        ]
    finally:
        core.close()


def _attach(drafter: ScriptedDrafter, core: EngineCore) -> None:
    """Let the model draft beside the script."""
    model, storage = core.runner.model, core.runner.storage
    drafter.beside = lambda anchors, positions, slots: model.draft(anchors, positions, slots, storage)


def _serve(core: EngineCore, jobs: Sequence[Job]) -> _Run:
    """Run all requests at once."""
    from deepinfer.sampling.params import SamplingParams

    steps, start, processor_start = core.stats.steps, time.perf_counter(), time.process_time()
    generations = [
        core.add(
            str(index),
            np.array(job.prompt, np.int64),
            SamplingParams(temperature=job.params["temperature"], ignore_eos=job.params["ignore_eos"]),
            seed=job.params["seed"],
            max_tokens=job.params["max_tokens"],
        )
        for index, job in enumerate(jobs)
    ]
    while core.num_unfinished:
        core.step()
    seconds, processor_seconds = time.perf_counter() - start, time.process_time() - processor_start
    for generation in generations:
        if generation.error is not None:
            raise generation.error
    tokens = [generation.token_ids for generation in generations]
    return _Run(tokens, seconds, processor_seconds, core.stats.steps - steps)


def _entry(label: str, run: _Run, baseline: _Run) -> dict[str, Any]:
    """What the report says of one length."""
    tokens = sum(map(len, run.tokens))
    entry: dict[str, Any] = {
        "drafts": label,
        "seconds": run.seconds,
        "generated_tokens": tokens,
        "tokens_per_second": tokens / run.seconds,
        "speedup": baseline.seconds / run.seconds,
        "processor_seconds": run.processor_seconds,
        "processor_speedup": baseline.processor_seconds / run.processor_seconds,
        "steps": run.steps,
        "steps_per_second": run.steps / run.seconds,
        "same_tokens": run.tokens == baseline.tokens,
    }
    if run.drafts is not None:
        verified = sum(run.drafts["verified"])
        entry |= {
            "tokens_per_sequence_step": run.drafts["tokens_per_sequence_step"],
            "verified_per_sequence_step": verified / max(run.drafts["sequence_steps"], 1),
            "acceptance": sum(run.drafts["accepted"]) / max(verified, 1),
            "speculation": run.drafts,
        }
    return entry


def _table(report: dict[str, Any]) -> str:
    rates = report["acceptance"]
    source = "the model's own drafts" if rates is None else f"scripted acceptance {', '.join(map(str, rates))}"
    lines = [
        f"{report['num_requests']} requests, {source}",
        f"  {'drafts':<10}{'tokens/s':>10}{'speedup':>9}{'processor':>11}{'steps/s':>9}{'ms/step':>9}"
        f"{'verified':>10}{'accepted':>10}{'tokens a step':>15}{'same tokens':>13}",
    ]
    for entry in report["lengths"]:
        row = (
            f"  {entry['drafts']:<10}{entry['tokens_per_second']:>10,.1f}{entry['speedup']:>9.2f}"
            f"{entry['processor_speedup']:>11.2f}"
            f"{entry['steps_per_second']:>9.1f}{1000 / entry['steps_per_second']:>9.2f}"
        )
        if "acceptance" in entry:
            row += (
                f"{entry['verified_per_sequence_step']:>10.2f}{entry['acceptance']:>10.1%}"
                f"{entry['tokens_per_sequence_step']:>15.2f}{'yes' if entry['same_tokens'] else 'no':>13}"
            )
        lines.append(row)
    times = [f"{what} {1000 * times['seconds']:.2f} ms" for what, times in report["step_times"].items()]
    return "\n".join([*lines, f"  a step of {report['sequences']} sequences: {', '.join(times)}"])


def _draw(report: dict[str, Any], path: Path) -> None:
    """Speed by draft length, and how many drafts of each position were verified and accepted."""
    from matplotlib.figure import Figure

    fixed = [entry for entry in report["lengths"] if entry["drafts"] != SCHEDULED]
    scheduled = report["lengths"][-1]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(range(len(fixed)), [entry["tokens_per_second"] for entry in fixed], marker="o", label="fixed length")
    left.axhline(scheduled["tokens_per_second"], color="tab:orange", linestyle="--", label="scheduled lengths")
    left.set(xlabel="drafts verified per sequence", ylabel="tokens/s", title="Speed", ylim=(0, None))
    left.legend()
    positions = np.arange(1, report["block_size"] + 1)
    for entry, color, label in ((fixed[-1], "tab:blue", "fixed"), (scheduled, "tab:orange", "scheduled")):
        counted = entry["speculation"]
        for name, style in (("verified", "v:"), ("accepted", "o-")):
            share = np.array(counted[name]) / max(counted["sequence_steps"], 1)
            right.plot(positions, share, style, color=color, label=f"{label}, {name}")
    right.set(xlabel="position in the block", ylabel="share of steps", title="Drafts", ylim=(0, 1.05), xticks=positions)
    right.legend()
    figure.savefig(path, format="png", dpi=120)

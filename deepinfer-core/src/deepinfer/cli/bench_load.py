"""`deepinfer bench` with throughput, latency or mixed load: an engine at work, as numbers and a picture."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import typer

from deepinfer import __version__
from deepinfer.errors import ConfigError, DeepInferError, InvalidRequest

__all__ = ["DESCRIPTIONS", "Job", "Load", "bench_load", "check_files", "read_requests", "synthetic_jobs"]

SHARES = (50, 90, 99)


class Load(StrEnum):
    """How requests arrive: all at once, each after the one before, or at random moments."""

    throughput = "throughput"
    latency = "latency"
    mixed = "mixed"


DESCRIPTIONS = {
    Load.throughput: "Measure an engine that is sent all requests at once.",
    Load.latency: "Measure an engine that is sent each request after the one before.",
    Load.mixed: "Measure an engine that is sent requests at random moments.",
}


@dataclass
class Job:
    """One request of the load and what became of it; moments in seconds from the start."""

    prompt: Any
    params: dict[str, Any]
    arrival: float = 0.0
    outcome: dict[str, Any] = field(default_factory=dict)


def bench_load(
    context: typer.Context,
    model: str | None = typer.Option(None, help="As in `generate`. Default: DEEPINFER_HF_MODEL_DIR, else tiny."),
    requests: Path | None = typer.Option(
        None,
        help="JSON lines to serve instead of synthetic ones; each has `prompt` or `prompt_token_ids`, and may have "
        "`sampling_params` and `arrival` (seconds).",
    ),
    num_requests: int = typer.Option(8, min=1, help="Synthetic requests."),
    input_len: int = typer.Option(32, min=1, help="Their prompt tokens; for mixed load the longest."),
    output_len: int = typer.Option(16, min=1, help="Their output tokens; for mixed load the longest."),
    rate: float = typer.Option(20.0, min=0.001, help="Mean arrivals a second of mixed load."),
    seed: int = typer.Option(0, min=0, help="Of lengths, ids, arrivals and draws."),
    accelerator: str | None = typer.Option(None, help="Backend; default: DEEPINFER_ACCELERATOR, else automatic."),
    max_num_seqs: int | None = typer.Option(None, help="Sequences that run at once."),
    max_model_len: int | None = typer.Option(None, help="Most tokens of prompt and output together."),
    output: Path | None = typer.Option(None, help="Write the report to this JSON file."),
    plot: Path | None = typer.Option(
        None, help="Draw latencies and tokens over time into this PNG (needs matplotlib)."
    ),
    trace: Path | None = typer.Option(None, help="Write the time line of every step, as in `generate`."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON instead of a table."),
) -> None:
    """Measure an engine under load. A first request warms it up and is not counted."""
    from deepinfer.cli.generate import announce, default_model

    load = Load(str(context.info_name))
    check_files({"--output": output, "--plot": plot, "--trace": trace})
    given = None if requests is None else read_requests(requests)
    name = default_model() if model is None else model
    announce(name, chosen=model is not None)
    options = {"accelerator": accelerator, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    lengths = (num_requests, input_len, output_len)
    report = asyncio.run(_measure(load, name, options, given, lengths, rate, seed, trace))
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        _draw(report, plot)
    typer.echo(json.dumps(report) if as_json else _table(report))


def check_files(paths: dict[str, Path | None]) -> None:
    """Find out before anything runs whether its results can be written.

    Args:
        paths: by option.

    Raises:
        InvalidRequest: a directory does not exist.
        ConfigError: a plot is wanted and matplotlib is not installed.
    """
    for option, path in paths.items():
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidRequest(f"there is no directory {path.absolute().parent}", field=option)
    if paths.get("--plot") is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError('needs matplotlib: pip install "deepinfer-core[plot]"', field="--plot")


def read_requests(path: Path) -> list[Job]:
    """Requests of a file of JSON lines, by arrival.

    Raises:
        InvalidRequest: the file cannot be read or holds none, or a line is not such a request; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}", field="--requests") from error
    jobs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidRequest(f"{where}: {error}", field="--requests") from None
        known = {"prompt", "prompt_token_ids", "sampling_params", "arrival"}
        if not isinstance(entry, dict) or not set(entry) <= known or not {"prompt", "prompt_token_ids"} & set(entry):
            raise InvalidRequest(
                f"{where}: expected an object with prompt or prompt_token_ids and at most {', '.join(sorted(known))}",
                field="--requests",
            )
        arrival, params = entry.get("arrival", 0.0), entry.get("sampling_params", {})
        if isinstance(arrival, bool) or not isinstance(arrival, int | float) or not 0 <= arrival < float("inf"):
            raise InvalidRequest(f"{where}: arrival={arrival!r} is not a number of seconds", field="--requests")
        if not isinstance(params, dict):
            raise InvalidRequest(f"{where}: sampling_params is not an object", field="--requests")
        prompt = entry["prompt_token_ids"] if "prompt_token_ids" in entry else entry["prompt"]
        jobs.append(Job(prompt, params, float(arrival)))
    if not jobs:
        raise InvalidRequest(f"{path} holds no request", field="--requests")
    return sorted(jobs, key=lambda job: job.arrival)


def synthetic_jobs(load: Load, traits: Any, lengths: tuple[int, int, int], rate: float, seed: int) -> list[Job]:
    """Requests of random ids.

    Args:
        load: only mixed load varies lengths and arrivals.
        traits: of the model. lengths: requests, longest prompt, longest output. rate: mean arrivals a second.
        seed: of everything; the requests have the seeds from there on.
    """
    count, longest_input, longest_output = lengths
    draw = np.random.default_rng(seed)
    special = {*traits.eos_token_ids, traits.image_token_id}
    ids = np.array([token for token in range(traits.vocab_size) if token not in special])
    jobs, moment = [], 0.0
    for index in range(count):
        size, new = longest_input, longest_output
        if load is Load.mixed:
            size, new = (int(draw.integers(-(-longest // 4), longest + 1)) for longest in lengths[1:])
            moment += float(draw.exponential(1 / rate))
        params = {"max_tokens": new, "ignore_eos": True, "seed": seed + index}
        jobs.append(Job(draw.choice(ids, size).tolist(), params, moment))
    return jobs


async def _measure(
    load: Load,
    name: Any,
    options: dict[str, Any],
    given: list[Job] | None,
    lengths: tuple[int, int, int],
    rate: float,
    seed: int,
    trace: Path | None,
) -> dict[str, Any]:
    from deepinfer.engine.async_llm import AsyncLLM

    async with AsyncLLM(name, **options) as engine:
        jobs = given or synthetic_jobs(load, engine.traits, lengths, rate, seed)
        async for _ in engine.generate(jobs[0].prompt, {"max_tokens": 2, "ignore_eos": True}):
            pass
        steps = engine.trace() if trace is not None else None
        before = _counts(engine.stats)
        start = time.perf_counter()
        if load is Load.latency:
            for job in jobs:
                await _serve(engine, job, start, wait=False)
        else:
            await asyncio.gather(*(_serve(engine, job, start, wait=load is Load.mixed) for job in jobs))
        seconds = time.perf_counter() - start
        if steps is not None and trace is not None:
            steps.save(trace)
        stats = {key: value - before[key] for key, value in _counts(engine.stats).items()}
        about = {"version": __version__, "load": str(load), "model": str(name), "numerics_id": engine.numerics_id}
        drafts = engine.stats.speculation
        return {
            **about,
            **_summary(jobs, seconds),
            "engine": stats,
            "speculation": None if drafts is None else drafts.to_dict(),
            "requests": [job.outcome for job in jobs],
        }


def _counts(stats: Any) -> dict[str, float]:
    """The numbers of an `EngineStats`."""
    return {key: value for key, value in vars(stats).items() if isinstance(value, int | float)}


async def _serve(engine: Any, job: Job, start: float, *, wait: bool) -> None:
    """Run one request and note its moments."""
    if wait:
        await asyncio.sleep(max(start + job.arrival - time.perf_counter(), 0))
    sent = time.perf_counter()
    job.outcome = {"sent": sent - start, "error": None}
    try:
        async for output in engine.generate(job.prompt, job.params):
            last = output
    except DeepInferError as error:
        job.outcome["error"] = f"{type(error).__name__}: {error}"
        return
    metrics = last.metrics
    new = sum(len(part.token_ids) for part in last.outputs)
    job.outcome |= {
        "prompt_tokens": metrics.num_prompt_tokens,
        "generated_tokens": new,
        "queue_time": metrics.first_scheduled - sent,
        "time_to_first_token": metrics.first_token - sent,
        "request_time": metrics.finished - sent,
        "time_per_output_token": (metrics.finished - metrics.first_token) / (metrics.num_generated_tokens - 1)
        if metrics.num_generated_tokens > 1
        else None,
        "finished": metrics.finished - start,
    }


def _summary(jobs: Sequence[Job], seconds: float) -> dict[str, Any]:
    served = [job.outcome for job in jobs if job.outcome["error"] is None]
    prompt, new = (sum(outcome[name] for outcome in served) for name in ("prompt_tokens", "generated_tokens"))
    latencies = {}
    for name in ("queue_time", "time_to_first_token", "time_per_output_token", "request_time"):
        values = [outcome[name] for outcome in served if outcome[name] is not None]
        if values:
            shares = {f"p{share}": float(np.percentile(values, share)) for share in SHARES}
            latencies[name] = {"mean": float(np.mean(values)), **shares, "max": max(values)}
    return {
        "num_requests": len(jobs),
        "num_failed": len(jobs) - len(served),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "generated_tokens": new,
        "requests_per_second": len(served) / seconds,
        "prompt_tokens_per_second": prompt / seconds,
        "generated_tokens_per_second": new / seconds,
        "latency_seconds": latencies,
    }


def _table(report: dict[str, Any]) -> str:
    failed = f", {report['num_failed']} failed" if report["num_failed"] else ""
    lines = [
        f"{report['load']}: {report['num_requests']} requests{failed} in {report['seconds']:.2f} s",
        f"  {report['requests_per_second']:,.2f} requests/s, "
        f"{report['prompt_tokens_per_second']:,.1f} prompt tokens/s, "
        f"{report['generated_tokens_per_second']:,.1f} generated tokens/s",
        f"  {'milliseconds':<24}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p99", "max")),
    ]
    for name, values in report["latency_seconds"].items():
        lines.append(f"  {name:<24}" + "".join(f"{1000 * value:>10.1f}" for value in values.values()))
    errors = [outcome["error"] for outcome in report["requests"] if outcome["error"]]
    lines += [f"  the first failure: {error}" for error in errors[:1]]
    drafts = report["speculation"]
    if drafts is not None:
        verified = sum(drafts["verified"])
        lines.append(
            f"  {verified} drafts verified, {sum(drafts['accepted']) / max(verified, 1):.1%} accepted, "
            f"{drafts['tokens_per_sequence_step']:.2f} tokens a sequence and step; "
            f"mean error of confidences {drafts['calibration_error']:.3f}"
        )
    return "\n".join(lines)


def _draw(report: dict[str, Any], path: Path) -> None:
    """Latencies as cumulative shares, and generated tokens over time."""
    from matplotlib.figure import Figure

    served = [entry for entry in report["requests"] if entry["error"] is None]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, label in (("time_to_first_token", "first token"), ("request_time", "whole request")):
        values = sorted(1000 * entry[name] for entry in served)
        left.step(values, [(index + 1) / len(values) for index in range(len(values))], where="post", label=label)
    left.set(xlabel="milliseconds", ylabel="share of requests", title="Latency", ylim=(0, 1.02))
    left.legend()
    moments = sorted((entry["finished"], entry["generated_tokens"]) for entry in served)
    right.step([0, *(moment for moment, _ in moments)], np.cumsum([0, *(new for _, new in moments)]), where="post")
    rate = f"{report['generated_tokens_per_second']:,.1f} tokens/s"
    right.set(xlabel="seconds", ylabel="tokens of finished requests", title=f"{report['load']}: {rate}")
    figure.savefig(path, format="png", dpi=120)

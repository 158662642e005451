"""Measures the time to the first token of a prompt whose prefix is unknown, on the device, in host memory or on disk.

One request at a time on the CPU backend. Cold runs use prompts that share nothing; in the other rows all but the last
32 tokens of the prompt were seen before. The smallest of the repeats is shown: the machine's other work only adds.

Usage: python benchmarks/prefix.py [--preset small] [--lengths 256 512] [--into docs/benchmarks/prefix.md]
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

import deepinfer
from deepinfer import LLM, SamplingParams
from deepinfer.engine.loader import LoadedModel, load_model
from deepinfer.settings import load_settings

TAIL = 32
COLUMNS = ("cold", "hot", "host memory", "disk")
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def prompt(length: int, number: int) -> list[int]:
    """Ids that share no page with those of another number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(8, 480, (length,), generator=generator).tolist()


def first_token(llm: LLM, ids: list[int], cached: int) -> float:
    """Seconds from arrival to the first token; checks that the prefix was found where it should be."""
    (output,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    if output.num_cached_tokens != cached:
        raise RuntimeError(f"{output.num_cached_tokens} tokens were cached, {cached} expected")
    return output.metrics.first_token - output.metrics.arrival


def settle(llm: LLM) -> None:
    """Wait until the stores have what was published."""
    done = threading.Event()
    llm._core.executor.run(done.set)
    done.wait()
    llm._core.tiers.exchange.flush()


def measure(loaded: LoadedModel, options: dict[str, Any], length: int, repeats: int) -> dict[str, float]:
    """Seconds to the first token, by where the prefix is."""
    page = loaded.model.traits.page_size
    shared = (length - TAIL) // page * page
    seconds: dict[str, list[float]] = {column: [] for column in COLUMNS}
    for repeat in range(repeats):
        stem = prompt(length, 1000 + repeat)[:shared]
        asked = iter([stem + prompt(length - shared, 10 * repeat + index) for index in range(5)])
        with tempfile.TemporaryDirectory() as folder:
            disk = load_settings(**options, prefix_disk_dir=folder)
            with LLM.from_loaded(loaded, disk) as llm:
                first_token(llm, prompt(page + 1, 7), 0)
                seconds["cold"].append(first_token(llm, next(asked), 0))
                seconds["hot"].append(first_token(llm, next(asked), shared))
            with LLM.from_loaded(loaded, disk) as llm:
                first_token(llm, prompt(2, 7), 0)
                seconds["disk"].append(first_token(llm, next(asked), shared))
        with LLM.from_loaded(loaded, load_settings(**options, prefix_host_bytes=1 << 30)) as llm:
            first_token(llm, next(asked), 0)
            settle(llm)
            llm._core.scheduler.prefix.clear()
            seconds["host memory"].append(first_token(llm, next(asked), shared))
    return {column: min(values) for column, values in seconds.items()}


def table(rows: list[tuple[int, int, dict[str, float]]]) -> str:
    """Markdown: milliseconds, and the gain of each column over the first."""
    head = ["prompt", "reused", *COLUMNS]
    lines = [f"| {' | '.join(head)} |", "|" + "---:|" * len(head)]
    for length, reused, found in rows:
        cells = [f"{found[c] * 1e3:,.1f} ms ({found['cold'] / found[c]:.1f}×)" for c in COLUMNS]
        lines.append(f"| {length} | {reused} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and, if asked, put the tables into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--lengths", type=int, nargs="+", default=[288, 544, 1056])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--page-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--into", type=Path)
    args = parser.parse_args()
    options = {
        "accelerator": "cpu",
        "batch_invariant": True,
        "page_size": args.page_size,
        "max_num_seqs": 4,
        "max_model_len": max(args.lengths) + 8,
        "max_num_batched_tokens": 512,
        "prefix_snapshots": 8,
        "prefix_load_seconds": 30.0,
        "num_threads": args.threads,
    }
    loaded = load_model(args.preset, load_settings(**options))
    rows = []
    for length in args.lengths:
        reused = (length - TAIL) // args.page_size * args.page_size
        rows.append((length, reused, measure(loaded, options, length, args.repeats)))
    traits = loaded.model.traits
    text = (
        f"{datetime.date.today()}, preset `{args.preset}`, pages of {args.page_size} tokens ({traits.page_bytes:,} B), "
        f"snapshots of {traits.slot_bytes:,} B, {args.threads} of {os.cpu_count()} cores of {platform.machine()} "
        f"({torch.backends.cpu.get_cpu_capability()}), torch {torch.__version__}, deepinfer-core "
        f"{deepinfer.__version__}, load average {os.getloadavg()[0]:.1f}:\n\n{table(rows)}"
    )
    print(text)
    if args.into is not None:
        before, _, rest = args.into.read_text().partition(BEGIN)
        args.into.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()

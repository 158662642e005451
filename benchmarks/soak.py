"""Serves random requests of every kind, many of them aborted, for minutes; watches memory, then checks the accounts.

Consumers come and go on `AsyncLLM` over the simulated device: sampling of every sort, completions that share a prompt,
grammars, stop strings, shared prefixes, requests that are refused, iterators that are left half-way. Pages are few, so
requests are preempted; copies of prefixes go to host memory and back.

Usage: python benchmarks/soak.py --minutes 30 [--output soak.json]
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import deepinfer
from deepinfer import AsyncLLM, SamplingParams, StructuredOutput
from deepinfer.conformance.loop_model import write_loop_model
from deepinfer.conformance.sim import SimulatedDevice
from deepinfer.engine.loader import LoadedModel, load_model
from deepinfer.errors import CapacityError, InvalidRequest
from deepinfer.settings import Settings, load_settings

SETTINGS: dict[str, Any] = {
    "accelerator": "cpu",
    "batch_invariant": True,
    "page_size": 16,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "use_nextn_decode": 2,
    "num_threads": 1,
    "prefix_snapshots": 16,
    "prefix_host_bytes": 16 << 20,
    "preemption_host_bytes": 1 << 19,
    "xgrammar_cache_limit_bytes": 4 << 20,
}
NUM_PAGES = 40
PREEMPT_EVERY = 23

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 3},
    {"prompt_logprobs": 1},
    {"n": 3, "top_p": 0.9},
    {"stop": ["e", "an", "st"]},
    {"stop_token_ids": [*range(200, 300)], "min_tokens": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {7: 3.0}},
    {"golden_token_ids": [42, -1, 43], "banned_token_ids": [1]},
    {"structured_output": StructuredOutput(json_object=True)},
    {"structured_output": StructuredOutput(choices=["yes", "no"]), "logprobs": 0},
)


def rss() -> float:
    """Resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


class Soak:
    """Consumers of one engine and what became of their requests."""

    def __init__(self, llm: AsyncLLM, seed: int) -> None:
        self.llm = llm
        self.random = random.Random(seed)
        self.ended: Counter[str] = Counter()
        self.tokens = 0
        self.samples: list[dict[str, float]] = []
        self.stems = [[self.random.randint(3, 500) for _ in range(length)] for length in (16, 40, 66)]

    def draw(self) -> tuple[list[int], dict[str, Any], int | None]:
        """A prompt, sampling parameters, and the output at which its consumer leaves; None: it stays."""
        rng = self.random
        prompt = [rng.randint(3, 500) for _ in range(rng.choice([1, 2, 5, 17, 40]))]
        if rng.random() < 0.4:
            prompt = rng.choice(self.stems) + prompt[:20]
        params = {"temperature": rng.choice([0.0, 1.0, 0.7]), "max_tokens": rng.randint(1, 8), **rng.choice(KINDS)}
        if rng.random() < 0.05:
            low = rng.randint(1, 60)
            params = {"max_tokens": 8}
            params["structured_output"] = StructuredOutput(regex=f"[a-f]{{{low},{low + rng.randint(1, 30)}}}")
        if rng.random() < 0.03:
            prompt, params = rng.choice([([], params), ([9999], params), (prompt, {"top_p": 2.0}), ([7] * 300, {})])
        return prompt, params, rng.randint(1, 4) if rng.random() < 0.25 else None

    async def consume(self, until: float) -> None:
        """Ask for one thing after the other."""
        while time.monotonic() < until:
            prompt, params, leave = self.draw()
            try:
                self.ended[await self.ask(prompt, params, leave)] += 1
            except (InvalidRequest, CapacityError):
                self.ended["refused"] += 1

    async def ask(self, prompt: list[int], params: dict[str, Any], leave: int | None) -> str:
        """How a request ended."""
        outputs = self.llm.generate(
            prompt, SamplingParams(**params), priority=self.random.choice([0, 0, 1]), delta=True
        )
        seen = 0
        try:
            async for output in outputs:
                seen += 1
                self.tokens += sum(len(part.token_ids) for part in output.outputs)
                if seen == leave and not output.finished:
                    return "left half-way"
                reason = str(output.outputs[0].finish_reason)
            return reason
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]

    async def watch(self, until: float, interval: float) -> None:
        """Sample memory and counts."""
        start = time.monotonic()
        while True:
            minutes = (time.monotonic() - start) / 60
            stats = self.llm.stats
            sample = {
                "minutes": round(minutes, 1),
                "rss_mb": round(rss(), 1),
                "requests": self.ended.total(),
                "tokens": self.tokens,
                "steps": stats.steps,
                "preemptions": stats.preemptions,
            }
            self.samples.append(sample)
            print("  ".join(f"{name} {value:,}" for name, value in sample.items()), flush=True)
            left = until - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(min(interval, left))

    async def run(self, seconds: float, consumers: int, interval: float) -> None:
        """Let so many consumers ask for so long."""
        until = time.monotonic() + seconds
        await asyncio.gather(self.watch(until, interval), *(self.consume(until) for _ in range(consumers)))


def settle(llm: AsyncLLM) -> dict[str, int]:
    """Wait for the loop's last step and check that pages, slots and snapshots are all where they belong."""
    core = llm._loop.core  # type: ignore[attr-defined]
    limit = time.monotonic() + 60
    while core.num_unfinished and time.monotonic() < limit:
        time.sleep(0.05)
    core.scheduler.assert_idle()
    pages, slots = core.scheduler.pages, core.scheduler.slots
    return {
        "free pages": pages.num_free,
        "cached pages": pages.num_cached,
        "pages": pages.capacity,
        "free slots": slots.num_free,
    }


def main() -> None:
    """Run, print what was seen and exit with 1 if an account is not exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--consumers", type=int, default=16)
    parser.add_argument("--interval", type=float, default=60.0, help="seconds between samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a preset or a checkpoint; a small one is made by default")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    settings = load_settings(**SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model(options.model or write_loop_model(Path(folder) / "model"), settings)
        serve(loaded, settings, options)


def serve(loaded: LoadedModel, settings: Settings, options: argparse.Namespace) -> None:
    """Run the consumers and check what is left behind them."""
    print(
        f"{datetime.datetime.now():%Y-%m-%d %H:%M}, deepinfer-core {deepinfer.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores of {platform.machine()}"
    )
    with AsyncLLM.from_loaded(
        loaded,
        settings,
        num_pages=NUM_PAGES,
        preempt_every=PREEMPT_EVERY,
        poison_released=True,
        executor=SimulatedDevice,
    ) as llm:
        soak = Soak(llm, options.seed)
        asyncio.run(soak.run(60 * options.minutes, options.consumers, options.interval))
        accounts = settle(llm)
        finished, failed_steps = dict(llm.stats.finished), llm.stats.failed_steps
    print(f"requests by end: {dict(soak.ended)}")
    print(f"completions by end, as the loop counts: {finished}; failed steps: {failed_steps}")
    print(f"accounts: {accounts}")
    if options.output is not None:
        report = {"samples": soak.samples, "requests": dict(soak.ended), "completions": finished, "accounts": accounts}
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    exact = accounts["free pages"] + accounts["cached pages"] == accounts["pages"]
    sys.exit(0 if exact and not failed_steps and not finished.get("error") else 1)


if __name__ == "__main__":
    main()

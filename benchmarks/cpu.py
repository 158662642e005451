"""Measures the engine on the CPU backend against the same kernels in a straight line and against plain products.

Three runs of the same rows, interleaved step by step in one process:

- engine: `LLM.generate`; everything between the end of one step and the end of the next counts,
- straight: the same bound kernels, one `Graph.forward` per step on the engine's step inputs, with caches of its own,
- plain: the same graph over plain matrix products, likewise.

Usage: python benchmarks/cpu.py [--threads N] [--presets tiny small] [--into docs/benchmarks/cpu.md]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import gc
import json
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
from plain_products import PlainProducts
from torch.profiler import ProfilerActivity, profile

import deepinfer
from deepinfer import LLM, SamplingParams
from deepinfer.backend.kernels import KernelTable, all_contracts
from deepinfer.cpu.kernels import tile_product
from deepinfer.models.deepseek_v41.graph import Graph
from deepinfer.ops.handles import DenseWeight

CONTENDERS = ("engine", "straight", "plain")
MAX_MODEL_LEN = 512
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.0, "top_p": 0.95}
PROMPT_LENGTHS = {1: 128, 8: 32, 32: 16}
DECODE_STEPS = {"tiny": 16, "small": 8}
REPEATS = {"tiny": 3, "small": 2}
PRODUCT_ROWS = (1, 8, 32, 512)


@dataclasses.dataclass(frozen=True)
class Moment:
    """A point on both clocks: seconds of the wall and of the processor."""

    wall: float
    cpu: float

    @staticmethod
    def now() -> Moment:
        return Moment(time.perf_counter(), time.process_time())

    def since(self, start: Moment) -> Moment:
        return Moment(self.wall - start.wall, self.cpu - start.cpu)


class Twin:
    """A graph over the engine's weights that replays the engine's steps on caches of its own."""

    def __init__(self, model: Any, table: Any, num_pages: int, num_slots: int) -> None:
        self.graph = Graph(model.config, model.weights, table)
        self.storage = model.allocate_caches(num_pages, num_slots)

    @torch.inference_mode()
    def run(self, inputs: Any) -> tuple[Moment, torch.Tensor]:
        start = Moment.now()
        logits = self.graph.forward(inputs, self.storage).logits
        return Moment.now().since(start), logits


class Race:
    """Runs prompts through `LLM.generate` and lets both twins follow after every step."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.core = llm._core
        runner = self.core.runner
        self.model = runner.model
        plain = KernelTable.bind(all_contracts(), PlainProducts(), self.model.numerics, fallback="allow")
        size = (runner.storage.pages.shape[0], runner.storage.slots.shape[0])
        self.twins = {"straight": Twin(self.model, self.model.table, *size), "plain": Twin(self.model, plain, *size)}
        self.inputs: Any = None
        self.logits: Any = None

    def run(self, batch: int, sampling: dict[str, float], tokens: int) -> dict[str, Any]:
        """Moments per step of each contender, by kind of step."""
        steps: dict[str, dict[str, list[Moment]]] = {kind: defaultdict(list) for kind in ("prefill", "decode")}
        equal = True
        last = Moment.now()
        original_step, original_forward = self.core.step, self.model.forward

        def forward(inputs: Any, storage: Any) -> Any:
            result = original_forward(inputs, storage)
            self.inputs, self.logits = inputs, result.logits
            return result

        def step() -> Any:
            nonlocal last, equal
            changed = original_step()
            spent = Moment.now().since(last)
            kind = "decode" if self.inputs.token_ids.shape[0] == batch else "prefill"
            steps[kind]["engine"].append(spent)
            order = list(self.twins)
            for name in order if len(steps[kind]["engine"]) % 2 else order[::-1]:
                moment, logits = self.twins[name].run(self.inputs)
                steps[kind][name].append(moment)
                if name == "straight":
                    equal &= torch.equal(logits, self.logits)
            last = Moment.now()
            return changed

        generator = np.random.default_rng(batch)
        vocab = self.model.traits.vocab_size
        prompts = [generator.integers(8, vocab - 8, PROMPT_LENGTHS[batch]).tolist() for _ in range(batch)]
        params = [SamplingParams(max_tokens=tokens, ignore_eos=True, seed=i, **sampling) for i in range(batch)]
        self.core.step, self.model.forward = step, forward
        gc.collect()
        try:
            last = Moment.now()
            self.llm.generate(prompts, params, use_tqdm=False, raise_errors=True)
        finally:
            del self.core.step, self.model.forward
        return {**steps, "equal": equal}

    def measure(self, batch: int, name: str, sampling: dict[str, float], tokens: int, repeats: int) -> dict[str, Any]:
        """One entry of the report."""
        runs = [self.run(batch, sampling, tokens) for _ in range(repeats)]
        entry: dict[str, Any] = {
            "batch": batch,
            "sampling": name,
            "prompt_length": PROMPT_LENGTHS[batch],
            "straight_equals_engine_bits": all(run["equal"] for run in runs),
        }
        for kind in ("prefill", "decode"):
            rows = batch * (PROMPT_LENGTHS[batch] if kind == "prefill" else 1)
            moments = {who: [moment for run in runs for moment in run[kind][who]] for who in CONTENDERS}
            entry[kind] = _summary(moments, rows)
        return entry


def _summary(moments: dict[str, list[Moment]], rows: int) -> dict[str, Any]:
    out: dict[str, Any] = {"rows": rows, "steps": len(moments["engine"])}
    for who, times in moments.items():
        cpu, wall = [moment.cpu for moment in times], [moment.wall for moment in times]
        out[who] = {
            "cpu_seconds": _spread(cpu),
            "wall_seconds": _spread(wall),
            "tokens_per_cpu_second": rows / statistics.median(cpu),
            "tokens_per_wall_second": rows / statistics.median(wall),
        }
    for above, below in (("engine", "straight"), ("straight", "plain"), ("engine", "plain")):
        pairs = zip(moments[above], moments[below], strict=True)
        out[f"{above}_over_{below}"] = _spread([a.cpu / b.cpu for a, b in pairs])
    return out


def _spread(values: list[float]) -> dict[str, float]:
    low, middle, high = np.percentile(values, (25, 50, 75)).tolist()
    return {"median": middle, "p25": low, "p75": high}


def measure_products(model: Any) -> list[dict[str, Any]]:
    """Row-invariant products against plain ones, on every dense product of a forward pass."""
    shapes = _product_shapes(model)
    weights = {shape: torch.randn(shape[0], shape[1]).to(shape[2]) for shape in shapes}
    out = []
    for rows in PRODUCT_ROWS:
        total = {"tile": 0.0, "plain": 0.0}
        for shape, count in shapes.items():
            x = torch.randn(rows, shape[1]).to(shape[2])
            for name, seconds in _time_product(x, weights[shape]).items():
                total[name] += count * seconds
        out.append({"rows": rows, "products": sum(shapes.values()), "seconds": total})
    return out


def _product_shapes(model: Any) -> dict[tuple[int, int, torch.dtype], int]:
    shapes: dict[tuple[int, int, torch.dtype], int] = defaultdict(int)
    for name, weight in _dense_weights((model.weights.layers, model.weights.head), ""):
        n, k = weight.values.shape
        groups = model.config.o_groups if name == "wo_a" else 1
        shapes[n // groups, k, weight.values.dtype] += groups
    return dict(shapes)


def _dense_weights(value: Any, name: str) -> Iterator[tuple[str, DenseWeight]]:
    if isinstance(value, DenseWeight):
        yield name, value
    elif isinstance(value, tuple):
        for item in value:
            yield from _dense_weights(item, name)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _dense_weights(getattr(value, field.name), field.name)


@torch.inference_mode()
def _time_product(x: torch.Tensor, weight: torch.Tensor) -> dict[str, float]:
    functions: dict[str, Callable[[], Any]] = {"tile": lambda: tile_product(x, weight), "plain": lambda: x @ weight.T}
    best: dict[str, list[float]] = defaultdict(list)
    for turn in range(6):
        for name, function in functions.items():
            start = time.process_time()
            calls = 0
            while time.process_time() - start < 1e-3 or calls < 2:
                function()
                calls += 1
            if turn:
                best[name].append((time.process_time() - start) / calls)
    return {name: statistics.median(times) for name, times in best.items()}


def measure_profile(race: Race, batch: int, steps: int) -> dict[str, Any]:
    """Processor seconds of a decode step by large operation, and the small operations of PyTorch below them."""
    race.run(batch, GREEDY, 3)
    inputs, twin = race.inputs, race.twins["straight"]
    spent: dict[str, float] = defaultdict(float)
    with _timed(twin.graph, spent):
        times = [twin.run(inputs)[0].cpu for _ in range(steps)]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        twin.run(inputs)
    averages = recorded.key_averages()
    overall = sum(event.self_cpu_time_total for event in averages)
    busiest = sorted(averages, key=lambda event: -event.self_cpu_time_total)[:12]
    return {
        "batch": batch,
        "seconds": statistics.median(times),
        "by_operation": dict(
            sorted(((name, value / sum(times)) for name, value in spent.items()), key=lambda i: -i[1])
        ),
        "small_calls": sum(event.count for event in averages),
        "small": [
            {
                "name": event.key.removeprefix("aten::"),
                "calls": event.count,
                "share": event.self_cpu_time_total / overall,
            }
            for event in busiest
        ],
    }


@contextlib.contextmanager
def _timed(graph: Graph, spent: dict[str, float]) -> Iterator[None]:
    """Count the time of every operation that the graph asks for, by the contract's name."""
    originals = {name: value for name, value in vars(graph).items() if callable(value)}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.process_time()
            result = function(*arguments, **options)
            spent[name] += time.process_time() - start
            return result

        return call

    for name, function in originals.items():
        setattr(graph, name, timed(getattr(function, "__name__", name), function))
    try:
        yield
    finally:
        vars(graph).update(originals)


def machine(threads: int) -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    names = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(":")[1].strip() for line in names if line.startswith("model name")), platform.processor())
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": model,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "deepinfer": deepinfer.__version__,
        "load_before": os.getloadavg()[0],
    }


def measure_preset(preset: str, threads: int, batches: list[int]) -> dict[str, Any]:
    rows = max(batch * PROMPT_LENGTHS[batch] for batch in batches)
    llm = LLM(
        preset,
        accelerator="cpu",
        num_threads=threads,
        max_num_seqs=max(batches),
        max_num_batched_tokens=rows,
        max_model_len=MAX_MODEL_LEN,
        num_pages=max(batches) * 4 + 1,
        # A step ends before the next is planned, and every prompt is computed: what both twins do.
        zero_overhead_scheduling=False,
        enable_prefix_caching=False,
    )
    race, tokens, repeats = Race(llm), DECODE_STEPS[preset] + 1, REPEATS[preset]
    race.run(min(batches), SAMPLED, 2)  # Pages, tables and code are touched once before anything counts.
    entries = [race.measure(batch, "greedy", GREEDY, tokens, repeats) for batch in batches]
    entries.append(race.measure(max(batches), "top-p 0.95 at temperature 1", SAMPLED, tokens, 1))
    return {
        "preset": preset,
        "layers": len(llm._core.runner.model.weights.layers),
        "runs": entries,
        "products": measure_products(race.model),
        "profile": [measure_profile(race, batch, 8) for batch in (min(batches), max(batches))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--presets", nargs="+", choices=list(REPEATS), default=list(REPEATS))
    parser.add_argument("--batches", nargs="+", type=int, choices=list(PROMPT_LENGTHS), default=list(PROMPT_LENGTHS))
    parser.add_argument("--into", type=Path, help="page whose tables are replaced; JSON and plot go beside it")
    arguments = parser.parse_args()
    start = time.perf_counter()
    result: dict[str, Any] = {"machine": machine(arguments.threads), "presets": []}
    for preset in arguments.presets:
        result["presets"].append(measure_preset(preset, arguments.threads, arguments.batches))
    result["machine"] |= {"load_after": os.getloadavg()[0], "seconds": time.perf_counter() - start}
    print(report.tables(result))
    if arguments.into is not None:
        arguments.into.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        report.plot(result, arguments.into.with_suffix(".png"))
        report.replace_tables(arguments.into, result)


if __name__ == "__main__":
    main()

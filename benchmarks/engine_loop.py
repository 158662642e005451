"""What the step loop costs the host: plan time, idle share of a simulated device, asynchronous against synchronous.

python benchmarks/engine_loop.py --output engine_loop.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer.cache.pool import PagePool, SlotPool
from deepinfer.conformance.sim import SimulatedDevice, StubRunner
from deepinfer.engine.core import EngineCore
from deepinfer.engine.grammars import Grammars
from deepinfer.models.traits import ModelTraits
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.structured import StructuredOutput
from deepinfer.scheduler.config import SchedulerConfig
from deepinfer.scheduler.scheduler import Scheduler

PAGE = 128
CONTEXT = 4096


def make_scheduler(sequences: int, *, num_drafts: int = 0, depth: int = 2) -> Scheduler:
    """Room for all sequences at their longest."""
    config = SchedulerConfig(
        max_num_seqs=sequences,
        max_num_batched_tokens=max(8192, sequences * (2 + num_drafts)),
        max_model_len=CONTEXT,
        page_size=PAGE,
        num_drafts=num_drafts,
        lookahead=num_drafts * (depth - 1),
    )
    return Scheduler(config, PagePool(sequences * (CONTEXT // PAGE + 2)), SlotPool(sequences + 1))


def make_core(
    sequences: int, step_time: float, depth: int, num_drafts: int = 0, token: int = 7, grammars: Grammars | None = None
) -> tuple[EngineCore, SimulatedDevice]:
    """A loop around a device that does nothing but take its time; it draws the same token everywhere."""
    traits = ModelTraits(1000, CONTEXT, frozenset(), None, 1, num_drafts, PAGE, 1, 1, 1, 1)
    runner: Any = StubRunner(traits, num_drafts=num_drafts, token=token)
    device = SimulatedDevice(runner, step_time=step_time, guard=False)
    scheduler = make_scheduler(sequences, num_drafts=num_drafts, depth=depth)
    return EngineCore(runner, scheduler, device, depth=depth, grammars=grammars), device


def fill(core: EngineCore, sequences: int, wanted: Sequence[StructuredOutput | None] = (None,)) -> None:
    """Run the prompts of so many requests that decode as long as anyone measures.

    Args:
        core, sequences: as made. wanted: their grammars in turn.
    """
    rng = np.random.default_rng(0)
    for index in range(sequences):
        params = SamplingParams(ignore_eos=True, structured_output=wanted[index % len(wanted)])
        prompt = np.arange(int(rng.integers(16, 33)), dtype=np.int64)
        core.add(str(index), prompt, params, seed=index, max_tokens=CONTEXT // 2)
    while core.scheduler.num_queued + core.scheduler.num_prefilling or core.scheduler.sequences.num_running < sequences:
        core.step()


def num_tokens(core: EngineCore) -> int:
    """Tokens that the unfinished requests have."""
    return sum(len(generation.token_ids) for generation in core._generations.values())


def plan_time(sequences: int, steps: int, num_drafts: int = 0) -> dict[str, float]:
    """Microseconds of `Scheduler.plan` with so many decoding sequences."""
    core, _ = make_core(sequences, 0.0, 1, num_drafts)
    fill(core, sequences)
    seconds = []
    plan = core.scheduler.plan

    def timed() -> Any:
        start = time.perf_counter()
        step = plan()
        seconds.append(time.perf_counter() - start)
        return step

    core.scheduler.plan = timed  # type: ignore[method-assign]
    for _ in range(steps):
        core.step()
    core.close()
    micro = np.array(seconds) * 1e6
    return {"median_us": float(np.median(micro)), "p95_us": float(np.percentile(micro, 95))}


def device_share(sequences: int, step_time: float, depth: int, steps: int, num_drafts: int = 0) -> dict[str, float]:
    """Idle share of the device and tokens per second in steady decoding, host work and result processing included."""
    core, device = make_core(sequences, step_time, depth, num_drafts)
    fill(core, sequences)
    clock = device.clock
    busy, idle, start, done = clock.busy, clock.idle, time.perf_counter(), core.stats.steps
    tokens = num_tokens(core)
    for _ in range(steps):
        core.step()
    seconds = time.perf_counter() - start
    tokens = num_tokens(core) - tokens
    busy, idle, done = clock.busy - busy, clock.idle - idle, core.stats.steps - done
    core.close()
    return {
        "idle_share": idle / (busy + idle),
        "step_ms": 1e3 * seconds / done,
        "tokens_per_second": tokens / seconds,
    }


def main() -> None:
    """Run all measurements and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    report: dict[str, Any] = {"plan": {}, "plan with 5 drafts": {}, "asynchronous": {}, "synchronous": {}}
    for sequences in (1, 16, 64, 256, 1024):
        report["plan"][sequences] = plan_time(sequences, options.steps)
        report["plan with 5 drafts"][sequences] = plan_time(sequences, options.steps, 5)
    for step_ms in (10, 5, 4, 3.5, 3, 2.5, 2, 1):
        for name, depth in (("asynchronous", 2), ("synchronous", 1)):
            report[name][f"{step_ms} ms"] = device_share(256, step_ms / 1e3, depth, options.steps)
    report["asynchronous, 5 drafts"] = {"5 ms": device_share(256, 5e-3, 2, options.steps, 5)}
    for name, rows in report.items():
        print(name)
        for key, values in rows.items():
            print(f"  {key!s:>8}  " + "  ".join(f"{what} {value:,.4g}" for what, value in values.items()))
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

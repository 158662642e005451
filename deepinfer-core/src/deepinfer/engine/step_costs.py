"""What decode steps cost on this device: steps of many shapes, run before anything is served, and kept in a file."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer import __version__
from deepinfer.cache.pool import PagePool, SlotPool
from deepinfer.checkpoint.digest import checkpoint_digest
from deepinfer.errors import ConfigError
from deepinfer.scheduler.request import FinishReason, Request, SamplingRow
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.speculative.cost_file import load_curve, save_curve
from deepinfer.speculative.cost_model import CostCurve, StepCosts, fit_curve, row_edges

if TYPE_CHECKING:
    from deepinfer.engine.loader import LoadedModel
    from deepinfer.engine.runner import ModelRunner
    from deepinfer.scheduler.config import SchedulerConfig
    from deepinfer.settings import Settings

__all__ = ["measure_curve", "step_costs", "time_step"]

REPEATS = 5
"""Timed steps of each shape; their median counts."""
STEPS = 2 + REPEATS
"""A prompt and a step to warm up go before them."""


def step_costs(loaded: LoadedModel, settings: Settings, runner: ModelRunner, config: SchedulerConfig) -> StepCosts:
    """Step costs of an engine that serves nothing yet: those that an earlier engine kept, else measured now.

    Args:
        loaded: what it serves. settings: say where costs are kept, and how long.
        runner: its device side; what its slots and pages hold afterwards is undefined, as before.
        config: of its scheduler.

    Raises:
        ConfigError: as `measure_curve`.
    """
    directory = settings.decode_perf_cache_dir or settings.cache_dir / "step_costs"
    sequences = _most_sequences(runner, config)
    rows = min(sequences * (1 + config.num_drafts), config.max_num_batched_tokens)
    edges, padded = row_edges(np.array([config.row_bucket(count) for count in range(1, rows + 1)]))
    edges = tuple(min(edge, rows) for edge in edges)
    key = {
        "version": __version__,
        "numerics_id": loaded.numerics_id,
        "weights": "" if loaded.path is None else checkpoint_digest(loaded.path).hex(),
        "host": platform.node(),
        "device": "" if loaded.runtime is None else loaded.runtime.fingerprint(),
        "threads": torch.get_num_threads(),
        "rows": edges,
        "sequences": sequences,
        "drafts": config.num_drafts,
        "drafter": "model" if runner.drafter is None else type(runner.drafter).__qualname__,
        "verification": settings.draft_verification,
        "page_size": config.page_size,
    }
    curve = load_curve(directory, key, max_age=settings.decode_perf_cache_ttl_sec)
    if curve is None:
        curve = measure_curve(runner, config, edges, padded=padded)
        save_curve(directory, key, curve)
    return StepCosts(curve)


def measure_curve(runner: ModelRunner, config: SchedulerConfig, edges: tuple[int, ...], *, padded: bool) -> CostCurve:
    """Time real decode steps: each row count once with as many sequences and once with as few as can have them.

    Args:
        runner, config: of an engine that serves nothing.
        edges: ascending row counts. padded: as `CostCurve`.

    Raises:
        ConfigError: the context or the pages are too small for a few steps.
    """
    most, block = _most_sequences(runner, config), 1 + config.num_drafts
    shapes = sorted({(rows, count) for rows in edges for count in (min(rows, most), -(-rows // block))})
    seconds = [time_step(runner, config, rows, count) for rows, count in shapes]
    rows, sequences = np.array(shapes).T
    return fit_curve(rows, sequences, np.array(seconds), padded=padded)


def _tokens(config: SchedulerConfig) -> int:
    """Most tokens that a timed sequence generates, with one more block of drafts to choose from."""
    return (STEPS + 1) * (1 + config.num_drafts)


def _most_sequences(runner: ModelRunner, config: SchedulerConfig) -> int:
    """Sequences that can run all timed steps at once; each has its pages and one in reserve."""
    num_pages, tokens = runner.storage.pages.shape[0], 1 + _tokens(config)
    if tokens > config.max_model_len:
        raise ConfigError(
            f"a context of {config.max_model_len} tokens is too short to time decode steps; give {tokens}, or turn "
            "enable_mtp_varlen off",
            field="max_model_len",
        )
    each = 1 + -(-tokens // config.page_size)
    if num_pages - 1 < each:
        raise ConfigError(
            f"{num_pages - 1} cache pages are too few to time decode steps; give {each}, or turn enable_mtp_varlen off",
            field="cache_memory",
        )
    return min(config.max_num_seqs, (num_pages - 1) // each)


class _Spread:
    """A planner that spreads so many drafts evenly."""

    def __init__(self, drafts: int) -> None:
        self._drafts = drafts

    def admit(self, slots: NDArray[np.int32]) -> None:
        """Nothing to forget."""

    def lengths(
        self, slots: NDArray[np.int32], limits: NDArray[np.int32], *, other_rows: int, max_rows: int
    ) -> NDArray[np.int32]:
        """The drafts of each sequence."""
        each, more = divmod(self._drafts, slots.size)
        return (each + (np.arange(slots.size) < more)).astype(np.int32)


def time_step(
    runner: ModelRunner,
    config: SchedulerConfig,
    rows: int,
    sequences: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of a decode step with so many rows of so many sequences, from launch to result.

    Args:
        runner, config: of an engine that serves nothing, with room for the sequences.
        rows, sequences: at least one and at most 1 + N rows a sequence.
        clock: what time is taken with.
    """
    scheduler = Scheduler(
        replace(config, preempt_every=0),
        PagePool(runner.storage.pages.shape[0]),
        SlotPool(config.max_num_seqs + 1),
        planner=_Spread(rows - sequences),
    )
    if runner.poison_released:
        scheduler.sequences.on_release = runner.released
    tokens = np.random.default_rng(rows).integers(0, runner.traits.vocab_size, sequences)
    requests = [
        Request(str(index), tokens[index : index + 1], _tokens(config), SamplingRow(temperature=1.0, seed=index))
        for index in range(sequences)
    ]
    for request in requests:
        scheduler.add(request)
    seconds = []
    for _ in range(STEPS):
        step = scheduler.plan()
        if step is None or step.plan.num_sequences != sequences:
            raise RuntimeError(f"{sequences} sequences do not run together")
        start = clock()
        result = runner.launch(step.plan).read()
        seconds.append(clock() - start)
        scheduler.correct(step, result.accepted)
        scheduler.complete(step.plan.step)
    for request in requests:
        scheduler.finish(request, FinishReason.ABORT)
    # Steps are counted anew by whoever serves.
    runner.moved_step = -1
    return float(np.median(seconds[STEPS - REPEATS :]))

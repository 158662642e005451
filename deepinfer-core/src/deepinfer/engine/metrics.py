"""What an engine counts, as metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from deepinfer.engine.core import EngineCore
from deepinfer.observe.histogram import Histogram
from deepinfer.observe.prometheus import Family, exposition
from deepinfer.speculative.statistics import SpeculationStatistics

__all__ = ["GAUGES", "metrics_text"]

GAUGES = frozenset({"cached_pages", "snapshot_slots", "kept_snapshots"})
"""Counters of the prefix cache that may also fall."""


def metrics_text(engines: Mapping[str, EngineCore]) -> str:
    """The metrics of engines by name, in the text format of Prometheus; may be called on any thread."""
    families: dict[str, Family] = {}

    def family(name: str, kind: str, text: str) -> Family:
        return families.setdefault(name, Family(f"deepinfer_{name}", kind, text))  # type: ignore[arg-type]

    for engine, core in engines.items():
        labels = {"engine": engine}
        for name, text, value in _counters(core):
            family(name, "counter", text).values.append((labels, value))
        ends = family("requests_total", "counter", "Requests that ended, by reason.")
        ends.values += [({**labels, "reason": why}, count) for why, count in sorted(dict(core.stats.finished).items())]
        if core.stats.speculation is not None:
            _add_speculation(core.stats.speculation, labels, family)
        for name, text, value in _gauges(core):
            family(name, "gauge", text).values.append((labels, value))
        prefix = {} if core.scheduler.prefix is None else core.scheduler.prefix.counters()
        for name, value in prefix.items():
            kind, ending = ("gauge", "") if name in GAUGES else ("counter", "_total")
            text = f"Prefix cache: {name.replace('_', ' ')}."
            family(f"prefix_{name}{ending}", kind, text).values.append((labels, value))
        for name, text, histogram in _histograms(core):
            family(name, "histogram", text).histograms.append((labels, histogram))
    return exposition(families.values())


def _counters(core: EngineCore) -> list[tuple[str, str, float]]:
    stats = core.stats
    return [
        ("steps_total", "Steps of the loop.", stats.steps),
        ("failed_steps_total", "Steps that raised.", stats.failed_steps),
        ("prefill_rows_total", "Prompt rows forwarded.", stats.prefill_rows),
        ("decode_rows_total", "Output rows forwarded, drafts included.", stats.decode_rows),
        ("prefill_seconds_total", "Time of steps with prompt rows.", stats.prefill_seconds),
        ("decode_seconds_total", "Time of steps without prompt rows.", stats.decode_seconds),
        ("preemptions_total", "Times that a request lost its place to make room.", stats.preemptions),
        ("recomputations_total", "Those of them without room for its state on the host.", stats.recomputations),
    ]


def _add_speculation(
    statistics: SpeculationStatistics, labels: dict[str, str], family: Callable[[str, str, str], Family]
) -> None:
    for name, text, counts in (
        ("drafts_proposed_total", "Drafts that were ready, by position in their block.", statistics.drafted),
        ("drafts_verified_total", "Drafts that the model judged.", statistics.verified),
        ("drafts_accepted_total", "Drafts that stand.", statistics.accepted),
    ):
        values = [({**labels, "position": str(place)}, count) for place, count in enumerate(counts.tolist())]
        family(name, "counter", text).values += values
    for name, text, count in (
        ("decode_sequence_steps_total", "Decoding sequences of all steps.", statistics.sequence_steps),
        ("committed_tokens_total", "Tokens that they brought, accepted drafts included.", statistics.committed),
    ):
        family(name, "counter", text).values.append((labels, count))
    reliability = statistics.reliability
    for name, text, cells in (
        ("confidence_drafts_total", "Drafts judged behind accepted ones, by confidence.", reliability.tries),
        ("confidence_accepted_total", "Those of them that stand.", reliability.hits),
    ):
        bins = cells.shape[1]
        family(name, "counter", text).values += [
            ({**labels, "position": str(place), "below": f"{(at + 1) / bins:g}"}, float(cells[place, at]))
            for place, at in zip(*np.nonzero(reliability.tries), strict=True)
        ]
    error = family("confidence_error", "gauge", "Mean distance of confidences from measured acceptance.")
    error.values.append((labels, reliability.error()))


def _gauges(core: EngineCore) -> list[tuple[str, str, float]]:
    scheduler = core.scheduler
    pages, slots = scheduler.pages, scheduler.slots
    running = slots.capacity - slots.num_free
    return [
        ("requests_running", "Requests that hold a state slot.", running),
        ("requests_waiting", "Requests that hold none.", max(core.num_unfinished - running, 0)),
        ("pages", "Cache pages.", pages.capacity),
        ("pages_used", "Cache pages that running requests hold.", pages.num_used),
        ("slots", "State slots.", slots.capacity),
        ("preempted_bytes", "Host memory that preempted requests hold.", scheduler.preemption.host.used),
    ]


def _histograms(core: EngineCore) -> list[tuple[str, str, Histogram]]:
    recorder = core.recorder
    return [
        ("time_to_first_token_seconds", "From arrival to the first token.", recorder.time_to_first_token),
        ("queue_time_seconds", "From arrival to the launch of the first step.", recorder.queue_time),
        ("inter_token_seconds", "Between tokens of one request.", recorder.inter_token),
        ("request_seconds", "From arrival to the end of requests that got a token.", recorder.request_time),
        ("step_seconds", "From the later of launch and previous result to the result.", recorder.step_time),
        ("plan_seconds", "Planning of one step.", recorder.plan_time),
    ]

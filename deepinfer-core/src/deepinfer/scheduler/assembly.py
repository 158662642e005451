"""Turns the rows that a step takes, and what changed since the last one, into a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.scheduler.config import SchedulerConfig
from deepinfer.scheduler.plan import Changes, Move, SamplingRows, StepPlan
from deepinfer.scheduler.request import Request

__all__ = ["StepRows", "assemble"]


@dataclass(frozen=True)
class StepRows:
    """The rows of a step over S sequences: decoding ones first, then prompts.

    Attributes:
        slots: int32 [S]. counts: int32 [S], rows of each.
        starts: int32 [S], positions of the first rows, at most.
        samples: bool [S], whether the sequence draws.
        chunks: (request, rows) of the prompts, in the order of their slots.
    """

    slots: NDArray[np.int32]
    counts: NDArray[np.int32]
    starts: NDArray[np.int32]
    samples: NDArray[np.bool_]
    chunks: list[tuple[Request, int]]

    @property
    def first_prefill(self) -> int:
        """Index of the first prompt among the sequences."""
        return int(self.slots.size) - len(self.chunks)


def assemble(
    step: int,
    rows: StepRows,
    changes: Changes,
    config: SchedulerConfig,
    *,
    admitted: list[Request],
    restores: list[Move],
    snapshots: list[tuple[int, int]],
) -> StepPlan:
    """The plan of a step.

    Args:
        step: its number. rows: what runs. changes: what the device must hear of.
        config: buckets, replay and history.
        admitted: new requests. restores: what comes back from the host.
        snapshots: (slot, snapshot) to copy behind the step.
    """
    starts = rows.starts[rows.first_prefill :].tolist()
    tokens = [
        request.tokens[start : start + chunk] for (request, chunk), start in zip(rows.chunks, starts, strict=True)
    ]
    granted = [np.concatenate(part) for part in zip(*changes.grants, strict=True)] or [np.empty(0, np.int32)] * 3
    keep_from, kept_bucket = _kept(rows, config)
    back = {move.slot for move in restores}
    return StepPlan(
        step=step,
        keep_from=keep_from,
        kept_bucket=kept_bucket,
        slots=rows.slots,
        row_counts=rows.counts,
        is_prefill=np.arange(rows.slots.size) >= rows.first_prefill,
        host_tokens=np.concatenate(tokens) if tokens else np.empty(0, np.int64),
        samples=rows.samples,
        row_bucket=config.row_bucket(int(rows.counts.sum())),
        page_slots=granted[0],
        page_indices=granted[1],
        page_ids=granted[2],
        admitted_slots=np.array([request.slot for request in admitted], np.int32),
        admitted_lengths=np.array([request.start for request in admitted], np.int32),
        admitted_tokens=_tokens_before(admitted, config.history_width),
        admitted_sampling=_sampling_rows(admitted),
        admitted_outputs=tuple(request.replayed for request in admitted),
        released_slots=np.array([slot for slot in changes.released if slot not in back], np.int32),
        saves=tuple(changes.saves),
        discards=tuple(changes.discards),
        restores=tuple(restores),
        dropped=tuple(changes.dropped),
        evicted=np.concatenate(changes.evicted) if changes.evicted else np.empty(0, np.int32),
        slot_copies=np.array(changes.slot_copies, np.int32).reshape(-1, 2),
        snapshot_copies=np.array(snapshots, np.int32).reshape(-1, 2),
    )


def _kept(rows: StepRows, config: SchedulerConfig) -> tuple[NDArray[np.int32], int]:
    """Where each prompt enters the consumer half, defined by its own length alone, and the rows that do."""
    if not config.keep_tokens:
        return np.empty(0, np.int32), 0
    keep_from = np.zeros(rows.slots.size, np.int32)
    for index, (request, _) in enumerate(rows.chunks, rows.first_prefill):
        keep_from[index] = max(request.num_prompt_tokens - config.keep_tokens, 0)
    kept = np.clip(rows.starts + rows.counts - keep_from, 0, rows.counts)
    return keep_from, config.row_bucket(max(int(kept.sum()), 1))


def _tokens_before(requests: list[Request], width: int) -> NDArray[np.int64]:
    """The last tokens before the place where each prefill begins: [requests, width], -1 before position 0."""
    tokens = np.full((len(requests), width), -1, np.int64)
    for row, request in zip(tokens, requests, strict=True):
        count = min(width, request.start)
        row[width - count :] = request.tokens[request.start - count : request.start]
    return tokens


def _sampling_rows(requests: list[Request]) -> SamplingRows:
    rows = [request.sampling for request in requests]
    return SamplingRows(
        temperature=np.array([row.temperature for row in rows], np.float32),
        top_k=np.array([row.top_k for row in rows], np.int32),
        top_p=np.array([row.top_p for row in rows], np.float32),
        seed=np.array([row.seed for row in rows], np.uint64).view(np.int64),
        completion=np.array([row.completion for row in rows], np.int32),
        views=tuple(row.view for row in rows),
    )

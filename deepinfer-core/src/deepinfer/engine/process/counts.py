"""What speculation counted, as plain data: arrays as their bytes."""

from __future__ import annotations

import msgspec
import numpy as np

from deepinfer.speculative.statistics import SpeculationStatistics

__all__ = ["SpeculationFrame", "pack_speculation", "unpack_speculation"]


class SpeculationFrame(msgspec.Struct, array_like=True):
    """A `SpeculationStatistics`.

    Attributes:
        num_drafts: positions N of a draft block.
        totals: steps, sequence steps, committed tokens.
        counts: int64 [3, N], little-endian: drafted, verified, accepted.
        tables: float64 [3, N, bins], little-endian: tries, hits and confidence of the reliability table.
    """

    num_drafts: int
    totals: tuple[int, int, int]
    counts: bytes
    tables: bytes


def pack_speculation(statistics: SpeculationStatistics) -> SpeculationFrame:
    """Counts as plain data."""
    reliability = statistics.reliability
    counts = np.stack([statistics.drafted, statistics.verified, statistics.accepted]).astype("<i8")
    tables = np.stack([reliability.tries, reliability.hits, reliability.confidence]).astype("<f8")
    totals = (statistics.steps, statistics.sequence_steps, statistics.committed)
    return SpeculationFrame(statistics.num_drafts, totals, counts.tobytes(), tables.tobytes())


def unpack_speculation(frame: SpeculationFrame) -> SpeculationStatistics:
    """The counts of a frame."""
    statistics = SpeculationStatistics(frame.num_drafts)
    counts = np.frombuffer(frame.counts, "<i8").astype(np.int64)
    tables = np.frombuffer(frame.tables, "<f8").astype(np.float64)
    statistics.drafted, statistics.verified, statistics.accepted = counts.reshape(3, frame.num_drafts)
    statistics.steps, statistics.sequence_steps, statistics.committed = frame.totals
    reliability = statistics.reliability
    reliability.tries, reliability.hits, reliability.confidence = tables.reshape(3, *reliability.tries.shape)
    return statistics

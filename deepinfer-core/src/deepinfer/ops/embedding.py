"""Token embedding and the language-model head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepinfer.ops.contract import Determinism, Sample, SampleSize, Tolerance, composite, op
from deepinfer.ops.handles import DenseWeight, Rows
from deepinfer.ops.sample_inputs import RawWeight, normal, row_counts, uniform_ids

__all__ = ["LOGIT_ROW_BLOCK", "embedding", "lm_head"]

LOGIT_ROW_BLOCK = 256
"""Rows of logits computed at a time, so that workspace does not grow with the batch."""


def _embedding_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    vocab, d = {"tiny": (32, 64), "odd": (33, 67), "real": (8192, 5120)}[size]
    table = normal(generator, vocab, d)
    cases = [(label, uniform_ids(generator, vocab, rows)) for label, rows in row_counts(size)]
    for label, ids in (*cases, ("padding rows", torch.tensor([-1, 1, vocab - 2, -1]))):
        unread = torch.ones(vocab, dtype=torch.bool)
        unread[ids[ids >= 0]] = False
        yield Sample(label, {"ids": ids, "table": table}, ("ids",), {"table": unread})


@op(samples=_embedding_samples, determinism=Determinism.EXACT, tolerance=Tolerance(0.0, 0.0), activations=("table",))
def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of the embedding table; -1 gives a row of zeros.

    Args:
        ids: [T] int64.
        table: [V, d] in the compute dtype.

    Returns:
        [T, d] in the dtype of the table.
    """
    rows = table[ids.clamp(min=0)]
    return rows.masked_fill_((ids < 0)[:, None], 0.0)


def _head_samples(size: SampleSize, generator: torch.Generator) -> Iterator[Sample]:
    vocab, d = {"tiny": (64, 64), "odd": (97, 160), "real": (8192, 5120)}[size]
    dense = normal(generator, vocab, d, scale=d**-0.5).to(torch.bfloat16)
    weight = RawWeight("bf16", {"w.weight": dense}, ((vocab, d),))
    for label, rows in row_counts(size):
        yield Sample(label, {"hidden": normal(generator, rows, d), "weight": weight}, ("hidden",))


@composite(uses=("linear_accumulate",), samples=_head_samples, activations=("hidden",))
def lm_head(kernels: Any) -> Callable[[Tensor, DenseWeight], Tensor]:
    """Logits in the accumulate dtype: (hidden [S, d] normed, weight [V, d]) -> [S, V], in blocks of rows."""
    linear_accumulate = kernels.linear_accumulate

    def lm_head(hidden: Tensor, weight: DenseWeight) -> Tensor:
        if hidden.shape[0] <= LOGIT_ROW_BLOCK:
            return linear_accumulate(Rows(hidden, hidden), weight)
        blocks = hidden.split(LOGIT_ROW_BLOCK)
        return torch.cat([linear_accumulate(Rows(block, block), weight) for block in blocks])

    return lm_head

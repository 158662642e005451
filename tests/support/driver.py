"""Runs sequences through a model in a straight line: real step inputs and caches, no scheduler and no sampler."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.cache.layout import POISON
from deepinfer.engine.runner import history_length, pack_plan
from deepinfer.models.deepseek_v41.graph import Graph
from deepinfer.models.deepseek_v41.spec import DeepseekV41
from deepinfer.ops.draft import DraftResult
from deepinfer.ops.step import SlotRecords, StepInputs
from deepinfer.scheduler.plan import SamplingRows, StepPlan

__all__ = ["Driver", "Part", "Step", "insert_padding", "splits_of"]

ROW_FIELDS = (
    "token_ids",
    "positions",
    "slots",
    "first_positions",
    "sequences",
    "history",
    "is_image",
    "window_low",
    "commit_rows",
    "last_positions",
)
"""Per-row fields of `StepInputs` that padding leaves as they are; `first_rows` moves too."""


@dataclass(frozen=True)
class Part:
    """One sequence's rows in a step: tokens of a prompt, or `count` rows that the device record brings."""

    slot: int
    tokens: tuple[int, ...] | None = None
    count: int = 1

    @property
    def rows(self) -> int:
        return self.count if self.tokens is None else len(self.tokens)


@dataclass(frozen=True)
class Step:
    """What a step did: its inputs as planned and the logits of every row, by slot, [rows, V]."""

    parts: tuple[Part, ...]
    inputs: StepInputs
    logits: dict[int, Tensor]


class Driver:
    """Slots, pages and records around one model.

    Args:
        model: a loaded model. slots, pages: handed out, without the reserved ones.
        graph: another graph over the same weights, for instance one that records.
        fill: byte of all memory that was never written.
        shuffle: seed of the order in which physical pages are granted; None: ascending.
    """

    def __init__(
        self,
        model: DeepseekV41,
        *,
        slots: int = 4,
        pages: int = 96,
        graph: Graph | None = None,
        fill: int = POISON,
        shuffle: int | None = None,
    ) -> None:
        self.model, self.graph = model, model.graph if graph is None else graph
        traits = model.traits
        self.page_size, drafts = model.layout.page_size, traits.max_drafts
        history = history_length(traits.ngram_size, drafts)
        self.records = SlotRecords.allocate(slots + 1, pages, drafts, history)
        self.storage = model.allocate_caches(pages + 1, slots + 1)
        if fill != POISON:
            self.storage.pages.fill_(fill)
            self.storage.slots.fill_(fill)
        order = np.arange(1, pages + 1)
        if shuffle is not None:
            np.random.default_rng(shuffle).shuffle(order)
        self._free = [int(page) for page in order]
        self._pages: dict[int, list[int]] = {}
        self._new: list[int] = []
        self._released: list[int] = []
        self.lengths: dict[int, int] = {}

    def admit(self, *slots: int) -> None:
        """Give slots to new sequences, from the next step on."""
        for slot in slots:
            assert slot not in self._pages, f"slot {slot} is in use"
            self._pages[slot], self.lengths[slot] = [], 0
            self._new.append(slot)

    def release(self, *slots: int) -> None:
        """End sequences; the newest freed page is the next one to be granted."""
        for slot in slots:
            self._free = self._pages.pop(slot)[::-1] + self._free
            del self.lengths[slot]
            if slot in self._new:
                self._new.remove(slot)
            self._released.append(slot)

    def pages_of(self, slot: int) -> list[int]:
        """Physical pages of a sequence, in the order of its positions."""
        return list(self._pages[slot])

    def plan(self, parts: Sequence[Part], row_bucket: int = 0) -> StepPlan:
        """The plan of these rows: admissions, page grants and releases that are due."""
        grants: list[tuple[int, int, int]] = []
        for part in parts:
            owned = self._pages[part.slot]
            while len(owned) * self.page_size < self.lengths[part.slot] + part.rows:
                owned.append(self._free.pop(0))
                grants.append((part.slot, len(owned) - 1, owned[-1]))
        columns = np.array(grants, np.int32).reshape(-1, 3).T
        new, released = self._new, self._released
        self._new, self._released = [], []
        count = len(new)
        return StepPlan(
            step=0,
            slots=np.array([part.slot for part in parts], np.int32),
            row_counts=np.array([part.rows for part in parts], np.int32),
            is_prefill=np.array([part.tokens is not None for part in parts], np.bool_),
            host_tokens=np.array([token for part in parts for token in part.tokens or ()], np.int64),
            samples=np.ones(len(parts), np.bool_),
            row_bucket=max(row_bucket, sum(part.rows for part in parts)),
            page_slots=columns[0],
            page_indices=columns[1],
            page_ids=columns[2],
            admitted_slots=np.array(new, np.int32),
            admitted_lengths=np.zeros(count, np.int32),
            admitted_tokens=np.full((count, self.model.traits.ngram_size - 1), -1, np.int64),
            admitted_sampling=SamplingRows(
                np.zeros(count, np.float32),
                np.full(count, -1, np.int32),
                np.ones(count, np.float32),
                np.zeros(count, np.int64),
                np.zeros(count, np.int32),
            ),
            released_slots=np.array(released, np.int32),
        )

    @torch.inference_mode()
    def step(self, parts: Sequence[Part], *, row_bucket: int = 0, gaps: Sequence[int] | None = None) -> Step:
        """Run a step and compute the logits of all of its rows; `commit` afterwards.

        Args:
            parts: at most one per slot, in the order of the rows.
            row_bucket: pad to so many rows.
            gaps: padding rows in front of each part's rows.
        """
        plan = pack_plan(self.plan(parts, row_bucket), torch.from_numpy)
        layout, traits = self.model.layout, self.model.traits
        inputs = self.model.table.expand_plan(
            self.records, plan, int(max(row_bucket, sum(part.rows for part in parts))),
            sum(part.rows for part in parts), layout.ring_length, traits.ngram_size,
        )  # fmt: skip
        shown = inputs if gaps is None else insert_padding(inputs, gaps)
        rows = (shown.positions >= 0).nonzero().squeeze(1)
        result = self.graph.forward(dataclasses.replace(shown, sample_rows=rows), self.storage)
        logits = {int(slot): result.logits[shown.slots[rows] == slot] for slot in shown.slots[rows].unique()}
        return Step(tuple(parts), inputs, logits)

    @torch.inference_mode()
    def commit(
        self,
        step: Step,
        tokens: Sequence[int] | None = None,
        *,
        rejected: Sequence[int] | None = None,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Write what a step decided: next token (argmax without one), rejected rows and proposals of each part."""
        chosen = [int(step.logits[part.slot][-1].argmax()) for part in step.parts] if tokens is None else tokens
        refused = [0] * len(step.parts) if rejected is None else rejected
        proposals = confidences = None
        if drafts is not None:
            width = self.records.drafts.shape[1]
            proposals = torch.tensor([[*row, *[-1] * (width - len(row))] for row in drafts])
            confidences = torch.zeros(proposals.shape)
        count = torch.tensor(refused, dtype=torch.int64)
        tokens_of = torch.tensor(chosen, dtype=torch.int64)
        self.model.table.commit_step(self.records, step.inputs, tokens_of, count, proposals, confidences)
        for part, lost in zip(step.parts, refused, strict=True):
            self.lengths[part.slot] += part.rows - lost

    def run(self, parts: Sequence[Part], **options: object) -> dict[int, Tensor]:
        """`step` and `commit` with the argmax; the logits of all rows by slot."""
        step = self.step(parts, **options)  # type: ignore[arg-type]
        self.commit(step)
        return step.logits

    def prefill(self, slot: int, tokens: Sequence[int], chunks: Sequence[int] = ()) -> Tensor:
        """Run a prompt in chunks of the given lengths (the last one takes the rest); logits of all rows [len, V]."""
        parts = [Part(slot, tuple(tokens[start:end])) for start, end in splits_of(len(tokens), chunks)]
        return torch.cat([self.run([part])[slot] for part in parts])

    def decode(self, slot: int) -> Tensor:
        """Run the next token of a sequence: logits [V]."""
        return self.run([Part(slot)])[slot][0]

    def verify(self, slot: int, tokens: Sequence[int], rejected: int = 0) -> Tensor:
        """Run a next token and drafts of our choice as one verification step, then drop the last `rejected` rows."""
        self.records.next_token[slot] = tokens[0]
        self.records.drafts[slot, : len(tokens) - 1] = torch.tensor(tokens[1:], dtype=torch.int64)
        self.records.draft_count[slot] = len(tokens) - 1
        step = self.step([Part(slot, count=len(tokens))])
        self.commit(step, rejected=[rejected])
        return step.logits[slot]

    @torch.inference_mode()
    def draft(self, *slots: int, anchors: Sequence[int] | None = None) -> DraftResult:
        """Draft a block after the next token of each slot, or after the given ones."""
        index = torch.tensor(slots, dtype=torch.int64)
        given = self.records.next_token[index] if anchors is None else torch.tensor(anchors, dtype=torch.int64)
        return self.graph.draft(given, self.records.length[index] - 1, index, self.storage)


def splits_of(length: int, chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Spans of consecutive chunks that cover `length`; the last one takes the rest."""
    spans, start = [], 0
    for chunk in chunks:
        if start + chunk >= length:
            break
        spans.append((start, start + chunk))
        start += chunk
    return [*spans, (start, length)]


def insert_padding(inputs: StepInputs, gaps: Sequence[int]) -> StepInputs:
    """The same step with padding rows in front of each sequence's rows."""
    sequence = inputs.sequences.clamp(min=0)
    shift = torch.cumsum(torch.tensor(gaps, dtype=torch.int64), 0)[sequence]
    place = torch.where(inputs.sequences >= 0, torch.arange(sequence.shape[0]) + shift, -1)
    live = place >= 0
    total = sequence.shape[0] + int(sum(gaps))

    def spread(values: Tensor) -> Tensor:
        fill = False if values.dtype is torch.bool else -1
        out = torch.full((total, *values.shape[1:]), fill, dtype=values.dtype)
        out[place[live]] = values[live]
        return out

    rows = {name: spread(getattr(inputs, name)) for name in ROW_FIELDS}
    first = torch.where(live, inputs.first_rows + shift, -1)
    return dataclasses.replace(inputs, first_rows=spread(first), **rows)

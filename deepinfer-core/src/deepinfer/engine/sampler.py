"""Draws the tokens of a step: which rows need which step of the pipeline is known on the host.

The host knows the layout of a step's rows and what each request asks for, so rows are picked without asking the device
for anything. Penalty counts live on the device and grow by the tokens that verification accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.engine.logit_changes import BLOCK_ELEMENTS, BYTES_PER_ELEMENT, CHANGING, LogitChanges, blocks
from deepinfer.engine.outputs import Logprob, TokenLogprobs
from deepinfer.engine.slot_tables import SlotTables
from deepinfer.engine.transfers import Transfers
from deepinfer.ops.logits import token_logprobs_bytes
from deepinfer.ops.step import SlotRecords, StepInputs
from deepinfer.sampling.slots import Feature, SlotSampling
from deepinfer.scheduler.plan import StepPlan

if TYPE_CHECKING:
    from deepinfer.engine.grammars import Masks
    from deepinfer.engine.loader import StepOps

__all__ = ["Drawn", "LogprobRows", "Sampler", "fed_tokens", "sampler_bytes"]


def sampler_bytes(rows: int, vocab_size: int) -> int:
    """Most bytes of temporaries beside those of `sample_step`: untouched logits and one block's work."""
    block = min(rows, max(1, BLOCK_ELEMENTS // vocab_size)) * vocab_size
    return rows * vocab_size * 4 + max(block * BYTES_PER_ELEMENT, token_logprobs_bytes(rows, vocab_size))


@dataclass(frozen=True)
class LogprobRows:
    """Log-probabilities of some rows; on the device until they are read.

    Attributes:
        rows: int64 [P], host; indices of sampled rows, or positions of a prompt's tokens.
        slot: int, of the prompt; -1 for sampled rows.
        chosen: float32 [P]. ranks: int64 [P].
        ids: int64 [P, k]. values: float32 [P, k].
    """

    rows: NDArray[np.int64]
    chosen: Any
    ranks: Any
    ids: Any
    values: Any
    slot: int = -1

    def at(self, index: int, token: int, count: int) -> TokenLogprobs:
        """Log-probabilities of one row that was read: the most probable ids, and the given one."""
        found = {
            int(self.ids[index, place]): Logprob(float(self.values[index, place]), place + 1) for place in range(count)
        }
        found.setdefault(token, Logprob(float(self.chosen[index]), int(self.ranks[index])))
        return found

    def on_their_way(self, transfers: Transfers) -> LogprobRows:
        """The same rows under way to the host."""
        fetch = transfers.fetch
        chosen, ranks, ids, values = fetch(self.chosen), fetch(self.ranks), fetch(self.ids), fetch(self.values)
        return LogprobRows(self.rows, chosen, ranks, ids, values, self.slot)

    def read(self) -> LogprobRows:
        """As arrays, once they have arrived."""
        chosen, ranks, ids, values = (x.cpu().numpy() for x in (self.chosen, self.ranks, self.ids, self.values))
        return LogprobRows(self.rows, chosen, ranks, ids, values, self.slot)


@dataclass(frozen=True)
class Drawn:
    """Tokens int64 [R] and status int32 [R] of sampled rows, and the log-probabilities that were asked for."""

    tokens: Tensor
    status: Tensor
    logprobs: LogprobRows | None = None


@dataclass(frozen=True)
class _Rows:
    """Where the sampled rows of a step are: arrays [R] of the host, tensors [R] of the device."""

    sequences: NDArray[np.int64]
    starts: NDArray[np.int64]
    features: NDArray[np.uint16]
    slots: Tensor
    output_index: Tensor


def fed_tokens(inputs: StepInputs) -> Tensor:
    """Token that each sampled row was fed: int64 [R], -1 for padding."""
    return torch.where(inputs.sample_rows >= 0, inputs.token_ids[inputs.sample_rows.clamp(min=0)], -1)


class Sampler:
    """The sampling side of a runner; called in the order of the steps.

    Args:
        ops: bound kernels. tables: what requests ask for, by slot.
        proposals: float32 [slots, N, V], what drafts were drawn from, for rejection sampling; None: a verify row draws
            as every other row does.
    """

    def __init__(self, ops: StepOps, tables: SlotTables, proposals: Tensor | None = None) -> None:
        self.tables, self.proposals = tables, proposals
        self.changes = LogitChanges(ops, tables)
        # Bound once: a step looks nothing up.
        self._sample, self._filter, self._mask = ops.sample_step, ops.apply_filters, ops.apply_token_mask
        self._force, self._count, self._logprobs = ops.force_tokens, ops.count_tokens, ops.token_logprobs
        self._judge = None if proposals is None else ops.judge_step

    def draw(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        logits: Tensor,
        records: SlotRecords,
        masks: Masks | None = None,
    ) -> Drawn:
        """Draw after each sampled row: token -1 and status 0 for padding.

        Args:
            plan: of the step. inputs: expanded from it.
            logits: [R, V] of `inputs.sample_rows`; changed in place.
            records: of the slots.
            masks: of the rows that follow a grammar, on the host; None: no row does.
        """
        rows, send = self._rows(plan, inputs), self.tables.send
        logits = logits.to(torch.float32)
        wanted = np.flatnonzero(rows.features & Feature.LOGPROBS)
        changes = bool((rows.features & CHANGING).any()) or masks is not None
        raw = logits[send(wanted)] if wanted.size and changes else logits

        def pending(chosen: NDArray[np.int64], index: Tensor) -> Tensor:
            return self._pending(rows, inputs, chosen)

        logits = self.changes.apply(logits, rows.features, rows.slots, rows.output_index, pending)
        if masks is not None:
            logits = self._masked(logits, *masks)
        slots = rows.slots.clamp(min=0)
        filters = [records.temperature[slots], records.top_k[slots], records.top_p[slots]]
        draws = [records.seed[slots], inputs.sample_positions + 1, records.completion[slots]]
        min_p = self.tables.min_p_of(slots, rows.features)
        if self._judge is None:
            tokens, status = self._sample(logits, *filters, *draws, *([] if min_p is None else [min_p]))
        else:
            least = torch.zeros_like(filters[0]) if min_p is None else min_p
            drafts, places = self._drafts(rows, inputs)
            tokens, status = self._judge(logits, *filters, *draws, drafts, places, least, self.proposals)
        if (rows.features & Feature.FORCE).any():
            forced = self.tables.only(Feature.FORCE, rows.features, rows.slots)
            tokens = self._force(tokens, forced, rows.output_index, self.tables.forced)
        sampled = inputs.sample_rows >= 0
        tokens, status = torch.where(sampled, tokens, -1), torch.where(sampled, status, 0)
        if not wanted.size:
            return Drawn(tokens, status)
        if not changes:
            raw = logits[send(wanted)]
        processed = (logits, filters if min_p is None else [*filters, min_p])
        return Drawn(tokens, status, self._chosen_logprobs(rows, plan, wanted, raw, processed, tokens))

    def count(self, plan: StepPlan, inputs: StepInputs, tokens: Tensor, accepted: Tensor) -> None:
        """Count the tokens that stand into the penalty tables: tokens int64 [R], accepted int64 [S]."""
        penalised = self.tables.features(plan.slots) & Feature.PENALTY
        counts = plan.sample_counts
        chosen = np.flatnonzero((penalised != 0) & (counts > 0))
        if not chosen.size:
            return
        starts = np.cumsum(counts, dtype=np.int64) - counts
        offset = np.arange(int(counts[chosen].max()))
        index = np.minimum(starts[chosen, None] + offset, max(tokens.shape[0] - 1, 0))
        sequences = self.tables.send(chosen)
        emitted = tokens[self.tables.send(index)]
        stands = self.tables.send(offset)[None] < accepted[sequences][:, None]
        self._count(self.tables.counts, inputs.seq_slots[sequences], torch.where(stands, emitted, -1))

    def prompt_rows(self, plan: StepPlan) -> NDArray[np.int64]:
        """Rows of the step whose logits are needed for prompt log-probabilities."""
        return np.concatenate([rows for _, _, rows, _ in self._prompt_parts(plan)] or [np.zeros(0, np.int64)])

    def prompt_logprobs(self, plan: StepPlan, logits: Tensor) -> tuple[LogprobRows, ...]:
        """Log-probabilities of the prompt tokens after the rows of `prompt_rows`: logits [P, V] of those rows.

        Advances the prompts, so it is called once a step.
        """
        found, at = [], 0
        for slot, first, rows, view in self._prompt_parts(plan):
            part = logits[at : at + rows.size]
            at += rows.size
            positions = np.arange(first + 1, first + 1 + rows.size)
            targets = self.tables.send(view.prompt[positions])
            count = view.params.prompt_logprobs
            chosen, ranks, ids, values = self._logprobs(part, targets, count)
            found.append(LogprobRows(positions, chosen, ranks, ids, values, slot))
        asking = self.tables.features(plan.slots) & Feature.PROMPT_LOGPROBS
        for index in np.flatnonzero((asking != 0) & plan.is_prefill).tolist():
            self.tables.filled[plan.slots[index]] += plan.row_counts[index]
        return tuple(found)

    def _prompt_parts(self, plan: StepPlan) -> list[tuple[int, int, NDArray[np.int64], SlotSampling]]:
        """Slot, first position, rows and request of each prompt chunk whose tokens are scored."""
        asking = np.flatnonzero(((self.tables.features(plan.slots) & Feature.PROMPT_LOGPROBS) != 0) & plan.is_prefill)
        if not asking.size:
            return []
        ends = np.cumsum(plan.row_counts, dtype=np.int64)
        parts = []
        for index in asking.tolist():
            slot = int(plan.slots[index])
            view, first = self.tables.views[slot], int(self.tables.filled[slot])
            assert view is not None
            # The last prompt token has nothing after it in the prompt.
            count = min(int(plan.row_counts[index]), view.prompt.size - 1 - first)
            start = int(ends[index] - plan.row_counts[index])
            if count > 0:
                parts.append((slot, first, np.arange(start, start + count), view))
        return parts

    def _rows(self, plan: StepPlan, inputs: StepInputs) -> _Rows:
        counts = plan.sample_counts
        sequences = np.repeat(np.arange(counts.size), counts)
        starts = (np.cumsum(counts, dtype=np.int64) - counts)[sequences]
        features = self.tables.features(plan.slots)[sequences]
        extra = inputs.sample_rows.shape[0] - sequences.size
        if extra:
            sequences, starts = np.pad(sequences, (0, extra)), np.pad(starts, (0, extra))
            features = np.pad(features, (0, extra))
        sampled = inputs.sample_rows >= 0
        slots = torch.where(sampled, inputs.slots[inputs.sample_rows.clamp(min=0)], -1)
        output_index = inputs.sample_positions + 1 - self.tables.prompt_length[slots.clamp(min=0)]
        return _Rows(sequences, starts, features, slots, output_index)

    def _masked(self, logits: Tensor, mask: NDArray[np.int32], mask_rows: NDArray[np.int64]) -> Tensor:
        """What grammars allow, for the rows that follow one, in blocks of rows."""
        words = self.tables.send(mask)
        needed = np.flatnonzero(mask_rows >= 0)
        for chosen in blocks(needed, self.tables.vocab_size):
            index = self.tables.send(chosen)
            logits[index] = self._mask(logits[index], words, self.tables.send(mask_rows[chosen]))
        return logits

    def _pending(self, rows: _Rows, inputs: StepInputs, chosen: NDArray[np.int64]) -> Tensor:
        """Drafts that stand before each of some rows in its sequence: int64 [rows, D], -1 for none."""
        offset = chosen - rows.starts[chosen]
        before = np.arange(int(offset.max()))
        index = np.where(before < offset[:, None], rows.starts[chosen, None] + 1 + before, -1)
        fed = fed_tokens(inputs)
        found = self.tables.send(index)
        return torch.where(found >= 0, fed[found.clamp(min=0)], -1)

    def _drafts(self, rows: _Rows, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """The draft that each row judges, int64 [R], -1 for none, and its place among the proposals."""
        fed, sequences = fed_tokens(inputs), inputs.sample_sequences
        follows = (sequences >= 0) & (sequences.roll(-1) == sequences)
        follows[-1:] = False
        offset = self.tables.send(np.arange(rows.starts.size) - rows.starts)
        depth = 0 if self.proposals is None else self.proposals.shape[1]
        places = torch.where(follows, rows.slots * depth + offset, -1)
        return torch.where(follows, fed.roll(-1), -1), places

    def _chosen_logprobs(
        self,
        rows: _Rows,
        plan: StepPlan,
        wanted: NDArray[np.int64],
        raw: Tensor,
        processed: tuple[Tensor, list[Tensor]],
        tokens: Tensor,
    ) -> LogprobRows:
        slots = plan.slots[rows.sequences[wanted]].tolist()
        views = [self.tables.views[slot] for slot in slots]
        count = max(view.params.logprobs or 0 for view in views if view is not None)
        index = self.tables.send(wanted)
        flagged = np.flatnonzero(rows.features[wanted] & Feature.PROCESSED)
        logits, filters = processed
        for block in blocks(flagged, self.tables.vocab_size):
            part = index[self.tables.send(block)]
            raw[self.tables.send(block)] = self._filter(logits[part], *(value[part] for value in filters))
        chosen, ranks, ids, values = self._logprobs(raw, tokens[index], count)
        return LogprobRows(wanted, chosen, ranks, ids, values)

"""Draws the tokens of a step: per-slot tables on the device, and which rows need which of them, known on the host.

The host knows the layout of a step's rows and what each request asks for, so rows are picked without asking the device
for anything. Penalty counts live on the device and grow by the tokens that verification accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.engine.outputs import Logprob, TokenLogprobs
from deepinfer.ops.logits import token_logprobs_bytes
from deepinfer.ops.step import SlotRecords, StepInputs
from deepinfer.sampling.params import MAX_LOGIT_BIAS
from deepinfer.sampling.slots import Feature, SlotSampling, pack_ids
from deepinfer.scheduler.plan import StepPlan

__all__ = ["Drawn", "LogprobRows", "Sampler", "sampler_bytes", "sampler_table_bytes"]

FORCED_WIDTH = 4096
BLOCK_ELEMENTS = 1 << 20
BYTES_PER_ELEMENT = 48
"""Temporaries of the operations before the filters, per logit of a block."""
ADJUSTED = Feature.BIAS | Feature.PENALTY | Feature.BAN


def sampler_table_bytes(num_slots: int, vocab_size: int) -> int:
    """Bytes of all tables once every kind of request has been seen; each kind is allocated on its first request.

    Forced tokens are counted up to 4,096 of them a request; longer lists take 4 bytes a token and slot more.
    """
    words = -(-vocab_size // 32)
    return num_slots * (4 * vocab_size + 3 * 4 * words + 8 * MAX_LOGIT_BIAS + 4 * FORCED_WIDTH + 32)


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

    def read(self) -> LogprobRows:
        """Copy to the host."""
        chosen, ranks, ids, values = (x.cpu().numpy() for x in (self.chosen, self.ranks, self.ids, self.values))
        return LogprobRows(self.rows, chosen, ranks, ids, values, self.slot)


@dataclass(frozen=True)
class Drawn:
    """Tokens int64 [R] and status int32 [R] of sampled rows, and the log-probabilities that were asked for."""

    tokens: Tensor
    status: Tensor
    logprobs: LogprobRows | None = None


@dataclass
class _Tables:
    """Device tables by slot; those that are None have not been needed yet."""

    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    min_tokens: Tensor
    prompt_length: Tensor
    counts: Tensor | None = None
    prompt_bits: Tensor | None = None
    allowed: Tensor | None = None
    ending: Tensor | None = None
    bias_ids: Tensor | None = None
    bias_values: Tensor | None = None
    forced: Tensor | None = None


@dataclass(frozen=True)
class _Saved:
    """A preempted request's side of the tables."""

    view: SlotSampling
    counts: Tensor | None
    filled: int


@dataclass(frozen=True)
class _Rows:
    """Where the sampled rows of a step are: arrays [R] of the host, tensors [R] of the device."""

    sequences: NDArray[np.int64]
    starts: NDArray[np.int64]
    features: NDArray[np.uint16]
    slots: Tensor
    output_index: Tensor


@dataclass
class _Host:
    """What the host knows of each slot."""

    views: list[SlotSampling | None]
    features: NDArray[np.uint16]
    filled: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


class Sampler:
    """The sampling side of a runner; called in the order of the steps.

    Args:
        table: bound kernels. vocab_size: V. num_slots: slot 0 included. device: of the tables.
    """

    def __init__(self, table: Any, vocab_size: int, num_slots: int, device: torch.device) -> None:
        self.vocab_size, self.num_slots, self.device = vocab_size, num_slots, device
        zeros = {name: torch.zeros(num_slots, device=device) for name in ("min_p", "presence", "frequency")}
        whole = {
            name: torch.zeros(num_slots, dtype=torch.int64, device=device) for name in ("min_tokens", "prompt_length")
        }
        self._tables = _Tables(**zeros, **whole, repetition=torch.ones(num_slots, device=device))
        self._host = _Host([None] * num_slots, np.zeros(num_slots, np.uint16), np.zeros(num_slots, np.int64))
        self._saved: dict[int, _Saved] = {}
        # Bound once: a step looks nothing up.
        self._sample, self._filter = table.sample_step, table.apply_filters
        self._bias, self._penalise, self._forbid = table.add_bias, table.apply_penalties, table.forbid_tokens
        self._force, self._count, self._logprobs = table.force_tokens, table.count_tokens, table.token_logprobs
        self._mask = table.apply_token_mask

    # ---- requests in and out ---------------------------------------------------------------------------------------

    def admit(self, plan: StepPlan) -> None:
        """Enter the admitted requests of a plan into the tables of their slots."""
        views = plan.admitted_sampling.views or (None,) * plan.admitted_slots.size
        outputs = plan.admitted_outputs or (np.empty(0, np.int64),) * plan.admitted_slots.size
        lengths = plan.admitted_lengths.tolist()
        for slot, length, view, output in zip(plan.admitted_slots.tolist(), lengths, views, outputs, strict=True):
            # Who has generated tokens has had its prompt scored.
            filled = view.prompt.size if view is not None and output.size else length
            self._enter(slot, view, filled)
            if output.size and view is not None and Feature.PENALTY in view.features:
                counts = np.bincount(output, minlength=self.vocab_size).astype(np.int32)
                self._table("counts", 0, torch.int32, self.vocab_size)[slot] = self._send(counts)

    def save(self, key: int, slot: int) -> None:
        """Keep what the tables hold of a preempted request."""
        view = self._host.views[slot]
        if view is not None:
            table = self._tables.counts if self._host.features[slot] & Feature.PENALTY else None
            # A copy on the device: made in the order of the steps, without a wait, 4 bytes an id.
            counts = None if table is None else table[slot].clone()
            self._saved[key] = _Saved(view, counts, int(self._host.filled[slot]))

    def restore(self, key: int, slot: int) -> None:
        """Give a resumed request its place in another slot."""
        saved = self._saved.pop(key, None)
        self._enter(slot, None if saved is None else saved.view, 0 if saved is None else saved.filled)
        if saved is not None and saved.counts is not None:
            self._table("counts", 0, torch.int32, self.vocab_size)[slot] = saved.counts

    def drop(self, key: int) -> None:
        """Forget a preempted request."""
        self._saved.pop(key, None)

    def _enter(self, slot: int, view: SlotSampling | None, filled: int) -> None:
        features = Feature(0) if view is None else view.features
        self._host.views[slot], self._host.features[slot], self._host.filled[slot] = view, features, filled
        if view is None:
            return
        tables, params = self._tables, view.params
        tables.min_p[slot] = params.min_p
        tables.prompt_length[slot] = view.prompt.size
        tables.min_tokens[slot] = params.min_tokens
        if Feature.PENALTY in features:
            self._enter_penalties(slot, view)
        if Feature.BAN in features:
            allowed = self._table("allowed", -1, torch.int32, -(-self.vocab_size // 32))
            ending = self._table("ending", 0, torch.int32, -(-self.vocab_size // 32))
            allowed[slot] = self._send(view.allowed_words(self.vocab_size))
            ending[slot] = self._send(pack_ids(view.ending, self.vocab_size))
        if Feature.BIAS in features:
            pairs = params.bias
            ids = self._table("bias_ids", -1, torch.int32, len(pairs))
            values = self._table("bias_values", 0, torch.float32, len(pairs))
            ids[slot] = -1
            ids[slot, : len(pairs)] = self._send(np.array([token for token, _ in pairs], np.int32))
            values[slot, : len(pairs)] = self._send(np.array([value for _, value in pairs], np.float32))
        if Feature.FORCE in features:
            forced = self._table("forced", -1, torch.int32, len(params.forced))
            forced[slot] = -1
            forced[slot, : len(params.forced)] = self._send(np.array(params.forced, np.int32))

    def _enter_penalties(self, slot: int, view: SlotSampling) -> None:
        tables, params = self._tables, view.params
        tables.repetition[slot] = params.repetition_penalty
        tables.presence[slot] = params.presence_penalty
        tables.frequency[slot] = params.frequency_penalty
        self._table("counts", 0, torch.int32, self.vocab_size)[slot] = 0
        bits = self._table("prompt_bits", 0, torch.int32, -(-self.vocab_size // 32))
        bits[slot] = self._send(pack_ids(np.unique(view.prompt), self.vocab_size))

    def _table(self, name: str, empty: int, dtype: torch.dtype, width: int) -> Tensor:
        """A table of at least this width, in powers of two but for tables over the vocabulary."""
        found: Tensor | None = getattr(self._tables, name)
        if found is None or found.shape[1] < width:
            wide = width if name in ("counts", "prompt_bits", "allowed", "ending") else 1 << (width - 1).bit_length()
            grown = torch.full((self.num_slots, wide), empty, dtype=dtype, device=self.device)
            if found is not None:
                grown[:, : found.shape[1]] = found
            setattr(self._tables, name, grown)
            found = grown
        return found

    def _send(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    # ---- one step --------------------------------------------------------------------------------------------------

    def draw(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        logits: Tensor,
        records: SlotRecords,
        masks: tuple[NDArray[np.int32], NDArray[np.int64]] | None = None,
    ) -> Drawn:
        """Draw after each sampled row: token -1 and status 0 for padding.

        Args:
            plan: of the step. inputs: expanded from it.
            logits: [R, V] of `inputs.sample_rows`; changed in place.
            records: of the slots.
            masks: int32 [M, ceil(V / 32)] and int64 [R], as `apply_token_mask` takes them, of the rows that follow a
                grammar, on the host; None: no row does.
        """
        sample_rows = inputs.sample_rows
        rows = self._rows(plan, inputs)
        logits = logits.to(torch.float32)
        wanted = np.flatnonzero(rows.features & Feature.LOGPROBS)
        changes = bool((rows.features & ADJUSTED).any()) or masks is not None
        raw = logits[self._send(wanted)] if wanted.size and changes else logits
        logits = self._adjust(rows, inputs, logits)
        if masks is not None:
            logits = self._masked(logits, *masks)
        slots = rows.slots.clamp(min=0)
        filters = [records.temperature[slots], records.top_k[slots], records.top_p[slots]]
        draws = [records.seed[slots], inputs.sample_positions + 1, records.completion[slots]]
        min_p = [self._tables.min_p[slots]] if (rows.features & Feature.MIN_P).any() else []
        if min_p:
            flagged = self._send((rows.features & Feature.MIN_P) != 0)
            min_p = [torch.where(flagged, min_p[0], 0.0)]
        tokens, status = self._sample(logits, *filters, *draws, *min_p)
        if (rows.features & Feature.FORCE).any():
            forced = self._only(rows, Feature.FORCE)
            tokens = self._force(tokens, forced, rows.output_index, self._tables.forced)
        sampled = sample_rows >= 0
        tokens, status = torch.where(sampled, tokens, -1), torch.where(sampled, status, 0)
        if not wanted.size:
            return Drawn(tokens, status)
        if not changes:
            raw = logits[self._send(wanted)]
        processed = (logits, [*filters, *min_p])
        return Drawn(tokens, status, self._chosen_logprobs(rows, plan, wanted, raw, processed, tokens))

    def count(self, plan: StepPlan, inputs: StepInputs, tokens: Tensor, accepted: Tensor) -> None:
        """Count the tokens that stand into the penalty tables: tokens int64 [R], accepted int64 [S]."""
        penalised = self._features(plan.slots) & Feature.PENALTY
        counts = plan.sample_counts
        chosen = np.flatnonzero((penalised != 0) & (counts > 0))
        if not chosen.size:
            return
        starts = np.cumsum(counts, dtype=np.int64) - counts
        offset = np.arange(int(counts[chosen].max()))
        index = np.minimum(starts[chosen, None] + offset, max(tokens.shape[0] - 1, 0))
        sequences = self._send(chosen)
        emitted = tokens[self._send(index)]
        stands = self._send(offset)[None] < accepted[sequences][:, None]
        self._count(self._tables.counts, inputs.seq_slots[sequences], torch.where(stands, emitted, -1))

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
            targets = self._send(view.prompt[positions])
            count = view.params.prompt_logprobs
            chosen, ranks, ids, values = self._logprobs(part, targets, count)
            found.append(LogprobRows(positions, chosen, ranks, ids, values, slot))
        asking = self._features(plan.slots) & Feature.PROMPT_LOGPROBS
        for index in np.flatnonzero((asking != 0) & plan.is_prefill).tolist():
            self._host.filled[plan.slots[index]] += plan.row_counts[index]
        return tuple(found)

    def _prompt_parts(self, plan: StepPlan) -> list[tuple[int, int, NDArray[np.int64], SlotSampling]]:
        """Slot, first position, rows and request of each prompt chunk whose tokens are scored."""
        asking = np.flatnonzero(((self._features(plan.slots) & Feature.PROMPT_LOGPROBS) != 0) & plan.is_prefill)
        if not asking.size:
            return []
        ends = np.cumsum(plan.row_counts, dtype=np.int64)
        parts = []
        for index in asking.tolist():
            slot = int(plan.slots[index])
            view, first = self._host.views[slot], int(self._host.filled[slot])
            assert view is not None
            # The last prompt token has nothing after it in the prompt.
            count = min(int(plan.row_counts[index]), view.prompt.size - 1 - first)
            start = int(ends[index] - plan.row_counts[index])
            if count > 0:
                parts.append((slot, first, np.arange(start, start + count), view))
        return parts

    def _features(self, slots: NDArray[np.int32]) -> NDArray[np.uint16]:
        return np.where(slots >= 0, self._host.features[slots], 0).astype(np.uint16)

    def _rows(self, plan: StepPlan, inputs: StepInputs) -> _Rows:
        counts = plan.sample_counts
        sequences = np.repeat(np.arange(counts.size), counts)
        starts = (np.cumsum(counts, dtype=np.int64) - counts)[sequences]
        features = self._features(plan.slots)[sequences]
        extra = inputs.sample_rows.shape[0] - sequences.size
        if extra:
            sequences, starts = np.pad(sequences, (0, extra)), np.pad(starts, (0, extra))
            features = np.pad(features, (0, extra))
        sampled = inputs.sample_rows >= 0
        slots = torch.where(sampled, inputs.slots[inputs.sample_rows.clamp(min=0)], -1)
        output_index = inputs.sample_positions + 1 - self._tables.prompt_length[slots.clamp(min=0)]
        return _Rows(sequences, starts, features, slots, output_index)

    def _only(self, rows: _Rows, feature: Feature) -> Tensor:
        """Slots of the rows that need a feature, -1 for others."""
        return torch.where(self._send((rows.features & feature) != 0), rows.slots, -1)

    def _adjust(self, rows: _Rows, inputs: StepInputs, logits: Tensor) -> Tensor:
        """Bias, penalties and bans of the rows that need them, in blocks of rows."""
        needed = np.flatnonzero(rows.features & ADJUSTED)
        size = max(1, BLOCK_ELEMENTS // self.vocab_size)
        for at in range(0, needed.size, size):
            chosen = needed[at : at + size]
            index = self._send(chosen)
            logits[index] = self._adjust_block(rows, inputs, chosen, index, logits[index])
        return logits

    def _masked(self, logits: Tensor, mask: NDArray[np.int32], mask_rows: NDArray[np.int64]) -> Tensor:
        """What grammars allow, for the rows that follow one, in blocks of rows."""
        words = self._send(mask)
        needed = np.flatnonzero(mask_rows >= 0)
        size = max(1, BLOCK_ELEMENTS // self.vocab_size)
        for at in range(0, needed.size, size):
            chosen = needed[at : at + size]
            index = self._send(chosen)
            logits[index] = self._mask(logits[index], words, self._send(mask_rows[chosen]))
        return logits

    def _adjust_block(
        self, rows: _Rows, inputs: StepInputs, chosen: NDArray[np.int64], index: Tensor, logits: Tensor
    ) -> Tensor:
        tables, features = self._tables, rows.features[chosen]
        slots = rows.slots[index]

        def only(feature: Feature) -> Tensor:
            return torch.where(self._send((features & feature) != 0), slots, -1)

        if (features & Feature.BIAS).any():
            logits = self._bias(logits, only(Feature.BIAS), tables.bias_ids, tables.bias_values)
        if (features & Feature.PENALTY).any():
            pending = self._pending(rows, inputs, chosen)
            scales = (tables.repetition, tables.presence, tables.frequency)
            logits = self._penalise(logits, only(Feature.PENALTY), pending, tables.counts, tables.prompt_bits, *scales)
        if (features & Feature.BAN).any():
            bans = (tables.allowed, tables.ending, tables.min_tokens)
            logits = self._forbid(logits, only(Feature.BAN), rows.output_index[index], *bans)
        return logits

    def _pending(self, rows: _Rows, inputs: StepInputs, chosen: NDArray[np.int64]) -> Tensor:
        """Drafts that stand before each of some rows in its sequence: int64 [rows, D], -1 for none."""
        offset = chosen - rows.starts[chosen]
        before = np.arange(int(offset.max()))
        index = np.where(before < offset[:, None], rows.starts[chosen, None] + 1 + before, -1)
        fed = torch.where(inputs.sample_rows >= 0, inputs.token_ids[inputs.sample_rows.clamp(min=0)], -1)
        found = self._send(index)
        return torch.where(found >= 0, fed[found.clamp(min=0)], -1)

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
        views = [self._host.views[slot] for slot in slots]
        count = max(view.params.logprobs or 0 for view in views if view is not None)
        index = self._send(wanted)
        flagged = np.flatnonzero(rows.features[wanted] & Feature.PROCESSED)
        logits, filters = processed
        size = max(1, BLOCK_ELEMENTS // self.vocab_size)
        for at in range(0, flagged.size, size):
            block = flagged[at : at + size]
            part = index[self._send(block)]
            raw[self._send(block)] = self._filter(logits[part], *(value[part] for value in filters))
        chosen, ranks, ids, values = self._logprobs(raw, tokens[index], count)
        return LogprobRows(wanted, chosen, ranks, ids, values)

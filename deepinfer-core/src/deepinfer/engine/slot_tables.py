"""What sampling needs of each request beyond its record: tables by slot on the device, and what the host knows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.engine.transfers import Transfers
from deepinfer.sampling.params import MAX_LOGIT_BIAS
from deepinfer.sampling.slots import Feature, SlotSampling, pack_ids
from deepinfer.scheduler.plan import StepPlan

__all__ = ["SlotTables", "slot_table_bytes"]

FORCED_WIDTH = 4096


def slot_table_bytes(num_slots: int, vocab_size: int, num_proposals: int) -> int:
    """Bytes of all tables once every kind of request has been seen; each kind is allocated on its first request.

    Forced tokens are counted up to 4,096 of them a request; longer lists take 4 bytes a token and slot more. Rejection
    sampling keeps `num_proposals` distributions of drafts for each slot; coupled verification none.
    """
    words = -(-vocab_size // 32)
    return num_slots * (
        4 * vocab_size * (1 + num_proposals) + 3 * 4 * words + 8 * MAX_LOGIT_BIAS + 4 * FORCED_WIDTH + 32
    )


@dataclass(frozen=True)
class _Saved:
    """A preempted request's side of the tables."""

    view: SlotSampling | None
    greedy: bool
    counts: Tensor | None
    filled: int


class SlotTables:
    """Tables of a runner, entered in the order of the steps. Those over the vocabulary are None until they are needed.

    Args:
        vocab_size: V. num_slots: slot 0 included. transfers: to the device of the tables.

    Attributes:
        min_p, repetition, presence, frequency: float32 [slots].
        min_tokens, prompt_length: int64 [slots].
        counts: int32 [slots, V], times that each id was generated.
        prompt_bits, allowed, ending: int32 [slots, ceil(V / 32)], sets of ids (`pack_ids`).
        bias_ids, bias_values: int32 and float32 [slots, B], -1 for none.
        forced: int32 [slots, F], tokens by output index, -1 for none.
        views: of each slot on the host; None where plain filters are all.
        filled: int64 [slots], prompt tokens whose log-probabilities were computed.
        send: brings an array to the device.
    """

    def __init__(self, vocab_size: int, num_slots: int, transfers: Transfers) -> None:
        device = transfers.device
        self.vocab_size, self.num_slots, self.device = vocab_size, num_slots, device
        self.send = transfers.send
        self.min_p, self.presence, self.frequency = torch.zeros(3, num_slots, device=device)
        self.repetition = torch.ones(num_slots, device=device)
        self.min_tokens, self.prompt_length = torch.zeros(2, num_slots, dtype=torch.int64, device=device)
        self.counts: Tensor | None = None
        self.prompt_bits: Tensor | None = None
        self.allowed: Tensor | None = None
        self.ending: Tensor | None = None
        self.bias_ids: Tensor | None = None
        self.bias_values: Tensor | None = None
        self.forced: Tensor | None = None
        self.views: list[SlotSampling | None] = [None] * num_slots
        self.filled = np.zeros(num_slots, np.int64)
        self._features = np.zeros(num_slots, np.uint16)
        self._greedy = np.ones(num_slots, np.bool_)
        self._saved: dict[int, _Saved] = {}

    def admit(self, plan: StepPlan) -> None:
        """Enter the admitted requests of a plan into the tables of their slots."""
        sampling = plan.admitted_sampling
        slots, lengths = plan.admitted_slots.tolist(), plan.admitted_lengths.tolist()
        views, greedy = sampling.views or (None,) * len(slots), (sampling.temperature == 0).tolist()
        outputs = plan.admitted_outputs or (np.empty(0, np.int64),) * len(slots)
        for slot, view, is_greedy, length, output in zip(slots, views, greedy, lengths, outputs, strict=True):
            # Who has generated tokens has had its prompt scored.
            self._enter(slot, view, is_greedy, view.prompt.size if view is not None and output.size else length)
            if output.size and view is not None and Feature.PENALTY in view.features:
                counts = np.bincount(output, minlength=self.vocab_size).astype(np.int32)
                self._table("counts", 0, torch.int32, self.vocab_size)[slot] = self.send(counts)

    def save(self, key: int, slot: int) -> None:
        """Keep what the tables hold of a preempted request."""
        table = self.counts if self._features[slot] & Feature.PENALTY else None
        # A copy on the device: made in the order of the steps, without a wait, 4 bytes an id.
        counts = None if table is None else table[slot].clone()
        self._saved[key] = _Saved(self.views[slot], bool(self._greedy[slot]), counts, int(self.filled[slot]))

    def restore(self, key: int, slot: int) -> None:
        """Give a resumed request its place in another slot."""
        saved = self._saved.pop(key)
        self._enter(slot, saved.view, saved.greedy, saved.filled)
        if saved.counts is not None:
            self._table("counts", 0, torch.int32, self.vocab_size)[slot] = saved.counts

    def drop(self, key: int) -> None:
        """Forget a preempted request."""
        self._saved.pop(key, None)

    def features(self, slots: NDArray[np.int32]) -> NDArray[np.uint16]:
        """Steps of the sampler that each slot needs, none for slot -1."""
        return np.where(slots >= 0, self._features[slots], 0).astype(np.uint16)

    def are_greedy(self, slots: NDArray[np.int32]) -> bool:
        """Whether all these slots take the largest logit."""
        return bool(self._greedy[slots[slots >= 0]].all())

    def only(self, feature: Feature, features: NDArray[np.uint16], slots: Tensor) -> Tensor:
        """Slots [R] of the rows that need a feature, -1 for others."""
        return torch.where(self.send((features & feature) != 0), slots, -1)

    def min_p_of(self, slots: Tensor, features: NDArray[np.uint16]) -> Tensor | None:
        """min_p [R] of rows with these slots, 0 where it was not asked for; None where no row asks."""
        asking = (features & Feature.MIN_P) != 0
        return torch.where(self.send(asking), self.min_p[slots], 0.0) if asking.any() else None

    def _enter(self, slot: int, view: SlotSampling | None, greedy: bool, filled: int) -> None:
        features = Feature(0) if view is None else view.features
        self.views[slot], self._features[slot], self._greedy[slot] = view, features, greedy
        self.filled[slot] = filled
        if view is None:
            return
        params = view.params
        self.min_p[slot] = params.min_p
        self.prompt_length[slot] = view.prompt.size
        self.min_tokens[slot] = params.min_tokens
        if Feature.PENALTY in features:
            self._enter_penalties(slot, view)
        if Feature.BAN in features:
            allowed = self._table("allowed", -1, torch.int32, -(-self.vocab_size // 32))
            ending = self._table("ending", 0, torch.int32, -(-self.vocab_size // 32))
            allowed[slot] = self.send(view.allowed_words(self.vocab_size))
            ending[slot] = self.send(pack_ids(view.ending, self.vocab_size))
        if Feature.BIAS in features:
            pairs = params.bias
            ids = self._table("bias_ids", -1, torch.int32, len(pairs))
            values = self._table("bias_values", 0, torch.float32, len(pairs))
            ids[slot] = -1
            ids[slot, : len(pairs)] = self.send(np.array([token for token, _ in pairs], np.int32))
            values[slot, : len(pairs)] = self.send(np.array([value for _, value in pairs], np.float32))
        if Feature.FORCE in features:
            forced = self._table("forced", -1, torch.int32, len(params.forced))
            forced[slot] = -1
            forced[slot, : len(params.forced)] = self.send(np.array(params.forced, np.int32))

    def _enter_penalties(self, slot: int, view: SlotSampling) -> None:
        params = view.params
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self._table("counts", 0, torch.int32, self.vocab_size)[slot] = 0
        bits = self._table("prompt_bits", 0, torch.int32, -(-self.vocab_size // 32))
        bits[slot] = self.send(pack_ids(np.unique(view.prompt), self.vocab_size))

    def _table(self, name: str, empty: int, dtype: torch.dtype, width: int) -> Tensor:
        """A table of at least this width, in powers of two but for tables over the vocabulary."""
        found: Tensor | None = getattr(self, name)
        if found is None or found.shape[1] < width:
            wide = width if name in ("counts", "prompt_bits", "allowed", "ending") else 1 << (width - 1).bit_length()
            grown = torch.full((self.num_slots, wide), empty, dtype=dtype, device=self.device)
            if found is not None:
                grown[:, : found.shape[1]] = found
            setattr(self, name, grown)
            found = grown
        return found

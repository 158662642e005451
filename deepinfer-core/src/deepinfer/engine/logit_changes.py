"""What a request changes of its logits before they are filtered: bias, penalties, bans."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.engine.slot_tables import SlotTables
from deepinfer.sampling.slots import Feature

if TYPE_CHECKING:
    from deepinfer.engine.loader import StepOps

__all__ = ["BLOCK_ELEMENTS", "BYTES_PER_ELEMENT", "CHANGING", "LogitChanges", "blocks"]

BLOCK_ELEMENTS = 1 << 20
BYTES_PER_ELEMENT = 48
"""Temporaries of these operations, per logit of a block."""
CHANGING = Feature.BIAS | Feature.PENALTY | Feature.BAN
"""Features that change logits."""


def blocks(rows: NDArray[np.int64], vocab_size: int) -> list[NDArray[np.int64]]:
    """Rows in blocks whose logits are worked on together."""
    size = max(1, BLOCK_ELEMENTS // vocab_size)
    return [rows[at : at + size] for at in range(0, rows.size, size)]


class LogitChanges:
    """Applies them to the rows that need them.

    Args:
        ops: bound kernels. tables: by slot.
    """

    def __init__(self, ops: StepOps, tables: SlotTables) -> None:
        self._tables = tables
        self._bias, self._penalise, self._forbid = ops.add_bias, ops.apply_penalties, ops.forbid_tokens

    def apply(
        self,
        logits: Tensor,
        features: NDArray[np.uint16],
        slots: Tensor,
        output_index: Tensor,
        pending: Callable[[NDArray[np.int64], Tensor], Tensor],
    ) -> Tensor:
        """Change logits in place.

        Args:
            logits: float32 [R, V].
            features: [R], of each row's request.
            slots: int64 [R]. output_index: int64 [R], number of the token to be drawn among the generated ones.
            pending: gives, for some rows (on the host and on the device), the tokens int64 [rows, D] that stand before
                each of them and are not counted yet, -1 for none.

        Returns:
            The logits.
        """
        for chosen in blocks(np.flatnonzero(features & CHANGING), self._tables.vocab_size):
            index = self._tables.send(chosen)
            penalised = (features[chosen] & Feature.PENALTY).any()
            before = pending(chosen, index) if penalised else None
            logits[index] = self._block(logits[index], features[chosen], slots[index], output_index[index], before)
        return logits

    def _block(
        self,
        logits: Tensor,
        features: NDArray[np.uint16],
        slots: Tensor,
        output_index: Tensor,
        before: Tensor | None,
    ) -> Tensor:
        tables = self._tables
        if (features & Feature.BIAS).any():
            biased = tables.only(Feature.BIAS, features, slots)
            logits = self._bias(logits, biased, tables.bias_ids, tables.bias_values)
        if before is not None:
            penalised = tables.only(Feature.PENALTY, features, slots)
            scales = (tables.repetition, tables.presence, tables.frequency)
            logits = self._penalise(logits, penalised, before, tables.counts, tables.prompt_bits, *scales)
        if (features & Feature.BAN).any():
            banned = tables.only(Feature.BAN, features, slots)
            logits = self._forbid(logits, banned, output_index, tables.allowed, tables.ending, tables.min_tokens)
        return logits

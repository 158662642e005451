"""Filling the masks of one step while its forward runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer.errors import GrammarError
from deepinfer.grammar.matcher import Matcher
from deepinfer.grammar.vocabulary import Vocabulary

__all__ = ["MaskFiller", "MaskReport", "MaskRequest"]


@dataclass(frozen=True)
class MaskRequest:
    """One sequence of a step: its matcher, its first mask row and the drafts that the rows after it verify."""

    matcher: Matcher
    first_row: int
    drafts: Sequence[int] = ()


@dataclass(frozen=True)
class MaskReport:
    """What was filled.

    Attributes:
        constrained: bool [rows], rows whose mask must be applied; the others are all ones or were not asked for.
        reachable: rows of each request that can be reached: one more than the drafts that its matcher accepts, less
            a last one where nothing may come.
        errors: of each request, None where its first row went well. The rows of a failed request are zeros.
    """

    constrained: np.ndarray
    reachable: list[int]
    errors: list[GrammarError | None]


class MaskFiller:
    """Fills int32 mask rows for many sequences.

    Args:
        vocabulary: of the model.
        mask: int32 [rows, ceil(V / 32)] in host memory, normally pinned: NumPy array or tensor, written in place.
        threads: threads of the native filler at most.
        batch_from: use the native filler for at least this many rows at a time.
    """

    def __init__(self, vocabulary: Vocabulary, mask: Any, *, threads: int = 4, batch_from: int = 16) -> None:
        self._mask = np.asarray(mask)
        if self._mask.dtype != np.int32 or self._mask.ndim != 2 or self._mask.shape[1] != vocabulary.words:
            raise ValueError(
                f"mask is {self._mask.dtype} {self._mask.shape}, expected int32 [rows, {vocabulary.words}]"
            )
        self._threads, self._batch_from = min(threads, os.cpu_count() or 1), batch_from
        self._native: Any = None

    @property
    def mask(self) -> np.ndarray:
        """The rows, int32 [rows, ceil(V / 32)]."""
        return self._mask

    def fill(self, requests: Sequence[MaskRequest]) -> MaskReport:
        """Fill the rows of these sequences; see `Matcher.fill_masks_for` for what each row holds.

        Rows must not overlap and a matcher appears once. Never raises for one sequence: its error is in the report.
        """
        report = MaskReport(np.zeros(len(self._mask), bool), [0] * len(requests), [None] * len(requests))
        lengths = [request.matcher.length for request in requests]
        live = list(range(len(requests)))
        stage = 0
        while live:
            self._fill_stage(requests, live, stage, report)
            live = [index for index in live if self._advance(requests[index], index, stage, report)]
            stage += 1
        for index, request in enumerate(requests):
            try:
                request.matcher.rollback(request.matcher.length - lengths[index])
            except GrammarError as error:
                report.errors[index] = error
            self._close_rows(request, index, report)
        return report

    def _fill_stage(self, requests: Sequence[MaskRequest], live: list[int], stage: int, report: MaskReport) -> None:
        """Fill row number `stage` of every live sequence."""
        inside = [index for index in live if requests[index].matcher.is_constrained]
        is_batched = len(inside) >= self._batch_from and self._fill_batch(requests, inside, stage, report)
        done = set(inside) if is_batched else ()
        for index in live:
            if index not in done:
                row = requests[index].first_row + stage
                try:
                    report.constrained[row] = requests[index].matcher.fill_mask(self._mask[row])
                    report.reachable[index] += 1
                except GrammarError as error:
                    _end_block(report, index, stage, error)

    def _fill_batch(self, requests: Sequence[MaskRequest], inside: list[int], stage: int, report: MaskReport) -> bool:
        """Fill rows on several threads; False if the library refused, so that each is tried alone."""
        matchers = [requests[index].matcher for index in inside]
        rows = [requests[index].first_row + stage for index in inside]
        try:
            if self._native is None:
                self._native = matchers[0].library.batch(self._threads)
            self._native.batch_fill_next_token_bitmask([matcher.native for matcher in matchers], self._mask, rows)
        except Exception:
            return False
        for index, matcher, row in zip(inside, matchers, rows, strict=True):
            report.constrained[row] = True
            try:
                matcher.finish_row(self._mask[row])
                report.reachable[index] += 1
            except GrammarError as error:
                _end_block(report, index, stage, error)
        return True

    def _advance(self, request: MaskRequest, index: int, stage: int, report: MaskReport) -> bool:
        """Accept draft number `stage`; False where this sequence has no further row that can be reached."""
        if report.reachable[index] <= stage or stage >= len(request.drafts):
            return False
        try:
            return request.matcher.accept(request.drafts[stage])
        except GrammarError as error:
            report.errors[index] = error
            return False

    def _close_rows(self, request: MaskRequest, index: int, report: MaskReport) -> None:
        """Give rows past the last reachable one its mask; zeros everywhere after an error."""
        first, last = request.first_row, request.first_row + len(request.drafts)
        if report.errors[index] is not None:
            self._mask[first : last + 1] = 0
            report.constrained[first : last + 1] = True
            return
        edge = first + report.reachable[index] - 1
        self._mask[edge + 1 : last + 1] = self._mask[edge]
        report.constrained[edge + 1 : last + 1] = report.constrained[edge]


def _end_block(report: MaskReport, index: int, stage: int, error: GrammarError) -> None:
    """Note that nothing may come in a row: an error of the request, but only a guess where drafts stand before it."""
    if stage == 0:
        report.errors[index] = error

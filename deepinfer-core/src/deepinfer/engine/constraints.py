"""Requests with grammars: which ones still wait for theirs, and what the masks of a step say."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.generation import Generation
from deepinfer.engine.grammars import CUT, Grammars, MaskGate, Masks
from deepinfer.errors import GrammarError, InvalidRequest
from deepinfer.grammar.filler import MaskRequest
from deepinfer.sampling.slots import Feature
from deepinfer.scheduler.request import Request, RequestState
from deepinfer.scheduler.scheduler import ScheduledStep

__all__ = ["Constraints"]

POLL_SECONDS = 0.005


class Constraints:
    """Structured outputs in the loop.

    Args:
        grammars: compiles them and fills masks; None: structured outputs are refused.
        current: the generation behind a planned request; None if it has ended since.
        refuse: ends a request for what its grammar says.
    """

    def __init__(
        self,
        grammars: Grammars | None,
        current: Callable[[Request], Generation | None],
        refuse: Callable[[Generation, Exception], None],
    ) -> None:
        self.grammars, self._current, self._refuse = grammars, current, refuse
        self._compiling: dict[str, Generation] = {}
        self._constrained: set[str] = set()

    @property
    def is_compiling(self) -> bool:
        """Whether a request waits for its grammar."""
        return bool(self._compiling)

    def check(self) -> None:
        """Verify that structured outputs can be served.

        Raises:
            CapabilityError: the grammar library is not installed.
            InvalidRequest: the model has no tokenizer.
        """
        if self.grammars is None:
            raise InvalidRequest("is not served by this engine", field="structured_output")
        self.grammars.check()

    def compile(self, generation: Generation) -> None:
        """Start compiling the grammar of a new request, which is not queued before it has come."""
        wanted = generation.params.grammar
        if self.grammars is None or wanted is None:
            raise RuntimeError(f"request {generation.request.request_id!r} has no grammar to compile")
        generation.request.state = RequestState.COMPILING
        generation.compiling = self.grammars.submit(wanted)
        self._compiling[generation.request.request_id] = generation

    def wait(self) -> None:
        """Wait a moment for any grammar on its way."""
        wait([item.compiling for item in self._compiling.values() if item.compiling], POLL_SECONDS)

    def take(self) -> list[Generation]:
        """Requests whose grammars have come; those whose grammars cannot be compiled are refused."""
        ready = []
        for generation in list(self._compiling.values()):
            future, params = generation.compiling, generation.params
            if future is None or not future.done():
                continue
            try:
                generation.matcher = future.result().matcher(
                    stop_token_ids=params.stop_ids, free_after_end=params.ignore_eos
                )
            except Exception as error:
                self._refuse(generation, error)
                continue
            generation.compiling = None
            del self._compiling[generation.request.request_id]
            self._constrained.add(generation.request.request_id)
            generation.request.state = RequestState.QUEUED
            ready.append(generation)
        return ready

    def forget(self, generation: Generation) -> None:
        """Note that a request has ended, in whatever state."""
        self._constrained.discard(generation.request.request_id)
        if generation.compiling is not None:
            generation.compiling.cancel()
            generation.compiling = None
            del self._compiling[generation.request.request_id]

    def gate(self, scheduled: ScheduledStep) -> MaskGate | None:
        """What a step must wait for: None if it samples for no grammar."""
        if not self._constrained:
            return None
        for index in np.flatnonzero(scheduled.plan.samples).tolist():
            generation = self._current(scheduled.requests[index])
            if generation is not None and generation.matcher is not None:
                return MaskGate()
        return None

    def open(self, scheduled: ScheduledStep, gate: MaskGate | None) -> None:
        """Fill the masks of a step; every step before it must have been read."""
        if gate is None or gate.is_open:
            return
        try:
            found = self._masks(scheduled)
        except BaseException:
            gate.cancel()
            raise
        gate.open(found)

    def _masks(self, scheduled: ScheduledStep) -> Masks | None:
        counts = scheduled.plan.sample_counts
        starts = (np.cumsum(counts, dtype=np.int64) - counts).tolist()
        generations, places, requests = [], [], []
        total = 0
        for index in np.flatnonzero(counts).tolist():
            generation, count = self._current(scheduled.requests[index]), int(counts[index])
            if generation is None or generation.matcher is None:
                continue
            # What the host has not heard of is an unknown draft.
            drafts = (generation.drafts + [-1] * count)[: count - 1]
            requests.append(MaskRequest(generation.matcher, total, drafts))
            generations.append(generation)
            places.append(starts[index])
            total += count
        if not requests or self.grammars is None:
            return None
        mask, report = self.grammars.fill(requests)
        rows = np.full(int(counts.sum()), -1, np.int64)
        for number, (generation, request, place) in enumerate(zip(generations, requests, places, strict=True)):
            first, count = request.first_row, 1 + len(request.drafts)
            constrained = report.constrained[first : first + count]
            blocked = [_blocked(generation, mask[first + at], at) if constrained[at] else None for at in range(count)]
            error = report.errors[number] or blocked[0]
            if error is not None:
                self._refuse(generation, error)
                continue
            # A draft behind which nothing may follow stands, if it is drawn; the next step says what is wrong.
            ends = [at for at in range(count) if blocked[at] is not None]
            reachable = min([report.reachable[number], *ends])
            rows[place : place + count] = np.where(constrained, first + np.arange(count), -1)
            rows[place + reachable : place + count] = CUT
        return (mask, rows) if (rows != -1).any() else None

    def close(self) -> None:
        """End the workers that compile."""
        if self.grammars is not None:
            self.grammars.close()


def _blocked(generation: Generation, row: NDArray[np.int32], offset: int) -> GrammarError | None:
    """Why nothing can follow so many drafts although the grammar goes on: the request itself forbids what it allows."""
    params, view = generation.params, generation.request.sampling.view
    count = len(generation.token_ids) + offset
    if view is None or not view.features & Feature.BAN or (row & view.words_after(count, 32 * row.size)).any():
        return None
    lists = {"allowed_token_ids": params.allowed_token_ids is not None, "banned_token_ids": bool(params.banned)}
    blame = [f"min_tokens={params.min_tokens}"] if count < params.min_tokens else []
    blame += [name for name, is_given in lists.items() if is_given]
    return GrammarError(
        f"structured_output: all that the grammar allows after {count} tokens is forbidden by {' and '.join(blame)}"
    )

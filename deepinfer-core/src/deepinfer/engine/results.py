"""What the loop does with the result of a step: publish pages, append tokens, see where a request ends."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from deepinfer.engine.generation import Generation
from deepinfer.engine.runner import StepResult
from deepinfer.errors import GrammarError, RequestFailed
from deepinfer.observe.recorder import LoopRecorder
from deepinfer.ops.sampling import STATUS_OK
from deepinfer.scheduler.prefixes import PrefixReuse
from deepinfer.scheduler.request import FinishReason, Request
from deepinfer.scheduler.scheduler import ScheduledStep

__all__ = ["Results"]


class Results:
    """Reads results into generations.

    Args:
        reuse: hears which rows stand.
        recorder: hears of every token.
        eos: ids that end a request unless it ignores them.
        current: the generation behind a planned request; None if it has ended since.
        finish: ends a request.
    """

    def __init__(
        self,
        reuse: PrefixReuse,
        recorder: LoopRecorder,
        eos: frozenset[int],
        current: Callable[[Request], Generation | None],
        finish: Callable[[Generation, FinishReason], None],
    ) -> None:
        self._reuse, self._recorder, self._eos = reuse, recorder, eos
        self._current, self._finish = current, finish

    def publish(self, scheduled: ScheduledStep, result: StepResult) -> None:
        """Note which rows stand, before anything of the step can end a request and give its pages away."""
        plan = scheduled.plan
        starts, accepted, status = result.starts.tolist(), result.accepted.tolist(), result.status.tolist()
        rows, prefill, samples = plan.row_counts.tolist(), plan.is_prefill.tolist(), plan.samples.tolist()
        for index, request in enumerate(scheduled.requests):
            generation = self._current(request)
            if generation is None:
                continue
            start, end = starts[index], starts[index] + (accepted[index] if samples[index] else 0)
            if any(status[row] != STATUS_OK for row in range(start, end)):
                self._reuse.withdraw(request)
            elif self._reuse.advance(request, rows[index] if prefill[index] else accepted[index]):
                self._reuse.publish(request, plan.step, [*generation.token_ids, *result.tokens[start:end].tolist()])

    def append(self, scheduled: ScheduledStep, result: StepResult) -> list[Generation]:
        """Give each sampled sequence its tokens and end those that are done; the generations that grew or ended."""
        now = time.perf_counter()
        changed = []
        self._take_prompt_logprobs(scheduled, result)
        starts, accepted = result.starts.tolist(), result.accepted.tolist()
        tokens, status = result.tokens.tolist(), result.status.tolist()
        for index in np.flatnonzero(scheduled.plan.samples).tolist():
            generation = self._current(scheduled.requests[index])
            if generation is None:
                continue  # It ended in an earlier step: these rows were wasted.
            changed.append(generation)
            if generation.matcher is not None:
                generation.drafts = result.drafts[index].tolist()
            for row in range(starts[index], starts[index] + accepted[index]):
                if status[row] == STATUS_OK:
                    self._append(generation, tokens[row], now)
                    self._take_logprobs(generation, result, row)
                else:
                    self._bad_logits(generation)
                if generation.finish_reason is not None:
                    break  # What was accepted behind the end does not exist.
        return changed

    def _take_logprobs(self, generation: Generation, result: StepResult, row: int) -> None:
        if generation.error is not None or generation.logprobs is None or result.logprobs is None:
            return
        at, token = int(np.searchsorted(result.logprobs.rows, row)), int(result.tokens[row])
        found = result.logprobs.at(at, token, int(generation.params.logprobs or 0))
        generation.logprobs.append(found)
        generation.cumulative_logprob = (generation.cumulative_logprob or 0.0) + found[token].logprob

    def _take_prompt_logprobs(self, scheduled: ScheduledStep, result: StepResult) -> None:
        slots = scheduled.plan.slots.tolist() if result.prompt_logprobs else []
        for rows in result.prompt_logprobs:
            generation = self._current(scheduled.requests[slots.index(rows.slot)])
            if generation is None or generation.prompt_logprobs is None:
                continue
            count = int(generation.params.prompt_logprobs or 0)
            for index, position in enumerate(rows.rows.tolist()):
                generation.prompt_logprobs[position] = rows.at(index, int(generation.request.prompt[position]), count)

    def _bad_logits(self, generation: Generation) -> None:
        position = generation.request.num_prompt_tokens + len(generation.token_ids)
        generation.error = RequestFailed(
            f"request {generation.request.request_id!r}: the logits for position {position} hold NaN or "
            "infinity, or no token at all is allowed"
        )
        self._finish(generation, FinishReason.ERROR)

    def _append(self, generation: Generation, token: int, now: float) -> None:
        metrics = generation.metrics
        self._recorder.token(metrics.arrival, metrics.first_scheduled, metrics.last_token, now)
        if metrics.first_token is None:
            metrics.first_token = now
        metrics.last_token = now
        if generation.matcher is not None:
            try:
                generation.matcher.commit([token])
            except GrammarError as error:
                generation.error = error
                self._finish(generation, FinishReason.ERROR)
                return
        generation.token_ids.append(token)
        metrics.num_generated_tokens += 1
        stopped = generation.text is not None and generation.text.push(token)
        # Before min_tokens such an id is never drawn, but it may be forced.
        ends = len(generation.token_ids) >= generation.params.min_tokens
        if ends and token in generation.stops:
            generation.stop_reason = token
            self._finish(generation, FinishReason.STOP)
        elif ends and token in self._eos and not generation.params.ignore_eos:
            self._finish(generation, FinishReason.STOP)
        elif stopped and generation.text is not None:
            generation.stop_reason = generation.text.stop
            self._finish(generation, FinishReason.STOP)
        elif len(generation.token_ids) >= generation.request.max_tokens:
            self._finish(generation, FinishReason.LENGTH)

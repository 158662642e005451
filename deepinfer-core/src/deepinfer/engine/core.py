"""The step loop: plan, run, read, post-process; one bad request hurts only itself."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.outputs import RequestMetrics
from deepinfer.engine.runner import ModelRunner, StepResult
from deepinfer.errors import DeepInferError, EngineDead, RequestFailed
from deepinfer.ops.sampling import STATUS_OK
from deepinfer.sampling.params import SamplingParams
from deepinfer.scheduler.request import FinishReason, Request, SamplingRow
from deepinfer.scheduler.scheduler import ScheduledStep, Scheduler

__all__ = ["EngineCore", "EngineStats", "Generation"]

_logger = logging.getLogger("deepinfer.engine")


@dataclass(eq=False)
class Generation:
    """A request in the loop and what it has produced.

    Attributes:
        request: the scheduler's side of it.
        params: as the caller gave them.
        token_ids: generated ids so far.
        stop_reason: the id of `stop_token_ids` that ended it.
        error: why it ended with "error".
        metrics: moments and counts.
    """

    request: Request
    params: SamplingParams
    metrics: RequestMetrics
    token_ids: list[int] = field(default_factory=list)
    stop_reason: int | None = None
    error: DeepInferError | None = None
    stops: frozenset[int] = frozenset()

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it runs."""
        return self.request.finish_reason


@dataclass
class EngineStats:
    """Counts since the start; seconds are the host's, from planning to the processed result.

    Steps that hold prefill rows count as prefill time with all their rows.
    """

    steps: int = 0
    prefill_rows: int = 0
    decode_rows: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    failed_steps: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class EngineCore:
    """Requests in, tokens out, one step at a time (synchronous loop).

    Args:
        runner: the device side.
        scheduler: the host side; owns pages and slots.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.stats = EngineStats()
        self._eos = runner.traits.eos_token_ids
        self._generations: dict[str, Generation] = {}
        self._dead: BaseException | None = None
        scheduler.on_release = runner.released if runner.poison_released else None

    @property
    def num_unfinished(self) -> int:
        """Requests that are queued or running."""
        return len(self._generations)

    def add(
        self, request_id: str, prompt: NDArray[np.int64], params: SamplingParams, *, seed: int, max_tokens: int
    ) -> Generation:
        """Queue a checked request.

        Raises:
            InvalidRequest, CapacityError: it can never run; nothing is queued.
            EngineDead: the loop has failed before.
        """
        self._check_alive()
        sampling = SamplingRow(params.temperature, params.top_k, params.top_p, seed)
        request = Request(request_id, prompt, max_tokens, sampling)
        self.scheduler.add(request)
        stops = frozenset(params.stop_token_ids)
        metrics = RequestMetrics(arrival=time.perf_counter(), num_prompt_tokens=prompt.size)
        generation = Generation(request, params, metrics, stops=stops)
        self._generations[request_id] = generation
        return generation

    def abort(self, request_id: str) -> Generation | None:
        """End a request wherever it is; None if it is unknown or has already ended."""
        generation = self._generations.get(request_id)
        if generation is not None:
            self._finish(generation, FinishReason.ABORT)
        return generation

    def step(self) -> list[Generation]:
        """Run one step; return the generations that grew or ended.

        A step with work always runs rows: it takes prompt rows, appends tokens or ends requests.

        Raises:
            EngineDead: the engine's own accounting failed, now or before. A failing kernel does not raise: it ends
                the requests of its step with `RequestFailed`.
        """
        self._check_alive()
        try:
            return self._step()
        except Exception as error:
            self._dead = error
            raise EngineDead(f"the step loop failed: {type(error).__name__}: {error}") from error

    def _step(self) -> list[Generation]:
        start = time.perf_counter()
        scheduled = self.scheduler.plan()
        if scheduled is None:
            if self._generations:
                raise RuntimeError(f"nothing can run although {len(self._generations)} requests are unfinished")
            return []
        for request in scheduled.requests:
            metrics = self._generations[request.request_id].metrics
            metrics.first_scheduled = start if metrics.first_scheduled is None else metrics.first_scheduled
            metrics.num_steps += 1
        result: StepResult | None = None
        failure: Exception | None = None
        try:
            result = self.runner.launch(scheduled.plan).read()
        except Exception as error:
            failure = error
        except BaseException as error:  # An interrupted step leaves its sequences undefined.
            self.scheduler.complete(scheduled.plan.step)
            self._fail(scheduled, error)
            raise
        self.scheduler.complete(scheduled.plan.step)
        changed = self._fail(scheduled, failure) if result is None else self._process(scheduled, result)
        self._count(scheduled, time.perf_counter() - start)
        return changed

    def _process(self, scheduled: ScheduledStep, result: StepResult) -> list[Generation]:
        """Give each sampled sequence its token; end those that are done."""
        now = time.perf_counter()
        changed = []
        for index in np.flatnonzero(scheduled.plan.samples).tolist():
            generation = self._generations.get(scheduled.requests[index].request_id)
            if generation is None or generation.request is not scheduled.requests[index]:
                continue
            changed.append(generation)
            if result.status[index] != STATUS_OK:
                position = generation.request.num_prompt_tokens + len(generation.token_ids)
                generation.error = RequestFailed(
                    f"request {generation.request.request_id!r}: the logits for position {position} hold NaN or "
                    "infinity, or no token at all is allowed"
                )
                self._finish(generation, FinishReason.ERROR)
            else:
                self._append(generation, int(result.tokens[index]), now)
        return changed

    def _append(self, generation: Generation, token: int, now: float) -> None:
        if generation.metrics.first_token is None:
            generation.metrics.first_token = now
        generation.token_ids.append(token)
        generation.metrics.num_generated_tokens += 1
        if token in generation.stops:
            generation.stop_reason = token
            self._finish(generation, FinishReason.STOP)
        elif token in self._eos and not generation.params.ignore_eos:
            self._finish(generation, FinishReason.STOP)
        elif len(generation.token_ids) >= generation.request.max_tokens:
            self._finish(generation, FinishReason.LENGTH)

    def _fail(self, scheduled: ScheduledStep, failure: BaseException | None) -> list[Generation]:
        """End every request of a step that raised; their pages and slots come back."""
        self.stats.failed_steps += 1
        _logger.error("step %d failed", scheduled.plan.step, exc_info=failure)
        changed = []
        for request in scheduled.requests:
            generation = self._generations[request.request_id]
            generation.error = RequestFailed(
                f"request {request.request_id!r}: step {scheduled.plan.step} failed: "
                f"{type(failure).__name__}: {failure}"
            )
            generation.error.__cause__ = failure
            self._finish(generation, FinishReason.ERROR)
            changed.append(generation)
        return changed

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        self.scheduler.finish(generation.request, reason)
        generation.metrics.finished = time.perf_counter()
        del self._generations[generation.request.request_id]
        finished = self.stats.finished
        finished[str(reason)] = finished.get(str(reason), 0) + 1

    def _count(self, scheduled: ScheduledStep, seconds: float) -> None:
        plan, stats = scheduled.plan, self.stats
        prefill = int(plan.row_counts[plan.is_prefill].sum())
        stats.steps += 1
        stats.prefill_rows += prefill
        stats.decode_rows += plan.num_rows - prefill
        if prefill:
            stats.prefill_seconds += seconds
        else:
            stats.decode_seconds += seconds

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"the engine stopped: {type(self._dead).__name__}: {self._dead}") from self._dead

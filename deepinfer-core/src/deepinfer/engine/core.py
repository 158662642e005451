"""The step loop: plan and launch ahead, read one step late, post-process; one bad request hurts only itself."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.engine.block_copies import LostBlocks
from deepinfer.engine.constraints import Constraints
from deepinfer.engine.executor import Executor, InlineExecutor, PendingStep
from deepinfer.engine.generation import EngineStats, Generation
from deepinfer.engine.grammars import Grammars, MaskGate
from deepinfer.engine.outputs import RequestMetrics
from deepinfer.engine.prefix_tiers import PrefixTiers
from deepinfer.engine.results import Results
from deepinfer.engine.runner import ModelRunner, StepResult
from deepinfer.engine.speculation import Speculation
from deepinfer.engine.stops import TextStream
from deepinfer.errors import DeepInferError, EngineDead, GrammarError, InvalidRequest, RequestFailed
from deepinfer.observe.recorder import LoopRecorder, StepObserver
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.slots import SlotSampling
from deepinfer.scheduler.plan import StepPlan
from deepinfer.scheduler.request import FinishReason, Request, RequestState, SamplingRow
from deepinfer.scheduler.scheduler import ScheduledStep, Scheduler
from deepinfer.speculative.planner import VerificationPlanner
from deepinfer.speculative.statistics import SpeculationStatistics

__all__ = ["EngineCore"]

_logger = logging.getLogger("deepinfer.engine")


@dataclass(frozen=True)
class _InFlight:
    """A step whose result has not been read."""

    scheduled: ScheduledStep
    pending: PendingStep
    launched: float
    masks: MaskGate | None = None


class EngineCore:
    """Requests in, tokens out.

    Each call of `step` plans and launches one step and reads the oldest one if `depth` are in flight. With depth 2 the
    host plans step t + 1 while t runs, from bounds of what t will bring; the device records make the lengths exact.
    With depth 1 the same code is the synchronous loop. Tokens are the same.

    Args:
        runner: the device side.
        scheduler: the host side; owns pages and slots.
        executor: runs the steps; None: on the caller's thread.
        depth: steps in flight at most while `step` plans: 2 is the asynchronous loop, 1 the synchronous one. The
            scheduler's `lookahead` must fit it.
        tiers: lower tiers of the scheduler's prefix cache.
        grammars: serves structured outputs; None: they are refused.
        planner: the scheduler's, which hears of every result.
        observers: plain functions that hear of every step.

    A step with grammars is launched like any other and waits on the device's side, between forward pass and sampling,
    for masks that the host fills as soon as it has read the step before, drafts included: each verify row is masked by
    the state after the drafts before it, and the block ends before the first draft that may not come.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        executor: Executor | None = None,
        *,
        depth: int = 1,
        tiers: PrefixTiers | None = None,
        grammars: Grammars | None = None,
        planner: VerificationPlanner | None = None,
        observers: Iterable[StepObserver] = (),
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.stats = EngineStats()
        self._speculation: Speculation | None = None
        if runner.num_drafts:
            self._speculation = Speculation(runner.num_drafts, scheduler.slots.num_slots, planner, self._current)
            self.stats.speculation = self._speculation.statistics
        self.recorder = LoopRecorder(observers)
        self._eos = runner.traits.eos_token_ids
        self._generations: dict[str, Generation] = {}
        self._dead: BaseException | None = None
        self.executor: Executor = InlineExecutor(runner) if executor is None else executor
        self.depth = depth
        self.tiers = tiers
        self.constraints = Constraints(grammars, self._current, self._refuse)
        self.results = Results(scheduler.reuse, self.recorder, self._eos, self._current, self._finish)
        self._failed: list[Generation] = []
        self._in_flight: deque[_InFlight] = deque()
        self._last_read = 0.0
        if runner.poison_released:
            scheduler.sequences.on_release = self.executor.release

    @property
    def speculation(self) -> SpeculationStatistics | None:
        """What speculation did; None where nothing is drafted."""
        return self.stats.speculation

    @property
    def num_unfinished(self) -> int:
        """Requests that are queued or running."""
        return len(self._generations)

    def add(
        self,
        request_id: str,
        prompt: NDArray[np.int64],
        params: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        priority: int = 0,
        completion: int = 0,
        text: TextStream | None = None,
        leader: Generation | None = None,
    ) -> Generation:
        """Queue a checked request; lower priority values go first.

        Args:
            request_id: unique among the requests in flight. prompt: int64 [L]. params: as checked.
            seed: of its draws. max_tokens: at most. priority: lower goes first.
            completion: index among the completions of one prompt with one seed.
            text: decodes the output in the loop; needed for stop strings.
            leader: a completion of the same prompt. If prefixes are cached and the prompt fills a page, this one is
                queued when that one has its first token, and then shares its pages.

        Raises:
            InvalidRequest, CapacityError: it can never run; nothing is queued.
            EngineDead: the loop has failed before.
        """
        self._check_alive()
        view = SlotSampling.of(params, prompt, self._eos)
        sampling = SamplingRow(params.temperature, params.top_k, params.top_p, seed, completion, view)
        scored = params.prompt_logprobs is not None
        request = Request(
            request_id,
            prompt,
            max_tokens,
            sampling,
            priority,
            reuse_prefix=not scored,
            scored=scored,
        )
        if request_id in self._generations:
            raise InvalidRequest(f"{request_id!r} is already in flight", field="request_id")
        shares = self.scheduler.prefix is not None and prompt.size >= self.scheduler.config.page_size
        waits = leader is not None and shares and leader.metrics.first_token is None and leader.finish_reason is None
        if waits or params.grammar is not None:
            self.scheduler.check_fit(request_id, prompt.size, max_tokens)
        if params.grammar is not None:
            self.constraints.check()
        elif not waits:
            self._enqueue(request)
        stops = frozenset(params.stop_token_ids)
        metrics = RequestMetrics(arrival=time.perf_counter(), num_prompt_tokens=prompt.size)
        generation = Generation(request, params, metrics, stops=stops, text=text)
        if params.logprobs is not None:
            generation.logprobs, generation.cumulative_logprob = [], 0.0
        if params.prompt_logprobs is not None:
            generation.prompt_logprobs = [None] * prompt.size
        self._generations[request_id] = generation
        if params.grammar is not None:
            self.constraints.compile(generation)
        if waits and leader is not None:
            generation.leader = leader
            leader.followers.append(generation)
        return generation

    def _enqueue(self, request: Request) -> None:
        self.scheduler.add(request, loading=self.tiers is not None)
        if self.tiers is not None and not self.tiers.begin(request):
            self.scheduler.ready(request)

    def _release_followers(self, leader: Generation) -> None:
        """Queue the completions that waited for another one's prompt."""
        followers, leader.followers = leader.followers, []
        for follower in followers:
            follower.leader = None
            if follower.compiling is None:
                self._enqueue(follower.request)

    def _refuse(self, generation: Generation, error: Exception) -> None:
        """End a request for what its grammar says; the next call of `step` returns it."""
        if not isinstance(error, DeepInferError):
            cause = error
            error = GrammarError(f"structured_output: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        generation.error = error
        self._finish(generation, FinishReason.ERROR)
        self._failed.append(generation)

    def _current(self, request: Request) -> Generation | None:
        """The generation behind a planned request, if it has not ended since."""
        generation = self._generations.get(request.request_id)
        return generation if generation is not None and generation.request is request else None

    def abort(self, request_id: str) -> Generation | None:
        """End a request wherever it is; None if it is unknown or has already ended."""
        generation = self._generations.get(request_id)
        if generation is not None:
            self._finish(generation, FinishReason.ABORT)
            if not self._generations and self._dead is None:
                self.flush()
        return generation

    def flush(self) -> list[Generation]:
        """Read every step in flight; afterwards the device works for nobody. Returns and raises as `step`."""
        return self._guarded(self._read_all)

    def close(self) -> None:
        """End the executor; the steps in flight are waited for and forgotten."""
        for step in self._in_flight:
            if step.masks is not None:
                step.masks.cancel()
        self._in_flight.clear()
        self.executor.close()
        self.constraints.close()
        if self.tiers is not None:
            self.tiers.close()

    def step(self) -> list[Generation]:
        """Launch one step and read the one that is due; return the generations that grew or ended.

        A call with work launches rows or reads a step. When the last request ends nothing is left in flight.

        Raises:
            EngineDead: the engine's own accounting failed, now or before. A failing kernel does not raise: it ends
                the requests of its step with `RequestFailed`.
        """
        return self._guarded(self._step)

    def _guarded(self, call: Callable[[], list[Generation]]) -> list[Generation]:
        self._check_alive()
        try:
            changed = call()
            failed, self._failed = self._failed, []
            return list(dict.fromkeys([*failed, *changed]))
        except Exception as error:
            self._dead = error
            raise EngineDead(f"the step loop failed: {type(error).__name__}: {error}; make a new engine") from error

    def _step(self) -> list[Generation]:
        changed: list[Generation] = []
        for generation in self.constraints.take() if self.constraints.is_compiling else ():
            if generation.leader is None:
                self._enqueue(generation.request)
        launched = self._launch()
        if not launched and not self._in_flight:
            if self.tiers is not None and self.tiers.wait():
                return changed
            if self.constraints.is_compiling:
                self.constraints.wait()
                return changed
        if not launched and not self._in_flight and self._generations:
            raise RuntimeError(f"nothing can run although {len(self._generations)} requests are unfinished")
        if self._in_flight and (not launched or len(self._in_flight) >= self.depth):
            changed = self._read()
        if self._in_flight:
            self.constraints.open(self._in_flight[0].scheduled, self._in_flight[0].masks)
        if not self._generations:
            changed += self._read_all()
        return changed

    def _launch(self) -> bool:
        """Plan a step and hand it to the device; False if no sequence can take a row now."""
        start = time.perf_counter()
        for request in () if self.tiers is None else self.tiers.poll():
            self.scheduler.ready(request)
        scheduled = self.scheduler.plan()
        if scheduled is None:
            return False
        planned = time.perf_counter()
        for request in scheduled.requests:
            metrics = self._generations[request.request_id].metrics
            metrics.first_scheduled = start if metrics.first_scheduled is None else metrics.first_scheduled
            metrics.num_steps += 1
        masks = self.constraints.gate(scheduled)
        if masks is not None and (self.executor.is_inline or not self._in_flight):
            self._failed += self._read_all()
            self.constraints.open(scheduled, masks)
        try:
            pending = self.executor.submit(scheduled.plan, masks)
        except BaseException as error:  # An interrupted step leaves its sequences undefined.
            self.scheduler.complete(scheduled.plan.step)
            self._fail(scheduled, error, moved=False)
            raise
        self._in_flight.append(_InFlight(scheduled, pending, start, masks))
        running = len(scheduled.requests)
        self.recorder.launched(
            scheduled.plan.step,
            start,
            planned,
            time.perf_counter(),
            rows=scheduled.plan.num_rows,
            running=running,
            waiting=len(self._generations) - running,
        )
        return True

    def _read(self) -> list[Generation]:
        """Wait for the oldest step in flight and process it. An interrupt while waiting loses nothing."""
        step = self._in_flight[0]
        result: StepResult | None = None
        failure: Exception | None = None
        self.constraints.open(step.scheduled, step.masks)
        try:
            result = step.pending.read()
        except Exception as error:
            failure = error
        ready = time.perf_counter()
        self._in_flight.popleft()
        scheduled = step.scheduled
        if result is not None:
            self.scheduler.correct(scheduled, result.accepted)
        self.scheduler.complete(scheduled.plan.step)
        if result is None:
            changed = self._fail(scheduled, failure, moved=step.pending.moves_done())
        else:
            if self._speculation is not None:
                self._speculation.read(scheduled, result)
            self.results.publish(scheduled, result)
            changed = self.results.append(scheduled, result)
            if self.tiers is not None:
                self.tiers.export()
            for generation in changed:
                self._release_followers(generation)
        now = time.perf_counter()
        self.recorder.finished(scheduled.plan.step, step.launched, ready, now, failed=result is None)
        seconds = now - max(step.launched, self._last_read)
        self._count(scheduled.plan, seconds)
        if self._speculation is not None and result is not None and step.masks is None:
            self._speculation.took(scheduled.plan, seconds)
        self._last_read = now
        return changed

    def _read_all(self) -> list[Generation]:
        changed: list[Generation] = []
        while self._in_flight:
            changed += self._read()
        return changed

    def _fail(self, scheduled: ScheduledStep, failure: BaseException | None, *, moved: bool) -> list[Generation]:
        """End every request of a step that raised; their pages and slots come back.

        Args:
            moved: whether the requests that the step's plan preempted had reached the host before it failed.
        """
        self.stats.failed_steps += 1
        if isinstance(failure, LostBlocks) and self.scheduler.prefix is not None:
            self.scheduler.prefix.clear()
        _logger.error("step %d failed", scheduled.plan.step, exc_info=failure)
        changed = []
        lost = set() if moved else {move.key for move in scheduled.plan.saves}
        if not moved:
            self.scheduler.forget(scheduled.plan)
        preempted = [item.request for item in self._generations.values() if item.request.arrival in lost]
        for request in {*scheduled.requests, *preempted}:
            generation = self._generations.get(request.request_id)
            if generation is None or generation.request is not request:
                continue
            generation.error = RequestFailed(
                f"request {request.request_id!r}: step {scheduled.plan.step} failed: "
                f"{type(failure).__name__}: {failure}"
            )
            generation.error.__cause__ = failure
            self._finish(generation, FinishReason.ERROR)
            changed.append(generation)
        return changed

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        is_queued = generation.leader is None and generation.compiling is None
        if generation.leader is not None:
            generation.leader.followers.remove(generation)
            generation.leader = None
        self.constraints.forget(generation)
        if is_queued:
            if self.tiers is not None:
                self.tiers.cancel(generation.request)
            self.scheduler.finish(generation.request, reason)
        else:
            generation.request.state, generation.request.finish_reason = RequestState.FINISHED, reason
        self._release_followers(generation)
        generation.metrics.finished = time.perf_counter()
        if generation.metrics.first_token is not None:
            self.recorder.request_time.observe(generation.metrics.finished - generation.metrics.arrival)
        if generation.text is not None:
            generation.text.finish()
        del self._generations[generation.request.request_id]
        finished = self.stats.finished
        finished[str(reason)] = finished.get(str(reason), 0) + 1

    def _count(self, plan: StepPlan, seconds: float) -> None:
        stats = self.stats
        stats.preemptions = self.scheduler.preemption.num_preemptions
        stats.recomputations = self.scheduler.preemption.num_recomputations
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

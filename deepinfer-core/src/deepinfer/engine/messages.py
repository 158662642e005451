"""What passes between the front end of an engine and its loop, on whatever thread or in whatever process each runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepinfer.checkpoint.reader import ReadStats
from deepinfer.engine.memory_plan import MemoryPlan
from deepinfer.engine.outputs import RequestMetrics, TokenLogprobs
from deepinfer.errors import DeepInferError, EngineDead
from deepinfer.models.traits import ModelTraits
from deepinfer.observe.trace import StepTrace
from deepinfer.sampling.params import SamplingParams

__all__ = ["CLOSED", "EngineFacts", "Listener", "Loop", "Order", "Update", "as_dead"]

CLOSED = "this AsyncLLM was closed; make a new one"
"""Why nothing more comes of a loop that was closed."""


@dataclass(frozen=True)
class EngineFacts:
    """What a front end must know of an engine that it may not touch.

    Attributes:
        traits: sizes and ids of the model.
        max_model_len: longest prompt and output together, in tokens.
        numerics_id: names the numerics of everything bound.
        replay_keep: prompt tokens that bounded replay keeps; 0 without it.
        memory_plan: every byte that the engine takes.
        load_stats: bytes and seconds of the checkpoint's reads.
        path: directory of the checkpoint; None for a model that has none.
        served_name: what the codec calls the model.
    """

    traits: ModelTraits
    max_model_len: int
    numerics_id: str
    replay_keep: int
    memory_plan: MemoryPlan
    load_stats: ReadStats
    path: str | None
    served_name: str


@dataclass(frozen=True)
class Order:
    """A checked request on its way to the loop.

    Attributes:
        number: tells it from every other request of its front end, ever.
        request_id: its name in messages; unique among the requests in flight.
        prompt: int64 [L].
        params: as checked. seed: of its draws. max_tokens: at most. priority: lower goes first.
    """

    number: int
    request_id: str
    prompt: NDArray[np.int64]
    params: SamplingParams
    seed: int
    max_tokens: int
    priority: int = 0

    def part_id(self, index: int) -> str:
        """The id in the loop of one completion."""
        return self.request_id if index == 0 else f"{self.request_id}/{index}"


class Update(msgspec.Struct, array_like=True):
    """What is new of one completion, and how it stands.

    Attributes:
        number: of the order. index: of the completion.
        token_ids, text, logprobs, prompt_logprobs: what came since the last update. The text only where the loop looks
            for stop strings; prompt log-probabilities once, with the first token.
        metrics: the loop's own object, which goes on changing, unless it came from another process.
        finish_reason, stop_reason, error, cumulative_logprob, num_cached_tokens: as they are now.
    """

    number: int
    index: int
    token_ids: list[int]
    metrics: RequestMetrics
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: DeepInferError | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def absorb(self, later: Update) -> None:
        """Become this update and the one after it in one."""
        self.token_ids += later.token_ids
        if later.text is not None:
            self.text = (self.text or "") + later.text
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *later.logprobs]
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error
        self.cumulative_logprob, self.metrics = later.cumulative_logprob, later.metrics
        self.num_cached_tokens = later.num_cached_tokens


class Listener(Protocol):
    """Hears of what a loop does, on a thread that must not be kept waiting."""

    def deliver(self, updates: Iterable[Update], refused: Mapping[int, DeepInferError]) -> None:
        """Completions grew or ended; orders, by number, were refused and nothing of them was queued."""

    def end(self, error: EngineDead) -> None:
        """The loop has ended; nothing more will come."""


class Loop(Protocol):
    """A step loop as its front end sees it. Every method may be called on any thread.

    Attributes:
        facts: of the engine.
        pid: id of the process that turns it.
        stats: counts since the start (`EngineStats`), as of the last step that was heard of.
    """

    facts: EngineFacts
    pid: int
    stats: Any

    def submit(self, order: Order) -> None:
        """Queue an order. Does not wait for the loop.

        Raises:
            InvalidRequest: it cannot be sent.
        """

    def abort(self, number: int) -> None:
        """End what runs of an order. Does not wait for the loop."""

    def metrics_text(self) -> str:
        """Counters, gauges and histograms in the text format of Prometheus.

        Raises:
            EngineDead: the loop has ended.
        """

    def trace(self) -> StepTrace:
        """A record of every step from now on; errors as `metrics_text`."""

    def close(self) -> None:
        """End the loop and free what it holds; waits for the step in flight. A second call does nothing."""


def as_dead(error: Exception) -> EngineDead:
    """What consumers are told of whatever ended a loop."""
    if isinstance(error, EngineDead):
        return error
    dead = EngineDead(f"the loop failed: {type(error).__name__}: {error}; make a new AsyncLLM")
    dead.__cause__ = error
    return dead

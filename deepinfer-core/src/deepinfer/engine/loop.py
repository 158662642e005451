"""Orders in, updates out: the step loop of an engine without the thread or the process that turns it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepinfer.engine.core import EngineCore
from deepinfer.engine.generation import Generation
from deepinfer.engine.messages import Order, Update
from deepinfer.engine.stops import TextStream
from deepinfer.errors import DeepInferError, EngineDead

__all__ = ["EngineLoop", "queue_order"]


def queue_order(core: EngineCore, order: Order, codec: Any) -> list[Generation]:
    """Hand a checked request to the core: one generation for each completion.

    Stop strings are looked for here: the core must know at which token a request ends before it publishes its pages.

    Args:
        core: takes them.
        order: the request.
        codec: decodes outputs with stop strings.

    Raises:
        DeepInferError: it was refused; nothing of it is queued.
    """
    params = order.params
    # Prompt log-probabilities are the same for every completion.
    rest = replace(params, prompt_logprobs=None)
    queued: list[Generation] = []
    try:
        for index in range(params.n):
            generation = core.add(
                order.part_id(index),
                order.prompt,
                params if index == 0 else rest,
                seed=order.seed,
                max_tokens=order.max_tokens,
                priority=order.priority,
                completion=index,
                text=TextStream(codec, params) if params.stop_strings else None,
                leader=queued[0] if queued else None,
            )
            queued.append(generation)
    except DeepInferError:
        for generation in queued:
            core.abort(generation.request.request_id)
        raise
    return queued


@dataclass(eq=False)
class _Part:
    """One completion in the loop and how much of it was told."""

    order: Order
    index: int
    generation: Generation
    num_told: int = 0
    told_prompt: bool = False


class EngineLoop:
    """Keeps account of what was said about each request. For one thread at a time.

    Args:
        core: the engine.
        codec: decodes outputs with stop strings; None: there is none.
    """

    def __init__(self, core: EngineCore, codec: Any) -> None:
        self.core = core
        self._codec = codec
        self._parts: dict[str, _Part] = {}
        self._running: dict[int, set[str]] = {}

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self.core.num_unfinished > 0

    def add(self, order: Order) -> DeepInferError | None:
        """Queue an order, or say why it cannot be served.

        Raises:
            EngineDead: the core has failed before.
        """
        try:
            generations = queue_order(self.core, order, self._codec)
        except EngineDead:
            raise
        except DeepInferError as error:
            return error
        parts = {order.part_id(index): _Part(order, index, item) for index, item in enumerate(generations)}
        self._parts |= parts
        self._running[order.number] = set(parts)
        return None

    def abort(self, number: int) -> list[Update]:
        """End what still runs of an order."""
        ended = [self.core.abort(name) for name in sorted(self._running.get(number, ()))]
        return self._tell(generation for generation in ended if generation is not None)

    def abort_all(self) -> None:
        """End everything; nobody is told."""
        for name in self._parts:
            self.core.abort(name)
        self._parts.clear()
        self._running.clear()

    def step(self) -> list[Update]:
        """Run one step of the core.

        Raises:
            EngineDead: the core failed.
        """
        return self._tell(self.core.step())

    def _tell(self, changed: Iterable[Generation]) -> list[Update]:
        updates = []
        for generation in changed:
            name = generation.request.request_id
            part = self._parts.get(name)
            if part is None or part.generation is not generation:
                continue
            if generation.finish_reason is not None:
                self._forget(name, part.order.number)
            updates.append(_news(part))
        return updates

    def _forget(self, name: str, number: int) -> None:
        del self._parts[name]
        self._running[number].remove(name)
        if not self._running[number]:
            del self._running[number]


def _news(part: _Part) -> Update:
    """What was not yet told of a completion."""
    generation, start = part.generation, part.num_told
    part.num_told = len(generation.token_ids)
    prompt: Sequence[Any] | None = None
    if part.num_told and not part.told_prompt:
        part.told_prompt, prompt = True, generation.prompt_logprobs
    return Update(
        part.order.number,
        part.index,
        generation.token_ids[start:],
        generation.metrics,
        text=None if generation.text is None else generation.text.take(),
        finish_reason=None if generation.finish_reason is None else str(generation.finish_reason),
        stop_reason=generation.stop_reason,
        error=generation.error,
        logprobs=None if generation.logprobs is None else generation.logprobs[start:],
        cumulative_logprob=generation.cumulative_logprob,
        num_cached_tokens=generation.request.num_cached_tokens,
        prompt_logprobs=None if prompt is None else list(prompt),
    )

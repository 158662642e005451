"""`AsyncLLM`: a model and its engine for asyncio; the step loop runs on a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from deepinfer.engine.core import EngineCore, Generation
from deepinfer.engine.llm import LLM, Ticket
from deepinfer.engine.loader import LoadedModel
from deepinfer.engine.outputs import CompletionOutput, RequestOutput
from deepinfer.engine.prompts import split_prompts
from deepinfer.engine.stops import TextStream
from deepinfer.errors import DeepInferError, EngineDead, InvalidRequest
from deepinfer.observe.trace import StepTrace
from deepinfer.sampling.params import SamplingParams
from deepinfer.settings import Settings

__all__ = ["AsyncLLM"]

_logger = logging.getLogger("deepinfer.engine")


class AsyncLLM:
    """A model that generates for many coroutines at once. Several may live side by side; close them.

    Tokens are those of `LLM.generate`. One engine serves coroutines of any number of event loops and threads.

    Args:
        model: as in `LLM`.
        options: every other argument of `LLM`.

    Raises:
        ConfigError, CheckpointError, AcceleratorUnavailable, CapabilityError, PluginError, CapacityError: as `LLM`.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self._start(LLM(model, **options))

    @classmethod
    def from_loaded(cls, loaded: LoadedModel, settings: Settings | None = None, **options: Any) -> AsyncLLM:
        """Build on a model that is already in memory, shared with whoever else holds it."""
        engine = cls.__new__(cls)
        engine._start(LLM.from_loaded(loaded, settings, **options))
        return engine

    def _start(self, llm: LLM) -> None:
        self._llm = llm
        self._ids = itertools.count()
        self._streams: dict[str, _Stream] = {}
        self._inbox: deque[Callable[[EngineCore], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._dead: EngineDead | None = None
        self._parts: dict[str, tuple[_Stream, int]] = {}
        self._thread = threading.Thread(target=self._run, name="deepinfer-loop", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def llm(self) -> LLM:
        """The engine behind it, for its limits and its `memory_plan`; do not call `generate` on it."""
        return self._llm

    @property
    def stats(self) -> Any:
        """Counts of the step loop since the start (`EngineStats`)."""
        return self._llm.stats

    def metrics_text(self) -> str:
        """As `LLM.metrics_text`."""
        return self._llm.metrics_text()

    def trace(self) -> StepTrace:
        """As `LLM.trace`."""
        return self._llm.trace()

    def get_tokenizer(self) -> Any:
        """As `LLM.get_tokenizer`."""
        return self._llm.get_tokenizer()

    async def generate(
        self,
        prompt: Any = None,
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        request_id: str | None = None,
        *,
        prompt_token_ids: Any = None,
        add_bos: bool = True,
        priority: int = 0,
        delta: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt, yielding outputs as tokens arrive; the last one is `finished`.

        At most one output waits per request: a consumer that falls behind finds all that happened meanwhile in the
        next one. Leaving the loop, closing the iterator or cancelling the task aborts the request and frees its memory.

        Args:
            prompt: a text or a list of token ids.
            sampling_params: a dict is taken as keyword arguments.
            request_id: unique among the requests in flight; None: a number.
            prompt_token_ids: ids instead of a text.
            add_bos: as in `LLM.generate`.
            priority: lower goes first.
            delta: yield only what is new: its text, ids and log-probabilities; else everything so far.

        Raises:
            InvalidRequest, CapacityError: it cannot be served; nothing was queued.
            RequestFailed: the device could not finish it; what was generated before was yielded.
            EngineDead: the engine was closed or has failed.
        """
        self._check_alive()
        items, _ = split_prompts(prompt, prompt_token_ids)
        if not items:
            raise InvalidRequest("the prompt is empty; give at least one token", field="prompt")
        if len(items) > 1:
            raise InvalidRequest(f"holds {len(items)} prompts; call generate once for each", field="prompt")
        request_id = self._new_id(request_id)
        arguments = (items[0], sampling_params, add_bos, request_id)
        # Long texts take a while to encode: not on the event loop.
        encodes = items[0].token_ids is None
        ticket = await asyncio.to_thread(self._llm.check, *arguments) if encodes else self._llm.check(*arguments)
        if ticket.output.error is not None:
            raise ticket.output.error
        stream = _Stream(ticket, self._llm, delta)
        self._post(lambda core: self._add(core, stream, priority), stream)
        try:
            while True:
                await stream.event.wait()
                stream.event.clear()
                failure = stream.failure
                output = stream.take()
                if output is not None:
                    yield output
                if failure is not None:
                    raise failure
                if output is not None and output.finished:
                    if output.error is not None:
                        raise output.error
                    return
        finally:
            self._forget(stream)

    def abort(self, request_id: str) -> bool:
        """End a request; its iterator yields what there is with finish reason "abort". False if it is unknown."""
        with self._wake:
            stream = self._streams.get(request_id)
            if stream is None:
                return False
            self._inbox.append(lambda core: self._abort(core, stream))
            self._wake.notify()
        return True

    def close(self) -> None:
        """End the loop and free caches and weights; iterators still waiting raise `EngineDead`. Blocks for a step."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._llm.close()
        atexit.unregister(self.close)

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ---- called by consumers -----------------------------------------------------------------------------------------

    def _new_id(self, given: str | None) -> str:
        if given is None:
            return next(name for name in map(str, self._ids) if name not in self._streams)
        if not isinstance(given, str) or not given:
            raise InvalidRequest(f"{given!r} is not a text of at least one character", field="request_id")
        return given

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(str(self._dead)) from self._dead.__cause__
        if self._closing:
            raise EngineDead("this AsyncLLM was closed; make a new one")

    def _post(self, action: Callable[[EngineCore], None], stream: _Stream) -> None:
        """Register a new request and hand its first action to the loop."""
        with self._wake:
            self._check_alive()
            if stream.request_id in self._streams:
                raise InvalidRequest(f"{stream.request_id!r} is already in flight", field="request_id")
            self._streams[stream.request_id] = stream
            self._inbox.append(action)
            self._wake.notify()

    def _forget(self, stream: _Stream) -> None:
        """Nobody consumes a request any more: abort what still runs of it."""
        with self._wake:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]
                self._inbox.append(lambda core: self._abort(core, stream))
                self._wake.notify()

    # ---- the loop's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        core = self._llm._core
        dead = EngineDead("this AsyncLLM was closed; make a new one")
        try:
            while self._serve(core):
                pass
            for request_id in list(self._parts):
                core.abort(request_id)
        except Exception as error:
            _logger.error("the engine stopped", exc_info=error)
            dead = error if isinstance(error, EngineDead) else EngineDead(f"the engine's thread failed: {error}")
            dead.__cause__ = error.__cause__ if error is dead else error
        with self._wake:
            self._dead = dead
            left = list(self._streams.values())
            self._inbox.clear()
        self._parts.clear()
        for stream in left:
            stream.failure = dead
        self._notify(left)

    def _serve(self, core: EngineCore) -> bool:
        """Take what consumers asked for and run one step; False when the engine is to end."""
        with self._wake:
            while not self._inbox and not self._closing and not core.num_unfinished:
                self._wake.wait()
            if self._closing:
                return False
            actions = list(self._inbox)
            self._inbox.clear()
        for action in actions:
            action(core)
        if core.num_unfinished:
            self._publish(core.step())
        return True

    def _add(self, core: EngineCore, stream: _Stream, priority: int) -> None:
        try:
            self._llm.queue(stream.ticket, priority)
        except EngineDead:
            raise
        except DeepInferError as error:
            stream.failure = error
            self._notify([stream])
            return
        for index in range(stream.ticket.params.n):
            self._parts[stream.ticket.part_id(index)] = stream, index

    def _abort(self, core: EngineCore, stream: _Stream) -> None:
        ended = []
        for index in range(stream.ticket.params.n):
            name = stream.ticket.part_id(index)
            # Another request may have the same name by now.
            if self._parts.get(name, (None, 0))[0] is stream:
                generation = core.abort(name)
                if generation is not None:
                    ended.append(generation)
        self._publish(ended)

    def _publish(self, changed: Iterable[Generation]) -> None:
        """Tell the consumers of generations that grew or ended: one call per event loop."""
        touched: dict[int, _Stream] = {}
        for generation in changed:
            name = generation.request.request_id
            found = self._parts.get(name)
            if found is None:
                continue
            stream, index = found
            if generation.finish_reason is not None:
                del self._parts[name]
            stream.put(index, generation)
            touched[id(stream)] = stream
        self._notify(touched.values())

    def _notify(self, streams: Iterable[_Stream]) -> None:
        groups: dict[asyncio.AbstractEventLoop, list[_Stream]] = {}
        for stream in streams:
            groups.setdefault(stream.loop, []).append(stream)
        for loop, members in groups.items():
            try:
                loop.call_soon_threadsafe(_set_events, members)
            except RuntimeError:  # The event loop was closed: its consumers are gone.
                for stream in members:
                    self._forget(stream)


class _News:
    """How far a completion is: the part of a generation that may be read."""

    __slots__ = ("cumulative_logprob", "generation", "num_tokens", "reason")

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.num_tokens = len(generation.token_ids)
        self.cumulative_logprob = generation.cumulative_logprob
        self.reason = None if generation.finish_reason is None else str(generation.finish_reason)


class _Part:
    """One completion: written by the loop's thread (`news`, `pieces`), read by the consumer."""

    def __init__(self, text: TextStream | None) -> None:
        self.news: _News | None = None
        self.pieces: deque[str] = deque()
        self.decoder = text
        self.text = ""
        self.num_taken = 0
        self.ended = False


class _Stream:
    """One request between the loop's thread and its consumer; holds one state, the latest."""

    def __init__(self, ticket: Ticket, llm: LLM, delta: bool) -> None:
        self.ticket = ticket
        self.request_id = ticket.output.request_id
        self.loop = asyncio.get_running_loop()
        self.event = asyncio.Event()
        self.failure: DeepInferError | None = None
        self._llm = llm
        self._codec = llm.get_tokenizer()
        self._delta = delta
        plain = replace(ticket.params, stop=None, include_stop_str_in_output=False)
        # With stop strings the loop decodes, because it must know where they are.
        decodes = not ticket.params.stop_strings and hasattr(self._codec, "decode_stream")
        self._parts = [_Part(TextStream(self._codec, plain) if decodes else None) for _ in range(ticket.params.n)]
        self._prompt_given = False

    def put(self, index: int, generation: Generation) -> None:
        """Loop's thread: note how far a generation is."""
        part = self._parts[index]
        if generation.text is not None:
            part.pieces.append(generation.text.take())
        part.news = _News(generation)

    def take(self) -> RequestOutput | None:
        """Consumer: the state, or with `delta` what is new in it; None if nothing is."""
        ticket, outputs = self.ticket, []
        grew = False
        for index, part in enumerate(self._parts):
            news = part.news
            if news is None:
                if not self._delta:
                    outputs.append(CompletionOutput(index, "", []))
                continue
            new = news.num_tokens > part.num_taken or (news.reason is not None and not part.ended)
            grew |= new
            if new or not self._delta:
                outputs.append(self._completion(index, part, news))
        if not grew:
            return None
        return self._output(ticket, outputs)

    def _completion(self, index: int, part: _Part, news: _News) -> CompletionOutput:
        generation, start = news.generation, part.num_taken if self._delta else 0
        piece = self._decode(part, news)
        part.text += "" if self._delta else piece
        logprobs = None if generation.logprobs is None else generation.logprobs[start : news.num_tokens]
        part.num_taken, part.ended = news.num_tokens, news.reason is not None
        return CompletionOutput(
            index,
            piece if self._delta else part.text,
            generation.token_ids[start : news.num_tokens],
            finish_reason=news.reason,
            stop_reason=generation.stop_reason if part.ended else None,
            seed=self.ticket.output.outputs[index].seed,
            logprobs=self._llm.name_tokens(logprobs),
            cumulative_logprob=news.cumulative_logprob,
        )

    def _decode(self, part: _Part, news: _News) -> str:
        """The text that became certain."""
        if part.ended:
            return ""
        if part.decoder is not None:
            for token in news.generation.token_ids[part.num_taken : news.num_tokens]:
                part.decoder.push(token)
            if news.reason is not None:
                part.decoder.finish()
            return part.decoder.take()
        if news.generation.text is not None:
            return "".join(part.pieces.popleft() for _ in range(len(part.pieces)))
        if news.reason is None or self._codec is None:
            return ""  # A codec that cannot decode piece by piece gives the text at the end.
        skip = self.ticket.params.skip_special_tokens
        return str(self._codec.decode(news.generation.token_ids, skip_special=skip))

    def _output(self, ticket: Ticket, outputs: list[CompletionOutput]) -> RequestOutput:
        states = [part.news for part in self._parts]
        first = states[0]
        output = replace(ticket.output, outputs=outputs)
        output.finished = all(state is not None and state.reason is not None for state in states)
        if output.finished:
            output.error = next((state.generation.error for state in states if state and state.generation.error), None)
        if first is not None:
            generation = first.generation
            output.metrics = replace(generation.metrics)
            output.num_cached_tokens = generation.request.num_cached_tokens
            if first.num_tokens and not (self._delta and self._prompt_given):
                self._prompt_given = True
                output.prompt_logprobs = self._llm.name_tokens(generation.prompt_logprobs)
        return output


def _set_events(streams: Iterable[_Stream]) -> None:
    for stream in streams:
        stream.event.set()

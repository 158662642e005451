"""`AsyncLLM`: a model and its engine for asyncio; the step loop runs in a process of its own."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any

from deepinfer.engine.chat import CHAT_PARAMS, Chat, open_chat, split_conversations
from deepinfer.engine.front_end import FrontEnd, Ticket
from deepinfer.engine.handle import EngineHandle
from deepinfer.engine.loader import LoadedModel, load_codec, load_model
from deepinfer.engine.local import LocalEngine
from deepinfer.engine.messages import CLOSED, Loop
from deepinfer.engine.outputs import RequestOutput
from deepinfer.engine.process.client import ProcessLoop
from deepinfer.engine.prompts import Prompt, split_prompts, spread_priorities
from deepinfer.engine.streams import RequestStream, Streams
from deepinfer.engine.thread_loop import ThreadLoop
from deepinfer.errors import EngineDead, InvalidRequest
from deepinfer.observe.trace import StepTrace
from deepinfer.sampling.params import SamplingParams
from deepinfer.settings import Settings, load_settings

__all__ = ["AsyncLLM"]


class AsyncLLM(EngineHandle):
    """A model that generates for many coroutines at once. Several may live side by side; close them.

    Tokens are those of `LLM.generate`. One engine serves coroutines of any number of event loops and threads. The
    constructor blocks until the model is loaded; on an event loop use `await asyncio.to_thread(AsyncLLM, ...)`.

    Args:
        model: as in `LLM`.
        in_process: run the loop on a thread of this process instead of a process of its own. The process keeps the
            loop apart from what this one computes, and this one alive whatever happens to the device.
        num_pages, max_prefill_chunk, poison_released, settings: as in `LLM`.

    Raises:
        ConfigError, CheckpointError, AcceleratorUnavailable, CapabilityError, PluginError, CapacityError: as `LLM`.
        EngineDead: the loop's process ended before it was ready.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        in_process: bool = False,
        num_pages: int | None = None,
        max_prefill_chunk: int | None = None,
        poison_released: bool = False,
        **settings: Any,
    ) -> None:
        given = load_settings(**settings)
        options = {
            "num_pages": num_pages,
            "max_prefill_chunk": max_prefill_chunk,
            "poison_released": poison_released,
        }
        streams = Streams()
        if in_process:
            engine = LocalEngine.build(load_model(model, given), given, **options)
            self._open(streams, ThreadLoop(engine, streams), engine.codec)
            return
        loop = ProcessLoop(streams, None if model is None else str(model), given, options)
        try:
            codec = None if loop.facts.path is None else load_codec(Path(loop.facts.path), loop.facts.served_name)
        except BaseException:
            loop.close()
            raise
        self._open(streams, loop, codec)

    @classmethod
    def from_loaded(cls, loaded: LoadedModel, settings: Settings | None = None, **options: Any) -> AsyncLLM:
        """Build in this process on a model that is already in memory, shared with whoever else holds it."""
        llm = cls.__new__(cls)
        streams = Streams()
        engine = LocalEngine.build(loaded, load_settings() if settings is None else settings, **options)
        llm._open(streams, ThreadLoop(engine, streams), engine.codec)
        return llm

    def _open(self, streams: Streams, loop: Loop, codec: Any) -> None:
        self._front = FrontEnd(loop.facts, codec)
        self._streams = streams
        self._loop = loop
        streams.abandon = loop.abort
        # Runs when this object is collected or the interpreter exits; the loop knows nothing of this object.
        self._closer = weakref.finalize(self, loop.close)

    @property
    def loop_pid(self) -> int:
        """Id of the process that turns the loop; this one's with `in_process`."""
        return self._loop.pid

    @property
    def stats(self) -> Any:
        """Counts of the step loop since the start (`EngineStats`)."""
        return self._loop.stats

    def metrics_text(self) -> str:
        """As `LLM.metrics_text`. Waits for the step in flight: off the event loop, on a thread."""
        self._check_alive()
        return self._loop.metrics_text()

    def trace(self) -> StepTrace:
        """As `LLM.trace`."""
        self._check_alive()
        return self._loop.trace()

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
        ticket = await self._check(items[0], sampling_params, add_bos, request_id)
        async with aclosing(self._serve(ticket, priority, delta)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | dict[str, Any] | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        priority: int = 0,
        delta: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one conversation, yielding outputs as in `generate`; the last one has the answer in `message`.

        With `delta` no output holds the whole answer, and `message` stays None.

        Args:
            messages, tools, options: as in `LLM.chat`.
            sampling_params, request_id, priority, delta: as in `generate`; without `sampling_params` the answer may
                reach up to the end of the context.

        Raises:
            InvalidRequest, CapacityError, RequestFailed, EngineDead: as in `generate`, `LLM.chat`.
        """
        self._check_alive()
        conversations, _ = split_conversations(messages)
        if len(conversations) > 1:
            raise InvalidRequest(f"holds {len(conversations)} conversations; call chat once for each", field="messages")
        params = CHAT_PARAMS if sampling_params is None else sampling_params
        chat: Chat = await asyncio.to_thread(open_chat, self._front, conversations[0], params, tools, options)
        ticket = await self._check(chat.prompt, params, False, request_id)
        async with aclosing(self._serve(ticket, priority, delta)) as outputs:
            async for output in outputs:
                if output.finished and not delta:
                    chat.read(output)
                yield output

    async def _check(self, item: Prompt, params: Any, add_bos: bool, request_id: str | None) -> Ticket:
        """Validate one request, raising what is wrong with it."""
        arguments = (item, params, add_bos, self._new_id(request_id))
        # Long texts take a while to encode: not on the event loop.
        encodes = item.token_ids is None
        ticket = await asyncio.to_thread(self._front.check, *arguments) if encodes else self._front.check(*arguments)
        if ticket.output.error is not None:
            raise ticket.output.error
        return ticket

    async def _serve(self, ticket: Ticket, priority: int, delta: bool) -> AsyncGenerator[RequestOutput, None]:
        """Hand a checked request to the loop and yield what comes of it."""
        stream = RequestStream(ticket, self._front, delta)
        order = ticket.order(self._front.next_number(), spread_priorities(priority, 1)[0])
        self._check_alive()
        self._streams.add(order.number, stream)
        try:
            self._loop.submit(order)
            while True:
                await stream.event.wait()
                stream.event.clear()
                failure = stream.failure
                output = stream.take()
                if output is not None:
                    yield output
                if output is not None and output.finished:
                    if output.error is not None:
                        raise output.error
                    return
                if failure is not None:
                    raise failure
        finally:
            if self._streams.remove(order.number):
                self._loop.abort(order.number)

    def abort(self, request_id: str) -> bool:
        """End a request; its iterator yields what there is with finish reason "abort". False if it is unknown."""
        number = self._streams.number_of(request_id)
        if number is not None:
            self._loop.abort(number)
        return number is not None

    def close(self) -> None:
        """End the loop and free caches and weights; iterators still waiting raise `EngineDead`. Blocks for a step."""
        self._closer()

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

    def _new_id(self, given: str | None) -> str:
        if given is None:
            return next(name for name in iter(self._front.next_name, None) if name not in self._streams)
        if not isinstance(given, str) or not given:
            raise InvalidRequest(f"{given!r} is not a text of at least one character", field="request_id")
        return given

    def _check_alive(self) -> None:
        self._streams.check_alive()
        if not self._closer.alive:
            raise EngineDead(CLOSED)

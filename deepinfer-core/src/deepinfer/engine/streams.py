"""Requests as their consumers see them: what the loop says is kept, merged, until somebody asks for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from deepinfer.engine.front_end import FrontEnd, Ticket
from deepinfer.engine.messages import Update
from deepinfer.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobs
from deepinfer.engine.stops import TextStream
from deepinfer.errors import DeepInferError, EngineDead, InvalidRequest

__all__ = ["RequestStream", "Streams"]


class _Part:
    """One completion: `waiting` is what was said and not taken yet, the rest what was taken."""

    def __init__(self, decoder: TextStream | None) -> None:
        self.waiting: Update | None = None
        self.decoder = decoder
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.text = ""
        self.last: Update | None = None

    @property
    def has_ended(self) -> bool:
        return self.last is not None and self.last.finish_reason is not None


class RequestStream:
    """One request between the loop and its consumer: at most one output waits, however far the consumer is behind.

    Made on the consumer's event loop. `put` and `fail` may be called on any thread, `take` by the consumer only.

    Args:
        ticket: the checked request. front_end: decodes it.
        delta: outputs hold what is new, not everything so far.
    """

    def __init__(self, ticket: Ticket, front_end: FrontEnd, delta: bool) -> None:
        self.ticket = ticket
        self.request_id = ticket.output.request_id
        self.loop = asyncio.get_running_loop()
        self.event = asyncio.Event()
        self.failure: DeepInferError | None = None
        self._front_end = front_end
        self._delta = delta
        self._lock = threading.Lock()
        plain = replace(ticket.params, stop=None, include_stop_str_in_output=False)
        # With stop strings the loop decodes, because it must know where they are.
        decodes = not ticket.params.stop_strings and hasattr(front_end.codec, "decode_stream")
        self._parts = [_Part(TextStream(front_end.codec, plain) if decodes else None) for _ in range(ticket.params.n)]
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None

    def put(self, update: Update) -> None:
        """Note what the loop said."""
        with self._lock:
            part = self._parts[update.index]
            if part.waiting is None:
                part.waiting = update
            else:
                part.waiting.absorb(update)

    def take(self) -> RequestOutput | None:
        """The state, or with `delta` what is new in it; None if nothing is."""
        with self._lock:
            news = [part.waiting for part in self._parts]
            for part in self._parts:
                part.waiting = None
        if not any(update is not None and (update.token_ids or update.finish_reason) for update in news):
            return None
        outputs = []
        for index, (part, update) in enumerate(zip(self._parts, news, strict=True)):
            if update is not None:
                outputs.append(self._grow(index, part, update))
            elif not self._delta:
                outputs.append(self._whole(index, part))
        return self._output(outputs, None if news[0] is None else news[0].prompt_logprobs)

    def _grow(self, index: int, part: _Part, update: Update) -> CompletionOutput:
        piece = self._decode(part, update)
        logprobs = self._front_end.name_tokens(update.logprobs)
        part.last = update
        if not self._delta:
            part.text += piece
            part.token_ids += update.token_ids
            part.logprobs = logprobs if part.logprobs is None else [*part.logprobs, *(logprobs or ())]
            return self._whole(index, part)
        return self._completion(index, update, piece, update.token_ids, logprobs)

    def _whole(self, index: int, part: _Part) -> CompletionOutput:
        if part.last is None:
            return CompletionOutput(index, "", [], seed=self.ticket.seed)
        logprobs = None if part.logprobs is None else list(part.logprobs)
        return self._completion(index, part.last, part.text, list(part.token_ids), logprobs)

    def _completion(
        self, index: int, update: Update, text: str, ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> CompletionOutput:
        return CompletionOutput(
            index,
            text,
            ids,
            finish_reason=update.finish_reason,
            stop_reason=update.stop_reason,
            seed=self.ticket.seed,
            logprobs=logprobs,
            cumulative_logprob=update.cumulative_logprob,
        )

    def _decode(self, part: _Part, update: Update) -> str:
        """The text that became certain."""
        if part.decoder is not None:
            for token in update.token_ids:
                part.decoder.push(token)
            if update.finish_reason is not None:
                part.decoder.finish()
            return part.decoder.take()
        if update.text is not None:
            return update.text
        if update.finish_reason is None:
            return ""  # A codec that cannot decode piece by piece gives the text at the end.
        return self._front_end.decode([*part.token_ids, *update.token_ids], self.ticket.params.skip_special_tokens)

    def _output(
        self, outputs: list[CompletionOutput], prompt_logprobs: list[TokenLogprobs | None] | None
    ) -> RequestOutput:
        named = self._front_end.name_tokens(prompt_logprobs)
        if not self._delta:
            self._prompt_logprobs = named = named or self._prompt_logprobs
        first = self._parts[0].last
        metrics = None if first is None else RequestMetrics(**vars(first.metrics))
        finished = all(part.has_ended for part in self._parts)
        errors = [part.last.error for part in self._parts if part.last is not None and part.last.error is not None]
        asked = self.ticket.output
        return RequestOutput(
            asked.request_id,
            asked.prompt,
            asked.prompt_token_ids,
            outputs,
            finished=finished,
            error=errors[0] if finished and errors else None,
            num_cached_tokens=0 if first is None else first.num_cached_tokens,
            numerics_id=asked.numerics_id,
            metrics=metrics,
            prompt_logprobs=named,
        )


class Streams:
    """The requests in flight of one front end; the `Listener` of its loop.

    Attributes:
        abandon: called with the number of an order whose consumers' event loop has ended.
    """

    def __init__(self) -> None:
        self.abandon: Callable[[int], None] = lambda number: None
        self._lock = threading.Lock()
        self._by_number: dict[int, RequestStream] = {}
        self._numbers: dict[str, int] = {}
        self._end: EngineDead | None = None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._numbers

    def __len__(self) -> int:
        return len(self._by_number)

    def check_alive(self) -> None:
        """Raise `EngineDead` if the loop has ended."""
        if self._end is not None:
            raise _copy(self._end)

    def number_of(self, request_id: str) -> int | None:
        """The order of a request in flight; None if it is unknown."""
        return self._numbers.get(request_id)

    def add(self, number: int, stream: RequestStream) -> None:
        """Expect updates for a request.

        Raises:
            InvalidRequest: its id is in flight.
            EngineDead: the loop has ended.
        """
        with self._lock:
            self.check_alive()
            if stream.request_id in self._numbers:
                raise InvalidRequest(f"{stream.request_id!r} is already in flight", field="request_id")
            self._by_number[number] = stream
            self._numbers[stream.request_id] = number

    def remove(self, number: int) -> bool:
        """Expect nothing more for a request; False if nothing was expected."""
        with self._lock:
            stream = self._by_number.pop(number, None)
            if stream is not None:
                del self._numbers[stream.request_id]
        return stream is not None

    # ---- the loop's listener -----------------------------------------------------------------------------------------

    def deliver(self, updates: Iterable[Update], refused: Mapping[int, DeepInferError]) -> None:
        """Merge what the loop said and wake the consumers: one call for each event loop."""
        touched: dict[int, RequestStream] = {}
        for update in updates:
            stream = self._by_number.get(update.number)
            if stream is not None:
                stream.put(update)
                touched[update.number] = stream
        for number, error in refused.items():
            stream = self._by_number.get(number)
            if stream is not None:
                stream.failure = error
                touched[number] = stream
        self._wake(touched)

    def end(self, error: EngineDead) -> None:
        """Fail every request, now and later."""
        with self._lock:
            self._end = self._end or error
            left = dict(self._by_number)
        for stream in left.values():
            stream.failure = stream.failure or _copy(error)
        self._wake(left)

    def _wake(self, touched: Mapping[int, RequestStream]) -> None:
        groups: dict[asyncio.AbstractEventLoop, list[int]] = {}
        for number, stream in touched.items():
            groups.setdefault(stream.loop, []).append(number)
        for loop, numbers in groups.items():
            try:
                loop.call_soon_threadsafe(_set_events, [touched[number] for number in numbers])
            except RuntimeError:  # The event loop was closed: its consumers are gone.
                for number in numbers:
                    if self.remove(number):
                        self.abandon(number)


def _copy(error: EngineDead) -> EngineDead:
    """An error of its own for each who raises it: a traceback belongs to one of them."""
    copy = EngineDead(str(error))
    copy.__cause__ = error.__cause__
    return copy


def _set_events(streams: Iterable[RequestStream]) -> None:
    for stream in streams:
        stream.event.set()

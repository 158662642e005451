"""Generated ids to protocol events: whole characters only, no special token as text, every id counted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import deepseek_recipe as recipe

from .chat import FinishReason, ProtocolName, StreamEvent, TokenLogprobs, ToolCallProblem
from .detokenize import REPLACEMENT
from .errors import CodecError

if TYPE_CHECKING:
    from .codec import RecipeCodec

__all__ = ["OutputReader", "ParseState"]

_RESPONSES: dict[str, type[Any]] = {
    "chat": recipe.ChatCompletionResponse,
    "responses": recipe.ResponsesResponse,
    "messages": recipe.MessagesResponse,
}
_REASONS = {
    "stop": recipe.InferenceFinishReason.Stop,
    "length": recipe.InferenceFinishReason.Length,
    "content_filter": recipe.InferenceFinishReason.ContentFilter,
    "abort": None,
}


@dataclass(frozen=True)
class ParseState:
    """What the reader of an output must know about its prompt."""

    protocol: ProtocolName
    request: recipe.ConversationRequest
    parsing: recipe.ParsingOptions
    namespaces: dict[str, tuple[str, str]]
    echo: recipe.ResponsesEcho | None

    def generator(self, id: str, model: str) -> Any:
        """A new chunk generator (each can be used once)."""
        if self.protocol == "chat":
            return recipe.ChatCompletionRequest.chunk_generator(self.request, id, model)
        if self.protocol == "messages":
            return recipe.MessagesRequest.chunk_generator(self.request, id, model)
        generator = recipe.ResponsesRequest.chunk_generator(self.request, id, model)
        if self.namespaces:
            generator = generator.with_namespace_tool_map(self.namespaces)
        return generator if self.echo is None else generator.with_echo(self.echo)


class OutputReader:
    """The `OutputStream` over deepseek-recipe's processor.

    The processor loses text when a push ends inside a character, shows special tokens as text and ignores unknown ids.
    So ids reach it in groups that end with a character, special ids never do, and ids that give no text are counted
    with the closing event. Every pushed id counts as a completion token, a stripped end-of-sequence id as well.

    Where the request declares no tools, a tool block that the model writes regardless is cut off the text.
    """

    def __init__(
        self,
        codec: RecipeCodec,
        tokenizer: recipe.Tokenizer,
        state: ParseState,
        *,
        id: str,
        model: str,
        prompt_tokens: int,
        cached_tokens: int,
    ) -> None:
        self._codec = codec
        self._processor = recipe.StreamProcessor(state.generator(id, model), state.parsing, tokenizer)
        self._response = _RESPONSES[state.protocol](id, model, int(time.time()), prompt_tokens, cached_tokens)
        self._protocol = state.protocol
        self._usage = recipe.PromptUsage(prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=cached_tokens)
        self._cuts_calls = not state.parsing.parse_tool_calls
        self._swallowing = False
        self._characters = codec.vocabulary.open_stream(skip_special=False)
        self._group: list[int] = []
        self._group_text = ""
        self._group_logprobs: list[TokenLogprobs] = []
        self._uncounted = 0
        self._inputs: list[tuple[str, list[str]]] = []
        self._started = self._ended = False
        self.completion_tokens = 0
        """Ids pushed so far."""
        self.problems: tuple[ToolCallProblem, ...] = ()
        """Tool calls without a name or with arguments that are not a JSON object; known after the last event."""

    @property
    def finished(self) -> bool:
        """Whether nothing more is expected: a stop string was found, or `finish` or `close` was called."""
        return self._ended or self._processor.finished

    def start(self) -> list[StreamEvent]:
        """The opening events, once; [] after `close`."""
        if self._started or self._ended:
            return []
        self._started = True
        return self._send(recipe.InferenceChunk.ready(prompt_usage=self._usage))

    def push(self, token_ids: Iterable[int], logprobs: Sequence[TokenLogprobs] | None = None) -> list[StreamEvent]:
        """Events of further ids, one (log probability, alternatives) per id if the request wants them.

        Ids after the end are ignored. Raises `CodecError` (500) for an id outside the vocabulary or a wrong number of
        log probabilities; nothing of that push is then taken.
        """
        ids = [self._checked(token) for token in token_ids]
        if logprobs is not None and len(logprobs) != len(ids):
            raise CodecError(500, self._protocol, f"{len(logprobs)} log probabilities for {len(ids)} ids", "logprobs")
        events = self.start()
        for index, token in enumerate(ids):
            if self.finished:
                break
            self.completion_tokens += 1
            events += self._take(token, None if logprobs is None else logprobs[index])
        return events

    def finish(self, reason: FinishReason) -> list[StreamEvent]:
        """The closing events; [] if the output was closed before.

        "abort" closes without a reason of its own: protocols have none, they show a normal stop.
        """
        if reason not in _REASONS:
            raise ValueError(f"finish reason must be one of {sorted(_REASONS)}, not {reason!r}")
        events = self.start()
        if self._ended:
            return events
        if not self._processor.finished:
            events += self._flush()
            events += self._count_rest()
            native = _REASONS[reason]
            if native is not None:
                events += self._send(recipe.InferenceChunk.finish(native))
            events += self._collect(self._processor.finish)
        self._ended = True
        found = (_problem(index, name, arguments) for index, (name, arguments) in enumerate(self._calls()))
        self.problems = tuple(problem for problem in found if problem is not None)
        return events

    def result(self) -> dict[str, Any]:
        """The whole response so far as one body."""
        return json.loads(self._response.to_json())

    def close(self) -> None:
        """Drop the native state."""
        self._ended = True
        self._processor.close()

    def _checked(self, token: int) -> int:
        try:
            return self._codec.check_id(token)
        except CodecError as error:
            raise CodecError(500, self._protocol, error.message, "token_ids") from error

    def _take(self, token: int, logprobs: TokenLogprobs | None) -> list[StreamEvent]:
        if self._swallowing:
            self._uncounted += 1
            return []
        if token in self._codec.vocabulary.hidden_ids or token in self._codec.eos_ids:
            events = self._flush()
            self._uncounted += 1
            return events
        if token == self._codec.dsml_id and self._cuts_calls:
            return self._cut_call()
        if token in self._codec.marker_ids:
            return self._flush() + self._send_ids([token], logprobs and [logprobs])
        self._group.append(token)
        self._group_text += self._characters.push([token])
        if logprobs is not None:
            self._group_logprobs.append(logprobs)
        if self._characters.held or (self._cuts_calls and self._group_text.endswith(("<", "</"))):
            return []
        return self._flush()

    def _cut_call(self) -> list[StreamEvent]:
        """A tool block begins that nobody asked for: drop its opening bracket and all that follows."""
        self._group_text = self._group_text.removesuffix("/").removesuffix("<")
        self._swallowing = True
        events = self._flush(as_text=True)
        self._uncounted += 1
        return events

    def _flush(self, *, as_text: bool = False) -> list[StreamEvent]:
        """Send the held ids; an unfinished character becomes U+FFFD."""
        if not self._group:
            return []
        ids, text, logprobs = self._group, self._group_text, self._group_logprobs
        if self._characters.held:
            text += self._characters.finish()
        self._group, self._group_text, self._group_logprobs = [], "", []
        # the processor would wait for the rest of what it takes for an unfinished character
        if as_text or text.endswith(REPLACEMENT):
            return self._send(recipe.InferenceChunk.text(text, len(ids)))
        return self._send_ids(ids, logprobs or None)

    def _send_ids(self, ids: list[int], logprobs: Sequence[TokenLogprobs] | None) -> list[StreamEvent]:
        return self._send(recipe.InferenceChunk.tokens(ids, logprobs))

    def _count_rest(self) -> list[StreamEvent]:
        count, self._uncounted = self._uncounted, 0
        return self._send(recipe.InferenceChunk.text("", count)) if count else []

    def _send(self, chunk: recipe.InferenceChunk) -> list[StreamEvent]:
        return self._collect(lambda: self._processor.push(chunk))

    def _collect(self, produce: Callable[[], list[Any]]) -> list[StreamEvent]:
        events = []
        for chunk in produce():
            event = StreamEvent(self._response.sse_event_name(chunk), chunk.to_json())
            self._note_input(event)
            events.append(event)
            self._response.accumulate(chunk)
        return events

    def _note_input(self, event: StreamEvent) -> None:
        """Keep what a Messages tool call is written as: the whole response shows {} where it is not JSON."""
        if self._protocol == "messages" and ('"tool_use"' in event.data or '"input_json_delta"' in event.data):
            data = json.loads(event.data)
            if data["type"] == "content_block_start":
                self._inputs.append((data["content_block"]["name"], []))
            elif data["type"] == "content_block_delta":
                self._inputs[-1][1].append(data["delta"]["partial_json"])

    def _calls(self) -> Iterable[tuple[str, str]]:
        """Name and arguments, as written, of each tool call so far."""
        if self._protocol == "messages":
            yield from ((name, "".join(pieces)) for name, pieces in self._inputs)
        elif self._protocol == "chat":
            for choice in self.result()["choices"]:
                for call in choice["message"].get("tool_calls") or []:
                    yield call["function"]["name"], call["function"]["arguments"]
        else:
            for item in self.result()["output"]:
                if item["type"] == "function_call":
                    yield item["name"], item["arguments"]


def _problem(index: int, name: str, arguments: str) -> ToolCallProblem | None:
    if not name:
        return ToolCallProblem(index, name, arguments, "no tool name")
    try:
        value = json.loads(arguments)
    except ValueError as error:
        return ToolCallProblem(index, name, arguments, f"not JSON: {error}")
    return None if isinstance(value, dict) else ToolCallProblem(index, name, arguments, "not a JSON object")

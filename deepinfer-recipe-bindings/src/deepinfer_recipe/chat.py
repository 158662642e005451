"""What encoding a chat gives, and the interface of a codec."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from .detokenize import DecodeStream

__all__ = [
    "Codec",
    "Constraint",
    "EncodedChat",
    "FinishReason",
    "OutputStream",
    "ProtocolName",
    "Sampling",
    "StreamEvent",
    "TokenLogprobs",
    "ToolCallProblem",
]

ProtocolName = Literal["chat", "responses", "messages"]
FinishReason = Literal["stop", "length", "content_filter", "abort"]
TokenLogprobs = tuple[float, Sequence[tuple[int, float]]]
"""(log probability of the token, [(alternative id, its log probability), ...])."""


@dataclass(frozen=True)
class Sampling:
    """Sampling wishes of a request. None (or an empty value) means that the request says nothing.

    `stop` is informative: the output stream itself finds stop strings and then says `finished`.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    n: int = 1
    logprobs: bool = False
    top_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    thinking_budget: int | None = None


@dataclass(frozen=True)
class Constraint:
    """A form that the output must have; whoever runs the model has to enforce it or refuse the request.

    `kind` and `schema`: "json" (JSON Schema text, "" for any JSON value), "regex" (the expression), "tool_call" and
    "tool_call_required" (JSON array of tools that may, or must, be called).
    """

    kind: str
    schema: str


@dataclass(frozen=True)
class EncodedChat:
    """A chat as the model reads it.

    Attributes:
        protocol: which body it came from.
        model: the model name that the body asked for.
        token_ids: the prompt, with begin-of-sequence; one placeholder id per image.
        sampling: what the body says about sampling.
        constraint: the form that the output must have, or None.
        image_sources: the images behind the placeholders, in prompt order (objects of deepseek-recipe).
        stream: whether the body asks for a stream.
        parse_state: what `open_stream` needs to read the output of exactly this prompt; opaque.
    """

    protocol: ProtocolName
    model: str
    token_ids: list[int]
    sampling: Sampling
    constraint: Constraint | None
    image_sources: tuple[Any, ...]
    stream: bool
    parse_state: Any = field(repr=False)
    resolve: Callable[[int, int], int] = field(repr=False, compare=False)

    def resolve_max_tokens(self, context_limit: int, extra_prompt_tokens: int = 0) -> int:
        """Output token limit inside a context of `context_limit` tokens (at least 1).

        The request's own limit, or the protocol's default shortened to the room that is left.
        `extra_prompt_tokens` counts image tokens beyond one placeholder each. Raises `CodecError` if prompt and asked
        output do not fit.
        """
        return self.resolve(len(self.token_ids) + extra_prompt_tokens, context_limit)


class StreamEvent(NamedTuple):
    """One server-sent event: its name (None for plain data) and its data, a JSON text."""

    event: str | None
    data: str


@dataclass(frozen=True)
class ToolCallProblem:
    """A tool call without a name or whose arguments are not a JSON object: as the model wrote it, not repaired."""

    index: int
    name: str
    arguments: str
    reason: str


class OutputStream(Protocol):
    """Turns the generated ids of one choice into protocol events."""

    @property
    def finished(self) -> bool:
        """Whether the output is complete (a stop string was found, or `finish` was called): stop generating."""

    def start(self) -> list[StreamEvent]:
        """The opening events; `push` and `finish` give them too if nobody asked before."""

    def push(self, token_ids: Iterable[int], logprobs: Sequence[TokenLogprobs] | None = None) -> list[StreamEvent]:
        """Events of further ids; the text does not depend on how ids are cut into pushes."""

    def finish(self, reason: FinishReason) -> list[StreamEvent]:
        """The closing events."""

    def result(self) -> dict[str, Any]:
        """The whole response, as a request without streaming gets it."""

    def close(self) -> None:
        """Drop the state, for an output that nobody wants any more."""


class Codec(Protocol):
    """Text, chats and outputs of one model, as ids."""

    vocab_size: int
    eos_ids: frozenset[int]
    bos_id: int | None

    def encode_text(self, text: str, *, allow_special: bool = False, add_bos: bool = False) -> list[int]:
        """Ids of a text."""

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids."""

    def decode_stream(self, *, skip_special: bool = True) -> DecodeStream:
        """A detokeniser for one output."""

    def encode_chat(self, protocol: ProtocolName, body: bytes | str | dict[str, Any]) -> EncodedChat:
        """Ids and wishes of a chat."""

    def open_stream(
        self,
        chat: EncodedChat,
        *,
        id: str,
        model: str | None = None,
        prompt_tokens: int | None = None,
        cached_tokens: int = 0,
    ) -> OutputStream:
        """Reader of one choice of the chat's output."""

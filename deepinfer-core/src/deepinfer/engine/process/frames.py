"""What crosses between the front end and the process of a loop: plain typed structs as MessagePack, never pickled.

A frame is its length (8 bytes, little-endian) and one struct. The first frame is `Hello`, with the version of the
sender in front of everything that a version may change. The loop answers with `Progress` until it sends `Ready` or
`Failed`. From then on the front end sends `Commands` and the loop `News`, each with all that has come together since
the frame before; the last one is `Ended`, unless the process died.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from deepinfer import __version__
from deepinfer.engine.generation import EngineStats
from deepinfer.engine.messages import EngineFacts, Order, Update
from deepinfer.engine.process.counts import SpeculationFrame, pack_speculation, unpack_speculation
from deepinfer.engine.process.errors import ErrorFrame, pack_error, unpack_error
from deepinfer.errors import DeepInferError
from deepinfer.observe.trace import Counts, Span
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.structured import StructuredOutput
from deepinfer.speculative.statistics import SpeculationStatistics

__all__ = [
    "PROTOCOL",
    "Abort",
    "Ask",
    "Commands",
    "Ended",
    "Failed",
    "FrameDecoder",
    "Hello",
    "LogEntry",
    "News",
    "OrderFrame",
    "Progress",
    "Ready",
    "Setup",
    "decode_command",
    "decode_news",
    "encode",
    "pack",
]

PROTOCOL = f"deepinfer-loop-1 {__version__}"
"""Both sides must say the same."""

LENGTH_BYTES = 8


class Setup(msgspec.Struct):
    """What the loop is to run: a model, every setting, and the other arguments of `build_engine`."""

    model: str | None
    settings: dict[str, Any]
    options: dict[str, Any]
    log_level: int


class Hello(msgspec.Struct, tag=True):
    """First frame: who speaks, and a `Setup` that only the same version reads."""

    protocol: str
    setup: msgspec.Raw


class OrderFrame(msgspec.Struct, tag=True, array_like=True):
    """An `Order`: prompt as int64 bytes, sampling parameters as the fields that differ from their defaults."""

    number: int
    request_id: str
    prompt: bytes
    params: dict[str, Any]
    seed: int
    max_tokens: int
    priority: int

    @classmethod
    def of(cls, order: Order) -> OrderFrame:
        """Pack an order."""
        prompt = order.prompt.astype("<i8").tobytes()
        params = _changed(order.params)
        return cls(order.number, order.request_id, prompt, params, order.seed, order.max_tokens, order.priority)

    def order(self) -> Order:
        """Unpack it."""
        prompt = np.frombuffer(self.prompt, "<i8").astype(np.int64)
        params = SamplingParams(**self.params)
        return Order(self.number, self.request_id, prompt, params, self.seed, self.max_tokens, self.priority)


def _changed(value: SamplingParams | StructuredOutput) -> dict[str, Any]:
    """Fields of a dataclass in normal form that differ from their defaults."""
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    found = {field.name: found[field.name] for field in fields(value) if found[field.name] != field.default}
    return {name: _changed(item) if isinstance(item, StructuredOutput) else item for name, item in found.items()}


class Abort(msgspec.Struct, tag=True, array_like=True):
    """End what runs of an order."""

    number: int


class Ask(msgspec.Struct, tag=True, array_like=True):
    """Wanted in the next `News`: the metrics, under a number; or the spans of every step from now on."""

    number: int
    what: str


class Commands(msgspec.Struct, tag=True):
    """What the front end wants, in order. The sender may give items that it has packed before."""

    items: list[OrderFrame | Abort | Ask]


def pack(item: OrderFrame | Abort | Ask) -> msgspec.Raw:
    """An item as it will be sent, so that what cannot be sent is found by whoever asks for it.

    Raises:
        UnicodeEncodeError: a text holds a lone surrogate.
    """
    return msgspec.Raw(_encoder.encode(item))


class LogEntry(msgspec.Struct, array_like=True):
    """A log record of the loop's process."""

    logger: str
    level: int
    message: str


class Progress(msgspec.Struct, tag=True):
    """What a loop is doing before it is ready."""

    text: str
    logs: list[LogEntry] = []


class Ready(msgspec.Struct, tag=True):
    """The loop takes orders."""

    facts: EngineFacts
    logs: list[LogEntry] = []


class Failed(msgspec.Struct, tag=True):
    """The loop could not start."""

    error: ErrorFrame
    logs: list[LogEntry] = []


class News(msgspec.Struct, tag=True):
    """What happened: updates, refused orders by number, counts, answers by number, and what a trace recorded."""

    updates: list[Update] = []
    refused: dict[int, DeepInferError] = {}
    stats: EngineStats | None = None
    answers: dict[int, str] = {}
    spans: list[Span] = []
    counters: list[Counts] = []
    logs: list[LogEntry] = []


class Ended(msgspec.Struct, tag=True):
    """The loop has ended; nothing follows."""

    error: ErrorFrame
    logs: list[LogEntry] = []


def _to_plain(value: Any) -> Any:
    if isinstance(value, DeepInferError):
        return pack_error(value)
    if isinstance(value, SpeculationStatistics):
        return pack_speculation(value)
    raise NotImplementedError(type(value))


def _from_plain(kind: Any, value: Any) -> Any:
    if kind is DeepInferError:
        return unpack_error(msgspec.convert(value, ErrorFrame))
    if kind is SpeculationStatistics:
        return unpack_speculation(msgspec.convert(value, SpeculationFrame))
    raise NotImplementedError(kind)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_commands = msgspec.msgpack.Decoder(Hello | Commands)
_news = msgspec.msgpack.Decoder(Progress | Ready | Failed | News | Ended, dec_hook=_from_plain)


def encode(message: msgspec.Struct) -> bytes:
    """A frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def decode_command(body: bytes | bytearray | memoryview) -> Hello | Commands:
    """What the front end sent.

    Raises:
        msgspec.DecodeError: it is no such message.
    """
    return _commands.decode(body)


def decode_news(body: bytes | bytearray | memoryview) -> Progress | Ready | Failed | News | Ended:
    """What the loop sent; errors as `decode_command`."""
    return _news.decode(body)


class FrameDecoder:
    """Cuts a stream of bytes into the bodies of frames, however they arrive."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, part: bytes) -> list[bytes]:
        """Take bytes; the bodies that became complete."""
        self._bytes += part
        bodies, start = [], 0
        while len(self._bytes) - start >= LENGTH_BYTES:
            begin = start + LENGTH_BYTES
            end = begin + int.from_bytes(self._bytes[start:begin], "little")
            if len(self._bytes) < end:
                break
            bodies.append(bytes(self._bytes[begin:end]))
            start = end
        del self._bytes[:start]
        return bodies
